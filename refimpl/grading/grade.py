"""In the caller: run a grader's check on each number of ranks, and make one short text of whatever happened."""

import re
import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from refimpl import launch
from refimpl.grading.chapters import parsed, unwritten
from refimpl.grading.cheats import cheat
from refimpl.grading.compare import Todo, Wrong, WrongFile
from refimpl.grading.rank import ALIVE, NO_MEMORY, Check, grade_here, not_python
from refimpl.grading.traffic import Called, each_rank
from refimpl.grading.verdict import Verdict

PRINTED = 15  # lines of the learner's own output shown with a failure
LONGEST = 200  # characters of a line
CALLS = 2000  # collectives of one rank in one case: more is a loop without end
LONGEST_GRADING = 120.0  # seconds, for one number of ranks


@dataclass(frozen=True)
class Exercise:
    """A task and its grader. `timeout`: seconds without a sign of life until a hang is reported."""

    task: str
    check: Check
    ranks: tuple[int, ...]
    timeout: float


def on_ranks(*ranks: int, timeout: float = 6) -> Callable[[Check], Callable[[Any], None]]:
    """Decorator: make a pytest test of a check, which runs on every rank of each of these numbers of ranks.

    A function called test_NAME grades the task NAME.
    """

    def decorate(check: Check) -> Callable[[Any], None]:
        exercise = Exercise(check.__name__.removeprefix("test_"), check, ranks, timeout)

        def test(grading: Any) -> None:
            grading(exercise)

        test.__name__, test.__doc__ = check.__name__, check.__doc__
        test.exercise = exercise  # type: ignore[attr-defined]
        return test

    return decorate


class Grader:
    """Grades answers on worlds that stay warm: one for each number of ranks, replaced after a failure."""

    def __init__(self) -> None:
        self.worlds: dict[int, launch.World] = {}
        self.faults: dict[Path, Verdict] = {}  # files that cannot be imported
        self.told: set[Path] = set()  # those and unreadable ones of which the learner has read already

    def __enter__(self) -> "Grader":
        return self

    def __exit__(self, *_: object) -> None:
        while self.worlds:  # a grader may be used again: it starts others
            self.worlds.popitem()[1].stop()

    def grade(
        self, exercise: Exercise, path: Path, timeout: float | None = None, told: Callable[[str], None] | None = None
    ) -> Verdict:
        """The verdict on the answer in the file. `timeout` replaces the exercise's own; `told` hears how far it is."""
        if timeout is not None:
            exercise = replace(exercise, timeout=timeout)
        if not path.is_file():
            return Verdict(exercise.task, "fail", f"{path} is missing: `refimpl exercise reset` puts the stub there")
        if left := unwritten(path, exercise.task):
            return Verdict(exercise.task, "todo", f"{', '.join(left)}: not written yet")
        if fault := self.faults.get(path.resolve()) or unreadable(path, exercise.task):
            return replace(fault, task=exercise.task)
        if said := cheat(path, exercise.task):
            return Verdict(exercise.task, "fail", said)
        for place, ranks in enumerate(exercise.ranks):
            if told:
                right = "".join(f"right on {n}, " for n in exercise.ranks[:place])
                told(f"{exercise.task}: {right}now on {ranks} rank{'s' * (ranks > 1)}")
            if failure := self._run(exercise, path.resolve(), ranks):
                return failure
        return Verdict(exercise.task, "pass")

    def warm(self, ranks: int) -> None:
        """Have a world of this number of ranks ready."""
        if ranks not in self.worlds:
            self.worlds[ranks] = start(ranks)

    def _run(self, exercise: Exercise, path: Path, ranks: int) -> Verdict | None:
        # Its reports set what all ranks called side by side, hangs included, which comparing would cut short.
        world = self.worlds.pop(ranks, None) or start(ranks)
        seen = Seen()
        args = (grade_here, exercise.check, path, exercise.task)
        try:
            world.call(*args, timeout=exercise.timeout, on_report=seen.report, on_output=seen.output)
        except launch.RankError as error:
            world.kill()
            todo = isinstance(error.__cause__, Todo)
            text = error.__cause__.headline if todo else explain(error, exercise, ranks, path, seen)  # type: ignore[union-attr]
            verdict = Verdict(exercise.task, "todo" if todo else "fail", text, isinstance(error.__cause__, WrongFile))
            if verdict.whole_file:
                self.faults[path] = verdict
            return verdict
        except BaseException:
            world.kill()
            raise
        self.worlds[ranks] = world
        return None


def start(ranks: int) -> launch.World:
    return launch.World(ranks, device="cpu", compare=False)


def unreadable(path: Path, task: str) -> Verdict | None:
    """The verdict on a file that is not Python, for which no rank need start."""
    try:
        parsed(path.read_text())
    except SyntaxError as error:
        wrong = not_python(error, path)
        return Verdict(task, "fail", "\n".join([wrong.headline, *wrong.details]), whole_file=True)
    except (ValueError, OSError) as error:
        return Verdict(task, "fail", f"{path.name} cannot be read: {error}", whole_file=True)
    return None


