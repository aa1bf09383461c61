"""What the learner has reached, and the hints taken: a JSON file in the user's data folder (REFIMPL_DATA overrides)."""

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from refimpl.grading.chapters import Chapter, unwritten
from refimpl.grading.verdict import Outcome, Verdict
from refimpl.userdata import data_folder, replace, set_aside


@dataclass
class Entry:
    """One task's last grading. `passed` stays true once it was."""

    outcome: Outcome = "todo"
    headline: str = ""
    passed: bool = False
    hints: int = 0  # hints given so far


@dataclass
class Progress:
    path: Path
    entries: dict[str, Entry] = field(default_factory=dict)  # "01_collectives/ring_all_gather" -> its entry

    @classmethod
    def load(cls, folder: Path | None = None) -> "Progress":
        """Read the file; none is an empty one. A damaged file is set aside under another name, and that is said."""
        path = (folder or data_folder()) / "exercises.json"
        if not path.exists():
            return cls(path)
        try:
            stored: dict[str, Any] = json.loads(path.read_text())
            return cls(path, {key: Entry(**entry) for key, entry in stored.items()})
        except (ValueError, TypeError, AttributeError) as reason:
            print(f"your progress could not be read ({reason}); it is kept as {set_aside(path)}", file=sys.stderr)
            return cls(path)

    def entry(self, chapter: str, task: str) -> Entry:
        return self.entries.setdefault(f"{chapter}/{task}", Entry())

    def stands(self, chapter: Chapter, task: str) -> bool:
        """Whether the learner's answer is there, and its last grading passed it."""
        graded = self.entry(chapter.name, task).outcome
        return graded == "pass" and chapter.exercise.is_file() and not unwritten(chapter.exercise, task)

    def record(self, verdicts: Mapping[tuple[str, str], Verdict]) -> None:
        """Keep these results, and save."""
        for (chapter, task), verdict in verdicts.items():
            entry = self.entry(chapter, task)
            entry.outcome, entry.headline = verdict.outcome, verdict.headline
            entry.passed |= verdict.outcome == "pass"
        self.save()

    def save(self) -> None:
        """Where it cannot be written, that is said: a verdict or a hint is of use without it."""
        try:
            replace(self.path, json.dumps({key: asdict(entry) for key, entry in self.entries.items()}, indent=1) + "\n")
        except OSError as reason:
            remedy = "set REFIMPL_DATA to a folder that you can write"
            print(f"your progress is not kept, {self.path}: {reason.strerror}; {remedy}", file=sys.stderr)


def bar(done: int, of: int, width: int = 20) -> str:
    """ "[#####...............]" """
    filled = width * done // of if of else 0
    return f"[{'#' * filled}{'.' * (width - filled)}]"
