"""`refimpl progress`: what the last grading of each exercise said, by chapter."""

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from refimpl.grading.chapters import chapters
from refimpl.grading.ladder import LADDER
from refimpl.grading.progress import Progress, bar

COLOURS = {"pass": "green", "fail": "red", "todo": "dim"}


def run() -> None:
    """Print the table, and what to do next."""
    console, progress = Console(), Progress.load()
    table = Table("exercise", "last grading", box=box.SIMPLE_HEAD)
    table.add_column("hints", justify="right", no_wrap=True)
    upcoming = ""
    for chapter in chapters():
        entries = {task: progress.entry(chapter.name, task) for task in chapter.tasks}
        passed = sum(entry.outcome == "pass" for entry in entries.values())
        done = f"{escape(bar(passed, len(entries)))} {passed} of {len(entries)}"
        table.add_row(f"[bold]{chapter.name}", f"[bold]{done}")
        for task, entry in entries.items():
            said = f"fail: {entry.headline}" if entry.outcome == "fail" else entry.outcome
            given = f"{entry.hints} of {len(chapter.hints.get(task, []))}"
            table.add_row(f"  {task}", f"[{COLOURS[entry.outcome]}]{escape(said)}", given)
            if entry.outcome != "pass" and not upcoming:
                upcoming = (
                    f"Next: {task} in exercises/{chapter.name}/exercise.py; pytest exercises/{chapter.name} grades it"
                )
        table.add_section()
    console.print(table)
    if all(progress.entry(*answer).outcome == "pass" for answer in LADDER.values()):
        console.print("Your own ladder, DDP to ZeRO-3, can train a GPT: refimpl demo --yours", highlight=False)
    console.print(upcoming or "All exercises pass.", highlight=False, soft_wrap=True)