@dataclass
class Seen:
    """What came from the ranks before their verdict: the case each was at, and what the learner's code printed."""

    cases: dict[int, str] = field(default_factory=dict)
    calls: dict[int, list[str]] = field(default_factory=lambda: defaultdict(list))  # since the case began
    started: float = field(default_factory=time.monotonic)
    printed: deque[str] = field(default_factory=lambda: deque(maxlen=PRINTED))
    count: int = 0

    def report(self, rank: int, said: object) -> None:
        """Raises RankTimeout when there is no end to an answer that keeps calling collectives."""
        if isinstance(said, Called):
            self.calls[rank].append(said.text)
        elif said is not ALIVE:
            self.cases[rank], self.calls[rank] = str(said), []
        calls = len(self.calls[rank])
        if calls > CALLS or time.monotonic() - self.started > LONGEST_GRADING:
            raise launch.RankTimeout(
                f"endless\n  rank {rank} computes, and has called {calls:,} collectives in this case"
            )

    def output(self, rank: int, stream: str, text: str) -> None:
        lines = text.splitlines()
        self.printed += [f"  [rank {rank}] {line[:LONGEST]}" for line in lines]
        self.count += len(lines)

    def lines(self) -> list[str]:
        if not self.count:
            return []
        left_out = f" (the last {PRINTED} lines of {self.count:,})" if self.count > PRINTED else ""
        return [f"your prints{left_out}:", *self.printed]


def explain(error: launch.RankError, exercise: Exercise, ranks: int, path: Path, seen: Seen) -> str:
    """The whole text of a failure: the mistake, the rank and case, the evidence, the learner's own prints."""
    rank = "" if error.rank is None or ranks == 1 else f"rank {error.rank} of "
    place = f"  on {rank}{ranks} rank{'s' * (ranks > 1)}"
    if case := seen.cases.get(error.rank or 0):
        place += f": {case}"
    wrong = error.__cause__
    if isinstance(wrong, Wrong):
        headline, details = wrong.headline, list(wrong.details)
    elif isinstance(error, launch.RankTimeout):
        headline, details = hang(str(error), exercise, path, {rank: seen.calls[rank] for rank in range(ranks)})
        details += each_rank({rank: seen.calls[rank] for rank in range(ranks)}) if ranks > 1 else []
    elif isinstance(error, launch.RankDied) and "SIGABRT" in str(error):
        headline = f"{exercise.task}: ranks called different collectives, or one with buffers of different lengths"
        details = [f"{error}: gloo cannot continue", *each_rank({rank: seen.calls[rank] for rank in range(ranks)})]
    elif isinstance(error, launch.RankDied) and "SIGSEGV" in str(error):
        headline, details = NO_MEMORY, [f"{error}: memory was read that had been given back"]
    elif isinstance(error, launch.RankDied):
        headline, details = f"{exercise.task} ends its process: {error}", []
    else:
        headline, *details = str(error).splitlines()
    return "\n".join([headline, place, *details, *seen.lines()])


def hang(text: str, exercise: Exercise, path: Path, calls: dict[int, list[str]]) -> tuple[str, list[str]]:
    """Where each rank stands, and what that means."""
    in_grader = exercise.check.__code__.co_filename
    lines = [re.sub(rf"( rank \d+) .*{re.escape(in_grader)}.*", r"\1 finished", s) for s in text.splitlines()[1:]]
    lines = [line.replace(f"{path.parent}/", "") for line in lines]
    waits = {m[1] for line in lines if (m := re.search(r"waits in (\w+)", line))}
    finished = [line for line in lines if line.endswith(" finished")]
    computing = [line for line in lines if " computes" in line]
    if computing and len(computing) == len(lines):
        what = "never ends: is there a loop that cannot finish?"
    elif computing:
        what = "hangs: some ranks compute without end, the others wait for them"
    elif 0 < len(finished) < len(lines):
        what = "hangs: some ranks have finished while others still wait for them: do all make the same calls?"
    elif waits == {"recv"}:
        what = "hangs: every rank waits to receive, and none sends"
    elif waits == {"send"}:
        what = "hangs: every rank waits until its send is received, and none receives: use async_op=True"
    elif waits == {"wait"} and all(mine[-1:] and mine[-1].startswith("send ") for mine in calls.values()):
        what = "hangs: every rank waits for its send, and none has received yet: recv first, then wait()"
    elif len(waits) > 1:
        what = f"hangs: ranks wait in different collectives ({', '.join(sorted(waits))}): order and number must agree"
    elif len({len(mine) for mine in calls.values()}) > 1:
        most = max(len(mine) for mine in calls.values())
        fewer = " and ".join(str(rank) for rank, mine in calls.items() if len(mine) < most)
        what = f"hangs: rank {fewer} has called fewer collectives, and the others wait for the missing one"
    else:
        what = "hangs: the ranks wait for calls that do not fit together"
    return f"{exercise.task} {what}", [*lines, f"(no sign of life for {exercise.timeout:g} s)"]
