"""Stubs come from the solutions, match those in exercises/, and never replace what a learner wrote."""

import tomllib
from pathlib import Path

import pytest

from refimpl.grading.chapters import Chapter, chapters, unwritten
from refimpl.grading.stubs import stub, touched, write

ROOT = Path(__file__).parents[2]
CHAPTERS = [pytest.param(c, id=c.name) for c in chapters(ROOT)]

SOLUTION = '''"""Task."""

import torch


def _helper(x):
    return x + 1


def add(
    x,
    y,
):
    """Sum.

    Of two.
    """
    # a comment
    return x + y


class Counter:
    """Counts."""

    def __init__(self):  # given
        self.n = 0

    @property
    def next(self):
        """One more."""
        self.n += 1
        return self.n


def given(x):  # given
    return torch.add(x, 1)


HINTS = {"add": ["one", "two"]}
'''
STUB = '''"""Task."""

import torch


def add(
    x,
    y,
):
    """Sum.

    Of two.
    """
    raise NotImplementedError("add")


class Counter:
    """Counts."""

    def __init__(self):  # given
        self.n = 0

    @property
    def next(self):
        """One more."""
        raise NotImplementedError("Counter.next")


def given(x):  # given
    return torch.add(x, 1)
'''


@pytest.fixture
def chapter(tmp_path: Path) -> Chapter:
    chapter = Chapter("01_sums", tmp_path)
    chapter.solution.parent.mkdir()
    chapter.solution.write_text(SOLUTION)
    return chapter


def test_a_stub_keeps_all_but_the_bodies() -> None:
    assert stub(SOLUTION) == STUB


def test_tasks_hints_and_what_is_left_to_do(chapter: Chapter) -> None:
    assert chapter.tasks == ["add", "Counter"]
    assert chapter.hints == {"add": ["one", "two"]}
    write(chapter)
    assert unwritten(chapter.exercise, "Counter") == ["Counter.next"]
    assert unwritten(chapter.solution, "Counter") == []


def test_an_answer_below_its_stub_is_the_answer(chapter: Chapter) -> None:
    write(chapter)
    below = chapter.exercise.read_text() + "\n\ndef add(x, y):\n    return y + x\n"
    chapter.exercise.write_text(below)
    assert unwritten(chapter.exercise, "add") == []


def test_written_work_is_kept_unless_forced(chapter: Chapter) -> None:
    assert "written" in write(chapter)
    assert not touched(chapter)
    mine = STUB.replace('raise NotImplementedError("add")', "return y + x")
    for text in (mine, "def add(:"):
        chapter.exercise.write_text(text)
        assert touched(chapter)
        assert "kept" in write(chapter)
        assert chapter.exercise.read_text() == text
    write(chapter, force=True)
    assert chapter.exercise.read_text() == STUB


def test_an_old_stub_is_replaced(chapter: Chapter) -> None:
    chapter.exercise.parent.mkdir(parents=True)
    chapter.exercise.write_text(STUB.replace("Of two.", "Of 2."))
    assert "written" in write(chapter)
    assert chapter.exercise.read_text() == STUB


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_the_stubs_in_exercises_match_their_solutions(chapter: Chapter) -> None:
    if touched(chapter):
        pytest.skip(f"{chapter.exercise} is a learner's by now, and not compared with its stub")
    assert chapter.exercise.read_text() == stub(chapter.solution.read_text()), "run: python -m refimpl.grading.stubs"


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_a_stub_is_as_narrow_as_a_chapters_code(chapter: Chapter) -> None:
    """It is written in a chapter's cells and in JupyterLab's editor: nothing is to scroll sideways."""
    width = tomllib.loads((ROOT / "course" / "ruff.toml").read_text("utf-8"))["line-length"]
    lines = enumerate(stub(chapter.solution.read_text()).splitlines(), 1)
    assert {number: line for number, line in lines if len(line) > width} == {}
