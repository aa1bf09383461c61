"""`refimpl hint`: one hint more each time, and the solution once the exercise is passed or given up."""

from rich.console import Console
from rich.markup import escape
from rich.syntax import Syntax

from refimpl.grading.chapters import Chapter, find_chapter
from refimpl.grading.hints import one_more, solution
from refimpl.grading.progress import Progress


def run(chapter: str, task: str | None, give_up: bool) -> None:
    """Print the hints so far and the next one, or the solution; without a task, the chapter's tasks.

    ValueError for an unknown chapter or exercise.
    """
    found, console = find_chapter(chapter), Console()
    if task is None:
        return overview(found, console)
    if task not in found.tasks:
        raise ValueError(f"{found.name} has no exercise {task!r}: there are {', '.join(found.tasks)}")
    if Progress.load().entry(found.name, task).passed or give_up:
        console.print(f"The solution of {escape(task)}, from solutions/{found.name}.py:")
        console.print(Syntax("", "python").highlight(solution(found, task)), soft_wrap=True)
        return
    hints, left = one_more(found, task)
    for number, hint in enumerate(hints, 1):
        console.print(f"{number}. {hint}", highlight=False, markup=False, soft_wrap=True)
    if not left:
        console.print(
            f"That is the last hint. The solution: refimpl hint {found.name} {task} --give-up", highlight=False
        )
    else:
        console.print(f"{left} more: run it again.", highlight=False)


def overview(chapter: Chapter, console: Console) -> None:
    """The chapter's exercises, and how many of their hints were given."""
    progress = Progress.load()
    for task in chapter.tasks:
        entry, hints = progress.entry(chapter.name, task), chapter.hints.get(task, [])
        state = "passed" if entry.passed else f"{entry.hints} of {len(hints)} hints given"
        console.print(f"{task:<28}{state}", highlight=False, markup=False, soft_wrap=True)
    console.print(f"A hint: refimpl hint {chapter.name} EXERCISE", highlight=False)
