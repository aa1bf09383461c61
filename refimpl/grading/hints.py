"""Hints: one more each time, and how many were given is remembered; in the end the solution."""

import ast

from refimpl.grading.chapters import Chapter, definitions
from refimpl.grading.progress import Progress


def one_more(chapter: Chapter, task: str) -> tuple[list[str], int]:
    """The hints given so far and the next one, and how many are left."""
    progress, hints = Progress.load(), chapter.hints.get(task, [])
    entry = progress.entry(chapter.name, task)
    entry.hints = min(entry.hints + 1, len(hints))
    progress.save()
    return hints[: entry.hints], len(hints) - entry.hints


def solution(chapter: Chapter, task: str) -> str:
    """The source of the task's solution."""
    source = chapter.solution.read_text()
    node = next(d for d in definitions(ast.parse(source)) if d.name == task)
    return ast.get_source_segment(source, node) or ""
