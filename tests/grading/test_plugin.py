"""`pytest exercises/` as a learner sees it, in a project of two small chapters.

`pytest exercises` is called in this process (by pytest's own `pytester`), which has torch already and whose ranks start
in no time; once it is a command of its own, as `refimpl hint` and the others always are.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import refimpl.grading.plugin  # noqa: F401  # pytester forgets what is imported first in a session of its own
from refimpl.grading.chapters import chapters
from refimpl.grading.stubs import write

pytest_plugins = ["pytester"]
pytestmark = pytest.mark.xdist_group("grading")

ROOT = Path(__file__).parents[2]
SOLUTION = '''"""Task."""

from torch import Tensor


def double(group: object, x: Tensor) -> Tensor:
    """Twice x."""
    return x * 2


def triple(group: object, x: Tensor) -> Tensor:
    """Three times x."""
    return x * 3


HINTS = {"double": ["Multiply.", "By 2."], "triple": ["Multiply.", "By 3."]}
'''
GRADER = """
import torch
from refimpl.grading.compare import equal
from refimpl.grading.grade import on_ranks


@on_ranks(2)
def test_double(answer, group):
    equal(answer.double(group, torch.ones(2)), torch.full((2,), 2.0), "the result", ranks=2)


@on_ranks(2)
def test_triple(answer, group):
    equal(answer.triple(group, torch.ones(2)), torch.full((2,), 3.0), "the result", ranks=2)
