"""`refimpl exercise watch`: what is graded at the start and after a save."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from refimpl.cli import watch
from refimpl.grading.chapters import Chapter, project_folder
from refimpl.grading.grade import Grader
from refimpl.grading.live import Live
from refimpl.grading.stubs import stub

NAME = "01_collectives"


class Folder(Chapter):
    """The chapter, with an exercise file of its own."""

    @property
    def exercise(self) -> Path:
        return self.root / "exercise.py"

    @property
    def solution(self) -> Path:
        return project_folder() / "solutions" / f"{self.name}.py"

    @property
    def grader(self) -> Path:
        return project_folder() / "exercises" / self.name / f"test_{self.name}.py"


def test_a_save_grades_what_it_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REFIMPL_DATA", str(tmp_path))
    chapter, console = Folder(NAME, tmp_path), Console(file=io.StringIO(), width=100)
    before = stub(chapter.solution.read_text())
    chapter.exercise.write_text(before.replace('raise NotImplementedError("ring_all_gather")', "return x"))
    with Grader() as grader:
        live = Live(chapter, grader)
        live.warm()
        assert sorted(grader.worlds) == sorted({n for e in live.exercises.values() for n in e.ranks})
        after = watch.changed(live, before, console)
        assert after == chapter.exercise.read_text()
        chapter.exercise.write_text(f"{after}\nSHARED = 1\n")  # concerns all tasks, of which one is written
        after = watch.changed(live, after, console)
        chapter.exercise.write_text("def ring_all_gather(:\n")
        watch.changed(live, after, console)
    said = console.file.getvalue()  # type: ignore[attr-defined]
    first, _, second = said.partition("ring_reduce_scatter")
    assert first.count("fail  ring_all_gather") == 2
    assert "todo" not in said
    assert "line 1 is not Python" in second


def test_without_a_file_there_is_nothing_to_watch(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="refimpl exercise reset 01_collectives"):
        watch.run(Folder(NAME, tmp_path))
