"""`refimpl review`: wrong answers to the exercises, to be found out by reading; then the grader runs each on ranks.

They are the mutants that the graders are tested by. Of a task that you have not passed none is shown: what is right in
it would give yours away.
"""

import random
import tempfile
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding

from refimpl.bank.progress import Progress as Remembered
from refimpl.bank.progress import choose
from refimpl.cli.quiz import Leave, count, highlighted, rated, read
from refimpl.grading.chapters import chapters, find_chapter
from refimpl.grading.grade import Grader
from refimpl.grading.live import Live
from refimpl.grading.mutant import Mutant, mutants_of
from refimpl.grading.progress import Progress

HANG = 4.0  # seconds in which an answer must end: some wait for ever, and are shown to


def select(name: str | None, everything: bool) -> list[Mutant]:
    """The wrong answers of a chapter, or of all. ValueError if there is none that may be shown."""
    progress = Progress.load()
    asked = [find_chapter(name)] if name else chapters()
    found = [m for c in asked for m in mutants_of(c) if everything or progress.stands(c, m.task)]
    if not found:
        raise ValueError(
            f"you have passed no task {f'of {asked[0].name} ' if name else ''}yet, and a wrong answer shows much of "
            "the right one; --all shows them all the same"
        )
    return found


def run(mutants: list[Mutant], n: int, seed: int | None, console: Console | None = None) -> None:
    """Show up to n, the due ones first. Ends early at end of input, at Ctrl-C or at "q"."""
    console, remembered = console or Console(), Remembered()
    seed = random.randrange(1 << 30) if seed is None else seed
    chosen, ratings = choose(mutants, remembered.read(), n, seed), []
    console.print(f"{count(len(chosen), 'wrong answer')}. [dim]Enter q to stop; each rating is kept at once.[/]")
    with Grader() as grader:
        try:
            for number, mutant in enumerate(chosen, 1):
                console.rule(f"[bold]{number}/{len(chosen)}[/] {mutant.chapter.name} · {mutant.task}", align="left")
                console.print(f"[dim]What it must do: {mutant.chapter.exercise}[/]", highlight=False, soft_wrap=True)
                console.print(Padding(highlighted(mutant.code, "python"), (1, 2)))
                read(console, "All else is right. What goes wrong, and when? Then press Enter")
                reveal(mutant, grader, console)
                ratings.append(rated(console))
                remembered.record(mutant.id, ratings[-1])
        except (EOFError, KeyboardInterrupt, Leave):
            console.print()
    console.rule(align="left")
    console.print(f"{sum(r != 'again' for r in ratings)} of {count(len(ratings), 'fault')} found.")


def reveal(mutant: Mutant, grader: Grader, console: Console) -> None:
    """The fault, and what the grader says of it."""
    console.print(Padding(f"[bold]{escape(mutant.fault)}[/]", (1, 2)), highlight=False)
    with tempfile.TemporaryDirectory() as folder, console.status("The exercise's grader runs it on real ranks ..."):
        answer = Path(folder) / "answer.py"
        answer.write_text(mutant.answer)
        exercise = Live(mutant.chapter, grader).exercises[mutant.task]
        verdict = grader.grade(exercise, answer, timeout=HANG)  # not Live's: that would be the learner's progress
    console.print(Padding(escape(verdict.text), (0, 2, 1, 2)), highlight=False)
