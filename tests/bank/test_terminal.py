"""Every card in a narrow terminal: the right answer is right, and nothing of the code is cut off."""

import io

import pytest
from rich.console import Console

from refimpl.bank.card import AnyCard, Bug, Numeric, Open
from refimpl.bank.load import load
from refimpl.bank.question import Question
from refimpl.cli.quiz import ask, explain

CARDS = load()
FORMS = sorted({card.form for card in CARDS.values()} - {"code"})  # see test_live_coding.py


def typed(question: Question) -> str:
    if isinstance(question.card, Open):
        return "\n3\n"
    if isinstance(question.card, Numeric):
        return f"{question.result}\n"
    return " ".join(str(place + 1) for place in question.right) + "\n"


def dense(text: str) -> str:
    return "".join(text.split())


def in_terminal(card: AnyCard, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """The rating, and what was printed, without its white space: lines may break anywhere."""
    question, printed = Question(card, seed=1), io.StringIO()
    monkeypatch.setattr("sys.stdin", io.StringIO(typed(question)))
    console = Console(file=printed, width=60)
    rating = ask(question, console)
    explain(question, console)
    return rating, dense(printed.getvalue())


@pytest.mark.parametrize("form", FORMS)
def test_the_right_answer_is_right(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for card in (card for card in CARDS.values() if card.form == form):
        rating, printed = in_terminal(card, monkeypatch)
        assert rating == "good", card.id
        assert ("Right." in printed) == (form != "open"), card.id
        if isinstance(card, Bug):
            assert dense(card.snippet) in printed, card.id
            fixed = set(card.fixed().splitlines()) - set(card.snippet.splitlines())
            assert all("+" + dense(line) in printed for line in fixed if line.strip()), card.id
