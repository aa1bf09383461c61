"""`refimpl exercise watch`: on every save, the tasks that the change concerns, graded on ranks that are warm already.

`pytest exercises/` starts Python, torch and new ranks each time, which takes longer than most graders do.
"""

import time
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from refimpl.grading.chapters import Chapter, unwritten
from refimpl.grading.grade import Grader
from refimpl.grading.live import Live, changed_tasks
from refimpl.grading.verdict import Verdict

LOOK = 0.1  # seconds between two looks at the file
COLOURS = {"pass": "green", "fail": "red", "todo": "yellow"}


def run(chapter: Chapter, once: bool = False) -> None:
    """Grade what is written, then what is saved, until interrupted. FileNotFoundError without a file to watch."""
    path, console = chapter.exercise, Console(highlight=False)
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: `refimpl exercise reset {chapter.name}` puts the stub there")
    with Grader() as grader:
        live = Live(chapter, grader)
        live.warm()
        source = path.read_text()
        grade(live, [task for task in chapter.tasks if not unwritten(path, task)], console)
        while not once:
            console.print(f"[dim]watching {path}: save it, or end with Ctrl-C[/dim]")
            source = changed(live, source, console)
            live.warm()  # a failure takes its ranks with it: the next ones start while the learner reads


def changed(live: Live, before: str, console: Console) -> str:
    """Wait for the file to become another, grade what that concerns, and return what it is now."""
    path = live.chapter.exercise
    while (after := saved(path)) == before:
        time.sleep(LOOK)
    try:
        tasks = changed_tasks(before, after, live.chapter.tasks)
    except SyntaxError:
        tasks = live.chapter.tasks[:1]  # its verdict says which line is not Python
    written = [task for task in tasks if not unwritten(path, task)]
    grade(live, written or tasks, console)  # a change of what all share names no stubs beside what is written
    return after


def saved(path: Path) -> str:
    """The file's text; of an editor that replaces it, once the new one is there."""
    while True:
        try:
            return path.read_text()
        except FileNotFoundError:
            time.sleep(LOOK)


def grade(live: Live, tasks: list[str], console: Console) -> None:
    for task in tasks:
        begun = time.monotonic()
        with console.status(task) as line:  # on a terminal: how far it is
            verdict = live.grade(task, told=line.update)
        show(verdict, time.monotonic() - begun, console)


def show(verdict: Verdict, seconds: float, console: Console) -> None:
    colour = COLOURS[verdict.outcome]
    console.print(f"[{colour}]{verdict.outcome}[/{colour}]  {verdict.task}  [dim]{seconds:.1f} s[/dim]")
    if verdict.outcome == "fail":
        console.print(escape(verdict.text), soft_wrap=True)
