"""One task, outside pytest: what the quiz grades."""

from refimpl.grading.chapters import find_chapter, import_file
from refimpl.grading.grade import Exercise, Grader
from refimpl.grading.progress import Progress
from refimpl.grading.verdict import Verdict


def grade_task(chapter: str, task: str) -> Verdict:
    """Grade what is written in the chapter's exercise.py, and keep the result as `pytest exercises/` would."""
    found = find_chapter(chapter)
    test = getattr(import_file(found.grader, found.grader.stem), f"test_{task}")
    exercise: Exercise = test.exercise
    with Grader() as grader:
        verdict = grader.grade(exercise, found.exercise)
    Progress.load().record({(found.name, task): verdict})
    return verdict