"""


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the two chapters, which is the working directory too."""
    tmp_path = pytester.path
    monkeypatch.setenv("REFIMPL_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("COLUMNS", "120")
    for name in ("01_one", "02_two"):
        folder = tmp_path / "exercises" / name
        folder.mkdir(parents=True)
        (folder / f"test_{name}.py").write_text(GRADER)
        (tmp_path / "solutions").mkdir(exist_ok=True)
        (tmp_path / "solutions" / f"{name}.py").write_text(SOLUTION)
    (tmp_path / "exercises" / "conftest.py").write_text((ROOT / "exercises" / "conftest.py").read_text())
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    for chapter in chapters(tmp_path):
        write(chapter)
    return tmp_path


def do(project: Path, *command: str, answer: str = "") -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    return subprocess.run(
        [sys.executable, "-m", *command], cwd=project, env=environment, capture_output=True, text=True, input=answer
    )


def grade(pytester: pytest.Pytester, *arguments: str) -> tuple[int, str]:
    """pytest with these arguments, in this process: its exit status and what it printed."""
    done = pytester.runpytest_inprocess("-p", "no:xdist", *arguments)
    return int(done.ret), done.stdout.str() + done.stderr.str()


def test_untouched_stubs_are_todo_and_no_pass(project: Path, pytester: pytest.Pytester) -> None:
    status, said = grade(pytester, "exercises")
    assert status == 1
    assert said.count("  todo  ") == 4
    assert "0 of 2" in said
    assert "4 todo" in said
    assert "Try next: double in exercises/01_one/exercise.py" in said
    assert len(said.splitlines()) < 18
    assert grade(pytester, "exercises/01_one", "-k", "double")[0] == 1


def test_solutions_pass(project: Path) -> None:
    done = do(project, "pytest", "exercises", "--impl", "solutions")
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("2 of 2") == 2
    assert not (project / "data").exists()  # only the learner's own results are kept


def test_a_learners_way(project: Path, pytester: pytest.Pytester) -> None:
    mine = project / "exercises" / "01_one" / "exercise.py"
    mine.write_text(mine.read_text().replace('raise NotImplementedError("double")', "return x * 4"))
    status, said = grade(pytester, "exercises")
    assert status == 1
    report = said[said.index("test_double") :]
    assert "the result: exactly 2x the expected: summed over the ranks, not averaged" in report
    assert "Traceback" not in report
    assert "Error" not in report
    assert "  fail  double  the result" in report
    assert report.count("  todo  ") == 3

    assert "1. Multiply.\n1 more" in do(project, "refimpl", "hint", "01", "double").stdout
    assert "2. By 2.\nThat is the last hint" in do(project, "refimpl", "hint", "01", "double").stdout

    mine.write_text(mine.read_text().replace("x * 4", "x * 2"))
    assert grade(pytester, "exercises", "-k", "double and 01_one")[0] == 0
    assert "return x * 2" in do(project, "refimpl", "hint", "01_one", "double").stdout  # passed: the solution
    assert "return x" not in do(project, "refimpl", "hint", "01_one", "triple").stdout
    assert "return x * 3" in do(project, "refimpl", "hint", "01_one", "triple", "--give-up").stdout
    shown = do(project, "refimpl", "progress").stdout
    assert "1 of 2" in shown
    assert "2 of 2" in shown  # hints
    assert "Next: triple in exercises/01_one/exercise.py" in shown

    assert do(project, "refimpl", "exercise", "reset", "01", answer="n\n").returncode != 0
    assert "return x * 2" in mine.read_text()
    assert do(project, "refimpl", "exercise", "reset", "01", answer="y\n").returncode == 0
    assert "return x * 2" in mine.with_name("exercise.kept-1.py").read_text()
    assert "return x" not in mine.read_text()


def test_a_file_that_does_not_parse_spoils_no_other(project: Path, pytester: pytest.Pytester) -> None:
    (project / "exercises" / "01_one" / "exercise.py").write_text("def double(group, x:\n")
    second = project / "exercises" / "02_two" / "exercise.py"
    second.write_text((project / "solutions" / "02_two.py").read_text())
    _, said = grade(pytester, "exercises")
    assert said.count("exercise.py line 1 is not Python: '(' was never closed") == 2  # the report, the summary
    assert "  fail  triple\n" in said  # and not once more for each task of the file
    assert "2 of 2" in said


def test_another_file_can_be_graded(project: Path, pytester: pytest.Pytester) -> None:
    other = project / "mine.py"
    other.write_text("def double(group, x):\n    return x + x\n")
    assert grade(pytester, "exercises/01_one", "-k", "double", "--impl", "mine.py")[0] == 0
    status, said = grade(pytester, "exercises", "--impl", "nowhere.py")
    assert status == 4
    assert "--impl nowhere.py: no such file" in said


def test_a_tasks_name_selects_that_task(project: Path, pytester: pytest.Pytester) -> None:
    for chapter in ("01_one", "02_two"):  # the name is a part of the folder's, as Zero3 is of 06_zero3
        test = project / "exercises" / chapter / f"test_{chapter}.py"
        test.write_text(test.read_text().replace("test_triple", "test_one" if chapter == "01_one" else "test_triple"))
    _, said = grade(pytester, "exercises", "-k", "one")
    assert "0 of 1" in said
    assert "3 deselected" in said
    assert "double" not in said
    assert "02_two" not in said


def test_a_hint_without_a_task_lists_the_chapters(project: Path) -> None:
    said = do(project, "refimpl", "hint", "1").stdout
    assert [line.split() for line in said.splitlines()[:2]] == [
        ["double", "0", "of", "2", "hints", "given"],
        ["triple", "0", "of", "2", "hints", "given"],
    ]


def test_a_long_headline_is_told_whole(project: Path, pytester: pytest.Pytester) -> None:
    other = project / "mine.py"
    other.write_text(f"def double(group, x):\n    raise ValueError({' '.join(['word'] * 30)!r})\n")
    _, said = grade(pytester, "exercises/01_one", "-k", "double", "--impl", "mine.py")
    summary = said[said.index("  fail  double") :]
    assert summary.count("word") == 30
    assert max(len(line) for line in summary.splitlines()) <= 120


def test_a_damaged_progress_file_is_set_aside(project: Path) -> None:
    data = project / "data"
    data.mkdir()
    (data / "exercises.json").write_text('{"01_one/double": ')
    done = do(project, "refimpl", "hint", "01", "double")
    assert "1. Multiply." in done.stdout
    assert "could not be read" in done.stderr
    assert len(list(data.glob("exercises.damaged-*.json"))) == 1
    assert json.loads((data / "exercises.json").read_text())["01_one/double"]["hints"] == 1


def test_progress_that_cannot_be_kept_spoils_no_verdict(project: Path, pytester: pytest.Pytester) -> None:
    (project / "data").touch()  # no folder
    _, graded = grade(pytester, "exercises/01_one")
    hinted = do(project, "refimpl", "hint", "01", "double")
    assert "Try next: double" in graded
    assert "1. Multiply." in hinted.stdout
    for said in (graded, hinted.stderr):
        assert "your progress is not kept" in said
        assert "set REFIMPL_DATA to a folder that you can write" in said


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (("hint", "09", "double"), "no chapter '09': there are 01_one, 02_two"),
        (("hint", "01", "half"), "01_one has no exercise 'half': there are double, triple"),
        (("exercise", "reset", "09"), "no chapter '09'"),
        (("hint",), "Missing argument 'chapter'"),
    ],
)
def test_bad_input_is_one_line_and_status_2(project: Path, command: tuple[str, ...], says: str) -> None:
    done = do(project, "refimpl", *command)
    assert done.returncode == 2
    assert says in done.stderr.replace("'CHAPTER'", "'chapter'")  # as older typers write it
    assert len(done.stderr.splitlines()) == 1
