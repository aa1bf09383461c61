"""Live coding: the exercise's own grader judges what the learner wrote, in the terminal and in a notebook."""

import io
import shutil
from pathlib import Path

import ipywidgets
import pytest
from boxes import parts, said
from rich.console import Console

import refimpl.notebook.quiz
from refimpl.bank.card import Code
from refimpl.bank.load import load
from refimpl.bank.place import ROOT
from refimpl.bank.progress import Progress
from refimpl.bank.question import Question
from refimpl.cli.quiz import ask, explain
from refimpl.grading import progress as exercises
from refimpl.grading.verdict import Verdict
from refimpl.notebook import Quiz

CARD = load()["code-unscale-and-clip"]
assert isinstance(CARD, Code)


@pytest.fixture(autouse=True)
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A learner's clone, with untouched stubs; progress is kept beside it."""
    root = tmp_path / "clone"
    for folder in ("exercises", "solutions"):
        shutil.copytree(ROOT / folder, root / folder, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.chdir(root)
    monkeypatch.setenv("REFIMPL_DATA", str(tmp_path / "data"))
    return root


def in_terminal(monkeypatch: pytest.MonkeyPatch, typed: str) -> tuple[str, str]:
    """The rating, and what was printed."""
    monkeypatch.setattr("sys.stdin", io.StringIO(typed))
    printed, question = io.StringIO(), Question(CARD)
    console = Console(file=printed, width=200)
    rating = ask(question, console)
    explain(question, console)
    return rating, printed.getvalue()


def test_a_stub_is_no_answer_and_may_be_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    rating, out = in_terminal(monkeypatch, "\ng\n")
    assert rating == "again"
    assert "def unscale_and_clip(" in out
    assert CARD.command in out  # type: ignore[union-attr]
    assert "unscale_and_clip: not written yet" in out
    assert "refimpl hint 03_precision_and_bytes unscale_and_clip --give-up" in out


def test_the_grader_judges_what_is_written(clone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"{CARD.chapter}"  # type: ignore[union-attr]
    shutil.copy(clone / "solutions" / f"{name}.py", clone / "exercises" / name / "exercise.py")
    rating, out = in_terminal(monkeypatch, "\n")
    assert rating == "good", out
    assert "the exercise's grader accepts it" in out
    assert exercises.Progress.load().entry(name, "unscale_and_clip").passed


def test_in_a_notebook_a_button_grades_it(monkeypatch: pytest.MonkeyPatch) -> None:
    verdicts = [Verdict("t", "fail", "it is clipped while scaled"), Verdict("t", "pass")]
    monkeypatch.setattr(refimpl.notebook.quiz, "grade_task", lambda chapter, task: verdicts.pop(0))
    quiz = Quiz("internals", form="code", n=1)
    card = quiz.questions[0].card
    assert isinstance(card, Code)
    assert card.command in quiz.markdown()
    widget = quiz.widget()
    grade, give_up = (
        button for button in parts(widget, ipywidgets.Button) if button.description in ("Grade it", "Give up")
    )
    grade.click()
    assert "it is clipped while scaled" in said(widget)
    assert quiz.questions[0].short not in said(widget)
    grade.click()
    assert "**Right.**" in said(widget)
    assert quiz.questions[0].short in said(widget)
    assert grade.disabled
    assert give_up.disabled
    assert [(e.answered, e.right) for e in Progress().read().values()] == [(1, 1)]
