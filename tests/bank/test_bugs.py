"""The snippets of bug cards really misbehave as claimed, and stop when they are fixed."""

from typing import Any

import pytest

from refimpl.bank.card import Bug
from refimpl.bank.load import load
from refimpl.ranks.errors import RankError

BUGS = [card for card in load().values() if isinstance(card, Bug)]


def has_symptom(code: str, symptom: str) -> bool:
    """Run a card's code; `error` is what its ranks raised, so that a symptom can be about that."""
    names: dict[str, Any] = {"__name__": "snippet", "error": None}
    try:
        exec(code, names)
    except RankError as error:
        names["error"] = error
    return bool(eval(symptom, names))


@pytest.mark.parametrize("card", BUGS, ids=lambda card: card.id)
def test_a_snippet_misbehaves_until_it_is_fixed(card: Bug) -> None:
    assert has_symptom(card.snippet, card.symptom), "the bug does not show"
    assert not has_symptom(card.fixed(), card.symptom), "the fix does not help"
