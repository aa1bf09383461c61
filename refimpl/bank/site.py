"""The bank for those who show it elsewhere: plain dictionaries that JSON can hold."""

from typing import Any

from refimpl.bank.card import LITERATURE, AnyCard, Bug, Code, Numeric
from refimpl.bank.load import load
from refimpl.bank.place import Place, of_code, of_test, stub
from refimpl.bank.question import Question

VARIANTS = 5  # draws of a numeric card


def export() -> list[dict[str, Any]]:
    """Every card, figures evaluated, texts in Markdown without HTML.

    id, level, topic, form; ask, short, deep, answer, wrong [{claim, why}]; follow_ups [{id or None, text}];
    code and proof [{name, file, line, end}], proof empty where the sources are it; sources. choice, bug, order:
    options, right (positions in options; for order all, in the right order). bug: snippet, fix {old, new}, fixed.
    code: chapter, task, stub, file, command. numeric: value, unit, tolerance, and variants (`VARIANTS` draws, each with
    ask, short, deep, answer, wrong, value).
    """
    cards = load()
    return [_one(card, cards) for card in cards.values()]


def _one(card: AnyCard, cards: dict[str, AnyCard]) -> dict[str, Any]:
    shown: dict[str, Any] = {"id": card.id, "level": card.level, "topic": card.topic, "form": card.form}
    first = Question(card)
    shown |= first.facts()
    shown["follow_ups"] = [
        {"id": text, "text": Question(cards[text]).ask} if text in cards else {"id": None, "text": text}
        for text in card.follow_ups
    ]
    shown["code"] = [_link(symbol, of_code(symbol)) for symbol in card.code]
    shown["proof"] = [_link(card.proof, of_test(card.proof))] if card.proof != LITERATURE else []
    shown["sources"] = list(card.sources)
    if isinstance(card, Bug):
        shown |= {"snippet": card.snippet.strip(), "fix": card.fix.model_dump(), "fixed": card.fixed().strip()}
    if isinstance(card, Code):
        shown |= {"task": card.task, "chapter": card.chapter, "file": card.file, "command": card.command}
        shown["stub"] = stub(card.chapter, card.task)
    if isinstance(card, Numeric):
        shown["variants"] = [Question(card, seed).facts() for seed in range(VARIANTS)]
    return shown


def _link(name: str, place: Place) -> dict[str, Any]:
    return {"name": name, **place._asdict()}
