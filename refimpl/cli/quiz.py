"""`refimpl quiz`: questions in the terminal, the due ones first, graded and remembered after each answer."""

import difflib
import random
from functools import cache

from rich.console import Console
from rich.markdown import Markdown
from rich.markup import escape
from rich.padding import Padding
from rich.syntax import Syntax

from refimpl.bank import load
from refimpl.bank.card import LITERATURE, AnyCard, Bug, Code, Numeric, Open, Order
from refimpl.bank.place import of_code, of_test
from refimpl.bank.progress import RATINGS, Progress, choose
from refimpl.bank.question import AnswerError, Question
from refimpl.bank.scope import UNITS
from refimpl.grading.live import grade_task

SELF_GRADES = {"1": "again", "2": "hard", "3": "good", "4": "easy"}


class Leave(Exception):
    """The reader has had enough."""


def select(topic: str | None, level: str | None, form: str | None, n: int) -> dict[str, AnyCard]:
    """The cards that the options allow. ValueError says in one line which option is wrong and what would do."""
    if n < 1:
        raise ValueError(f"--n {n}: ask for at least 1 question")
    return load.select(topic, level, form)


def run(cards: dict[str, AnyCard], n: int, seed: int | None, console: Console | None = None) -> None:
    """Ask up to n of `cards`. Ends early, and says how far it came, at end of input, at Ctrl-C or at "q"."""
    console, progress = console or Console(), Progress()
    seed = random.randrange(1 << 30) if seed is None else seed
    chosen = choose(cards.values(), progress.read(), n, seed)
    results: list[bool] = []
    console.print(f"{count(len(chosen), 'question')}. [dim]Enter q to stop; each answer is kept at once.[/]")
    try:
        for number, card in enumerate(chosen, 1):
            # A card that comes again has fresh numbers and another order of options.
            question = Question(card, seed + number)
            console.rule(f"[bold]{number}/{len(chosen)}[/] {card.topic} · {card.level} · {card.form}", align="left")
            rating = ask(question, console)
            progress.record(card.id, rating)
            results.append(rating != "again")
            explain(question, console)
    except (EOFError, KeyboardInterrupt, Leave):
        console.print()
    console.rule(align="left")
    console.print(f"{sum(results)} of {count(len(results), 'answer')} right. [dim]Kept in {progress.path}[/]")


def ask(question: Question, console: Console) -> str:
    """Put the question, read an answer until it can be judged, judge it. Returns the rating to remember."""
    card = question.card
    console.print(Markdown(question.ask))
    if isinstance(card, Bug):
        console.print(Padding(highlighted(card.snippet.strip(), "python"), (1, 2)))
    for i, option in enumerate(question.options, 1):
        console.print(Padding(Markdown(f"{i}\\. {option}"), (0, 2)))
    if isinstance(card, Open):
        return _self_grade(question, console)
    if isinstance(card, Code):
        return _live_coding(question, card, console)
    while True:
        try:
            verdict = question.grade(read(console, _prompt(question)))
        except AnswerError as reason:
            console.print(f"[yellow]{reason}[/]", highlight=False)
            continue
        console.print("[bold green]Right.[/]" if verdict.right else "[bold red]Not quite.[/]")
        if not verdict.right:
            console.print(Markdown(verdict.why))
        return "good" if verdict.right else "again"


def explain(question: Question, console: Console) -> None:
    """The answers, the wrong ones with their reasons, what they ask next, and where to read on."""
    card = question.card
    if not isinstance(card, Open):
        if isinstance(card, Order):
            console.print(Padding(Markdown("\n".join(f"1. {question.options[i]}" for i in question.right)), (1, 2)))
        elif not isinstance(card, Numeric | Code):
            console.print(Padding(Markdown(f"**{question.answer}**"), (1, 2, 0, 2)))
        console.print(Padding(Markdown(question.short), (1, 2)))
    if isinstance(card, Bug):
        change = difflib.ndiff(card.snippet.strip().splitlines(), card.fixed().strip().splitlines())
        shown = "\n".join(line for line in change if line[0] in "+-")
        console.print(Padding(highlighted(shown, "diff"), (0, 2, 1, 2)))
    console.print(Padding(Markdown(question.deep), (0, 2, 1, 2)))
    if card.form in ("open", "numeric", "order", "code"):
        for claim, why in question.wrong:
            console.print(Padding(Markdown(f"**Not:** {claim} {why}"), (0, 2, 1, 2)))
    console.print(Padding(Markdown("**And then they ask**\n\n" + _follow_ups(card)), (0, 2, 1, 2)))
    places = [*map(of_code, card.code), *([of_test(card.proof)] if card.proof != LITERATURE else [])]
    read = [f"{place.file}:{place.line}" for place in places] or ["the sources: nothing of it is built here"]
    console.print(Padding(f"[dim]read  {'  '.join(read)}\nfrom  {'; '.join(card.sources)}[/]", (0, 2)), highlight=False)


def _self_grade(question: Question, console: Console) -> str:
    read(console, "Answer aloud, then press Enter")
    console.print(Padding(Markdown(question.short), (1, 2)))
    return rated(console)


def rated(console: Console) -> str:
    """The reader's own judgement, as a rating to remember."""
    while True:
        word = read(console, "How was yours? 1 wrong · 2 with gaps · 3 right · 4 easily").lower()
        grade = SELF_GRADES.get(word, word)
        if grade in RATINGS:
            return grade
        console.print("[yellow]give a number from 1 to 4[/]")


def _live_coding(question: Question, card: Code, console: Console) -> str:
    """Grade the learner's file as often as asked. Right at the first try is good, later hard, given up is again."""
    console.print(Markdown(question.task))
    rating = "good"
    while (word := read(console, "Enter grades what is written there, g gives up").lower()) != "g":
        if word:
            continue
        console.print("[dim]The exercise's grader runs it on real ranks ...[/]")
        verdict = grade_task(card.chapter, card.task)
        if verdict.outcome == "pass":
            console.print("[bold green]Right:[/] the exercise's grader accepts it.")
            return rating
        console.print(f"[bold red]Not yet.[/] {escape(verdict.text)}", highlight=False, soft_wrap=True)
        rating = "hard" if verdict.outcome == "fail" else rating
    console.print(f"The solution: refimpl hint {card.chapter} {card.task} --give-up", highlight=False, soft_wrap=True)
    return "again"


def _follow_ups(card: AnyCard) -> str:
    """Questions; of a card, of whatever topic, what it asks."""
    cards = _bank()
    return "\n".join(f"- {Question(cards[text]).ask if text in cards else text}" for text in card.follow_ups)


@cache
def _bank() -> dict[str, AnyCard]:
    """All cards, read once and not after each answer."""
    return load.load()


def _prompt(question: Question) -> str:
    card = question.card
    if isinstance(card, Numeric):
        unit = f" in {UNITS[card.unit][1]}" if card.unit else ""
        within = f", within {card.tolerance:.0%}" if card.tolerance else ", exactly"
        return f"Your answer{unit}{within}"
    if isinstance(card, Order):
        return f"The right order, for example {question.example}"
    return f"Your answer, {question.example}"


def highlighted(text: str, language: str) -> Syntax:
    return Syntax(text, language, background_color="default", word_wrap=True)


def read(console: Console, prompt: str) -> str:
    """A line of the reader's. Leave, if that is "q"."""
    line = console.input(f"[bold cyan]{prompt}:[/] ").strip()
    if line.lower() in ("q", "quit", "exit"):
        raise Leave
    return line


def count(n: int, what: str) -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what}s"
