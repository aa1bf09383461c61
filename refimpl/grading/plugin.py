"""pytest for learners: `--impl`, todo as an outcome of its own, and a summary that says what to try next.

exercises/conftest.py imports the hooks and fixtures below.
"""

import textwrap
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from refimpl.grading.chapters import Chapter
from refimpl.grading.grade import Exercise, Grader
from refimpl.grading.progress import Progress, bar
from refimpl.grading.verdict import Verdict

TODO = "todo: "  # how a skip says that a task is still a stub
TOLD = "told above"  # of a file whose fault was reported for the task before
WIDTH = 120  # characters of a line in the summary


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--impl",
        default="exercises",
        metavar="WHOSE",
        help="what to grade: exercises (yours), solutions, or the path of one file",
    )


def pytest_configure(config: pytest.Config) -> None:
    impl = config.getoption("--impl")
    if impl not in ("exercises", "solutions") and not Path(impl).is_file():
        raise pytest.UsageError(f"--impl {impl}: no such file; give exercises, solutions or a .py file")
    config.option.durations = None  # of interest to whoever maintains the tests
    config.option.reportchars = ""  # the summary below says it
    config.option.showcapture = "no"  # a report shows what the learner's code printed, rank by rank
    if not hasattr(config, "workerinput"):  # in xdist's workers there is nothing to sum up
        config.pluginmanager.register(Results(keep=impl == "exercises"))


@pytest.fixture(scope="session")
def graders() -> Iterator[Grader]:
    with Grader() as grader:
        yield grader


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A chapter's tasks in its order, whichever file grades them. `-k NAME`, if it is a task's whole name, means that
    task, and not all that its chapter's name happens to hold."""
    folders = sorted({item.path.parent for item in items})
    chapters = [Chapter(folder.name, folder.parents[1]) for folder in folders]
    order = [f"test_{task}" for chapter in chapters if chapter.solution.exists() for task in chapter.tasks]
    items.sort(key=lambda item: (item.path.parent, order.index(item.name) if item.name in order else 0))
    chosen = [item for item in items if item.name == f"test_{config.option.keyword}"]
    if chosen:
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = chosen
        config.option.keyword = ""


@pytest.fixture
def grading(request: pytest.FixtureRequest, graders: Grader) -> Callable[[Exercise], None]:
    """Grade an exercise of this test's chapter, and make the verdict pytest's."""
    chapter = Chapter(request.path.parent.name, request.path.parents[2])
    impl = request.config.getoption("--impl")
    answer = {"exercises": chapter.exercise, "solutions": chapter.solution}.get(impl) or Path(impl)

    def grade(exercise: Exercise) -> None:
        verdict = graders.grade(exercise, answer)
        if verdict.whole_file and answer in graders.told:
            verdict = replace(verdict, text=f"{TOLD}: {verdict.headline}")
        elif verdict.whole_file:
            graders.told.add(answer)
        request.node.user_properties.append(("verdict", (chapter.name, verdict.task, verdict.outcome, verdict.text)))
        if verdict.outcome == "todo" or verdict.text.startswith(TOLD):
            pytest.skip(f"{TODO}{verdict.headline}")
        if verdict.outcome == "fail":
            pytest.fail(verdict.text, pytrace=False)

    return grade


def pytest_report_teststatus(report: pytest.TestReport) -> tuple[str, str, str] | None:
    return ("todo", "", "TODO") if report.skipped and TODO in str(report.longrepr) else None


class Results:
    """Collects the verdicts, and ends the session with them."""

    def __init__(self, keep: bool) -> None:
        self.keep = keep  # they are the learner's own
        self.verdicts: dict[tuple[str, str], Verdict] = {}  # (chapter, task) -> verdict

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        verdict: Any = dict(report.user_properties).get("verdict")
        if verdict:
            chapter, task, outcome, text = verdict
            self.verdicts[chapter, task] = Verdict(task, outcome, text)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if self.keep and self.verdicts:
            captured: Any = session.config.pluginmanager.getplugin("capturemanager")
            with captured.global_and_fixture_disabled():  # what it says is for the learner
                Progress.load().record(self.verdicts)
        if exitstatus == pytest.ExitCode.OK and any(v.outcome != "pass" for v in self.verdicts.values()):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        write = terminalreporter.write_line
        for name in sorted({chapter for chapter, _ in self.verdicts}):
            mine = [v for (chapter, _), v in self.verdicts.items() if chapter == name]
            passed = sum(v.outcome == "pass" for v in mine)
            write("")
            write(f"{name}  {bar(passed, len(mine))}  {passed} of {len(mine)}")
            for verdict in mine:
                told = verdict.outcome == "fail" and not verdict.headline.startswith(TOLD)
                note = f"  {verdict.headline}" if told else ""
                line = f"  {verdict.outcome:<5} {verdict.task}{note}"
                for text in textwrap.wrap(line, WIDTH, subsequent_indent=" " * 10, break_on_hyphens=False) or [line]:
                    write(text)
        upcoming = [key for key, v in self.verdicts.items() if v.outcome != "pass"]
        if upcoming and self.keep:
            chapter, task = min(upcoming, key=lambda key: key[0])  # the first of the earliest chapter
            write("")
            write(f"Try next: {task} in exercises/{chapter}/exercise.py")
            write(f"  a hint: refimpl hint {chapter} {task}")
