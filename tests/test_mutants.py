"""Every grader passes its solution, rejects every wrong answer in mutants/, and says why in the learner's words.

`refimpl/grading/mutant.py` says what a mutant is. The matrix of all of them is printed (pytest -s).
"""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from worlds import TRITON, worlds

from refimpl.grading.chapters import Chapter, chapters
from refimpl.grading.grade import Exercise, Grader
from refimpl.grading.live import exercises_of
from refimpl.grading.mutant import Mutant, mutants_of

ROOT = Path(__file__).parents[1]
CHAPTERS = chapters(ROOT)
MUTANTS = [mutant for chapter in CHAPTERS for mutant in mutants_of(chapter)]
HANG = 4.0  # seconds, so that mutants that hang do not hold everything up


def param(chapter: Chapter, value: object, name: str) -> Any:
    """With `-n`, one process grades a whole chapter, and keeps the ranks warm."""
    marks = [pytest.mark.xdist_group(chapter.name), *[TRITON] * (chapter.name == "14_triton")]
    return pytest.param(chapter, value, id=f"{chapter.name}-{name}", marks=marks)


@pytest.fixture(scope="module")
def grader() -> Iterator[Grader]:
    worlds().stop()  # in those of other tests each group ever made has a thread of gloo, awake 100 times a second
    with Grader() as grader:
        yield grader


exercises = cache(exercises_of)  # a chapter's graders are imported once, not for every mutant


def exercise(chapter: Chapter, task: str) -> Exercise:
    (found,) = (exercise for exercise in exercises(chapter) if exercise.task == task)
    return found


@pytest.mark.parametrize(("chapter", "task"), [param(c, t, t) for c in CHAPTERS for t in c.tasks])
def test_every_solution_passes(chapter: Chapter, task: str, grader: Grader) -> None:
    verdict = grader.grade(exercise(chapter, task), chapter.solution)
    assert verdict.outcome == "pass", verdict.text


@pytest.mark.parametrize(("chapter", "mutant"), [param(m.chapter, m, m.path.stem) for m in MUTANTS])
def test_every_mutant_is_killed_for_the_right_reason(
    chapter: Chapter, mutant: Mutant, grader: Grader, tmp_path: Path
) -> None:
    file, task = tmp_path / mutant.path.name, mutant.task
    file.write_text(mutant.answer)
    verdict = grader.grade(exercise(chapter, task), file, timeout=HANG)
    print(f"{chapter.name:<24}{mutant.path.stem:<34}{task:<24}{verdict.outcome:<6}{verdict.headline}")
    assert verdict.outcome == "fail", f"{mutant.id} survives"
    assert mutant.says, f"{mutant.id} does not say what the report must say"
    for phrase in mutant.says:
        assert phrase in verdict.text, verdict.text
    assert "Traceback" not in verdict.text
    assert len(verdict.text.splitlines()) <= 30, verdict.text


@pytest.mark.parametrize("chapter", [pytest.param(c, id=c.name) for c in CHAPTERS])
def test_every_chapter_is_complete(chapter: Chapter) -> None:
    assert sorted(exercise.task for exercise in exercises(chapter)) == sorted(chapter.tasks)
    assert len(chapter.mutants) >= 5
    assert {m.task for m in mutants_of(chapter)} == set(chapter.tasks), "each task has a mutant"
    assert {task: len(hints) >= 2 for task, hints in chapter.hints.items()} == dict.fromkeys(chapter.tasks, True)
