"""`yours` in a chapter: the learner's own answer once it has passed, until then the solution's."""

import shutil
from pathlib import Path

import pytest

from refimpl.grading.chapters import project_folder
from refimpl.grading.progress import Progress
from refimpl.grading.stubs import stub
from refimpl.grading.verdict import Verdict
from refimpl.notebook.yours import yours

NAME, TASK = "01_collectives", "ring_all_reduce_seconds"
OWN = "def ring_all_reduce_seconds(nbytes, ranks, alpha, beta):\n    return 'my own'\n"


@pytest.fixture
def exercise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A learner's file, nothing written yet."""
    (tmp_path / "solutions").mkdir()
    shutil.copy(project_folder() / "solutions" / f"{NAME}.py", tmp_path / "solutions")
    path = tmp_path / "exercises" / NAME / "exercise.py"
    path.parent.mkdir(parents=True)
    path.write_text(stub((tmp_path / "solutions" / f"{NAME}.py").read_text()))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("REFIMPL_DATA", str(tmp_path))
    return path


def graded(outcome: str) -> None:
    Progress.load().record({(NAME, TASK): Verdict(TASK, outcome, "")})  # type: ignore[arg-type]


def test_until_it_has_passed_it_is_the_solutions(exercise: Path) -> None:
    assert yours(NAME, TASK)(8, 2, 1.0, 0.0) == 2.0
    exercise.write_text(OWN)
    graded("fail")
    assert yours(NAME, TASK)(8, 2, 1.0, 0.0) == 2.0


def test_what_has_passed_is_the_learners(exercise: Path) -> None:
    exercise.write_text(OWN)
    graded("pass")
    assert yours("1", TASK)(8, 2, 1.0, 0.0) == "my own"


def test_after_a_reset_it_is_the_solutions_again(exercise: Path) -> None:
    graded("pass")
    assert yours(NAME, TASK)(8, 2, 1.0, 0.0) == 2.0
    exercise.unlink()
    assert yours(NAME, TASK)(8, 2, 1.0, 0.0) == 2.0


def test_another_task_is_refused_with_the_names_there_are(exercise: Path) -> None:
    with pytest.raises(ValueError, match=r"01_collectives has no task 'ring': there are ring_reduce_scatter, "):
        yours(NAME, "ring")
