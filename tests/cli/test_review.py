"""`refimpl review`: a wrong answer is shown without what tells, judged by its grader, and comes again when due."""

import io
import shutil
from pathlib import Path

import pytest
from rich.console import Console

from refimpl.bank.progress import Progress as Remembered
from refimpl.cli import review
from refimpl.grading.chapters import chapters, find_chapter, project_folder
from refimpl.grading.mutant import Mutant, mutants_of
from refimpl.grading.progress import Progress
from refimpl.grading.verdict import Verdict

NAME, TASK = "04_zero1", "pieces_of"


@pytest.fixture
def learner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project of one chapter, whose exercises are solved, and not graded."""
    for folder in ("solutions", f"exercises/{NAME}", f"tests/mutants/{NAME}"):
        shutil.copytree(project_folder() / folder, tmp_path / folder)
    shutil.copy(tmp_path / "solutions" / f"{NAME}.py", tmp_path / "exercises" / NAME / "exercise.py")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("REFIMPL_DATA", str(tmp_path))
    return tmp_path


def shown(mutants: list[Mutant], typed: str, monkeypatch: pytest.MonkeyPatch) -> str:
    printed = io.StringIO()
    monkeypatch.setattr("sys.stdin", io.StringIO(typed))
    review.run(mutants, 5, 0, Console(file=printed, width=100))
    return printed.getvalue()


def test_only_of_tasks_that_have_passed(learner: Path) -> None:
    with pytest.raises(ValueError, match=r"you have passed no task of 04_zero1 yet.* --all shows them"):
        review.select("4", everything=False)
    Progress.load().record({(NAME, TASK): Verdict(TASK, "pass", "")})
    assert {m.task for m in review.select("4", everything=False)} == {TASK}
    assert {m.task for m in review.select("4", everything=True)} == set(find_chapter("4").tasks)


def test_the_fault_and_the_graders_report_come_behind_the_code(learner: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (mutant,) = (m for m in mutants_of(find_chapter(NAME)) if m.path.stem == "shards_rounded_down")
    code, _, told = shown([mutant], "\n3\n", monkeypatch).partition("All else is right")
    assert mutant.fault not in code
    assert f"def {TASK}" in code
    flat = " ".join(told.split())
    assert flat.index(mutant.fault) < min(flat.index(phrase) for phrase in mutant.says)
    assert "1 of 1 fault found" in told
    assert mutant.id in Remembered().read()
    assert Progress.load().entry(NAME, TASK).outcome == "todo"  # what is reviewed is no answer of the learner's


def test_what_is_left_unread_is_not_counted(learner: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "0 of 0 faults found" in shown(mutants_of(find_chapter(NAME)), "q\n", monkeypatch)
    assert not Remembered().read()


@pytest.mark.parametrize("chapter", chapters(), ids=lambda c: c.name)
def test_code_has_no_comment_and_every_fault_is_said(chapter: object) -> None:
    for mutant in mutants_of(chapter):  # type: ignore[arg-type]
        assert "#" not in mutant.code, mutant.id
        assert mutant.fault.endswith("."), mutant.id
        assert mutant.docstring not in mutant.code
