"""A question: a card as one person meets it once, numbers drawn and options shuffled from a seed, and its grade."""

import random
import re
from dataclasses import dataclass
from typing import Any

from refimpl.bank.card import AnyCard, Bug, Choice, Code, Numeric, Order
from refimpl.bank.place import stub
from refimpl.bank.scope import UNITS, fill, number

NUMBER = r"[-+]?(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?|\.\d+)(?:e[-+]?\d+)?"  # 1,234.5 or 1.2e3
AMOUNT = re.compile(rf"\s*({NUMBER})\s*([^\d\s,.].*?)?\s*", re.IGNORECASE)
SPELLINGS = {
    "sec": "s", "second": "s", "minute": "min", "hour": "h", "day": "days", "d": "days", "percent": "pct",
    "millisecond": "ms", "microsecond": "us", "byte": "B",
}  # fmt: skip
SAME_KIND = (
    {"B", "KB", "MB", "GB", "TB", "KiB", "MiB", "GiB"},
    {"us", "ms", "s", "min", "h", "days"},
)
# Answers that differ by such a factor come from a typical slip.
SLIPS = {
    2: "twice that",
    0.5: "half of that",
    8: "8 times that: bits or bytes?",
    0.125: "an eighth: bits or bytes?",
    1000: "1000 times that",
    0.001: "a thousandth of that",
    2**30 / 1e9: "in units of 2^30",
    1e9 / 2**30: "in units of 2^30",
}


class AnswerError(ValueError):
    """An answer that cannot be read; the text says what would be."""


@dataclass(frozen=True)
class Verdict:
    right: bool
    why: str  # what was right, or what is wrong with the answer given


class Question:
    """`ask`, `short`, `deep`, `wrong` and `options` are Markdown with all figures in place."""

    def __init__(self, card: AnyCard, seed: int = 0) -> None:
        self.card, self.seed = card, seed
        self._names = card.names(seed)
        self.ask, self.short, self.deep = (self._fill(t) for t in (card.ask, card.short, card.deep))
        self.wrong = [(self._fill(w.claim), self._fill(w.why)) for w in card.wrong]
        self.options: list[str] = []
        self.right: list[int] = []  # choice, bug: the option. order: the options in the right order
        if isinstance(card, Choice | Bug):
            self._shuffle([self._fill(card.answer), *(claim for claim, _ in self.wrong)])
            self.right = self.right[:1]
        if isinstance(card, Order):
            self._shuffle([self._fill(item) for item in card.items])

    def _fill(self, text: str) -> str:
        return fill(text, self._names)

    def _shuffle(self, items: list[str]) -> None:
        places = list(range(len(items)))
        chance = random.Random(f"{self.card.id} {self.seed} options")
        while places == sorted(places):  # the right order must not be the one shown
            chance.shuffle(places)
        self.options = [items[i] for i in places]
        self.right = [places.index(i) for i in range(len(items))]

    @property
    def result(self) -> float:
        """A numeric card's answer, in its unit."""
        assert isinstance(self.card, Numeric)
        return float(self._names["answer"]) / (UNITS[self.card.unit][0] if self.card.unit else 1)

    @property
    def answer(self) -> str:
        """The right answer in one line; an open card's is its `short`."""
        if isinstance(self.card, Numeric):
            return f"{number(self.result)} {UNITS[self.card.unit][1] if self.card.unit else ''}".strip()
        if isinstance(self.card, Order):
            return ", ".join(str(i + 1) for i in self.right)
        return self.options[self.right[0]] if self.options else self.short

    @property
    def example(self) -> str:
        """What an answer looks like: as many numbers as there are to give, and never the right ones."""
        if isinstance(self.card, Numeric):
            return f"12.5 {UNITS[self.card.unit][1] if self.card.unit else ''}".strip()
        last = len(self.options)
        return (
            " ".join(str(i + 1) for i in range(last)) if isinstance(self.card, Order) else f"a number from 1 to {last}"
        )

    def grade(self, answer: str) -> Verdict:
        """Judge an answer as typed: an option's number, "3 1 2", or "12.5 GB". AnswerError if it cannot be read.

        An open card is judged by oneself, a code card by the exercise's grader.
        """
        if isinstance(self.card, Numeric):
            return self._grade_number(answer, self.card)
        picked = [int(word) - 1 for word in re.findall(r"\d+", answer)]
        if isinstance(self.card, Order):
            if sorted(picked) != sorted(self.right):
                raise AnswerError(f"give all {len(self.options)} numbers once each, for example {self.example}")
            return self._grade_order(picked)
        if len(picked) != 1 or not 0 <= picked[0] < len(self.options):
            raise AnswerError(f"give one number from 1 to {len(self.options)}")
        if picked == self.right:
            return Verdict(True, self.short)
        reasons: dict[str, str] = dict(self.wrong)
        return Verdict(False, reasons[self.options[picked[0]]])

    def _grade_order(self, picked: list[int]) -> Verdict:
        if picked == self.right:
            return Verdict(True, self.short)
        first = next(i for i, (a, b) in enumerate(zip(picked, self.right, strict=True)) if a != b)
        return Verdict(False, f"Step {first + 1} is: {self.options[self.right[first]]}")

    def _grade_number(self, answer: str, card: Numeric) -> Verdict:
        given, expected = amount(answer, card.unit), self.result
        error = abs(given - expected) / abs(expected) if expected else abs(given)
        if error <= card.tolerance:
            return Verdict(True, self.answer)
        for factor, slip in SLIPS.items():
            if expected and abs(given / expected / factor - 1) <= card.tolerance:
                return Verdict(False, f"It is {self.answer}: yours is {slip}.")
        return Verdict(False, f"It is {self.answer}.")

    def facts(self) -> dict[str, Any]:
        """Everything a reader sees, JSON-able."""
        seen: dict[str, Any] = {"ask": self.ask, "short": self.short, "deep": self.deep, "answer": self.answer}
        seen["wrong"] = [{"claim": claim, "why": why} for claim, why in self.wrong]
        if self.options:
            seen |= {"options": self.options, "right": self.right}
        if isinstance(self.card, Numeric):
            seen |= {"value": self.result, "unit": self.card.unit, "tolerance": self.card.tolerance}
        return seen

    @property
    def task(self) -> str:
        """A code card's: what to write, where, and what grades it."""
        assert isinstance(self.card, Code)
        given = f"```python\n{stub(self.card.chapter, self.card.task)}\n```"
        return f"{given}\n\nWrite it in `{self.card.file}`. This grades it:\n\n```\n{self.card.command}\n```"


def amount(text: str, unit: str) -> float:
    """ "12.5 GB" -> 12.5e9 / (bytes in `unit`); without a unit of its own the number is in `unit` already.

    AnswerError for what is no number or has a unit of another kind.
    """
    match, shown = AMOUNT.fullmatch(text), UNITS[unit][1] if unit else ""
    if match is None:
        raise AnswerError(f"give a number, for example {f'12.5 {shown}'.strip()}")
    given = float(match[1].replace(",", ""))
    word = unit_named(match[2].partition(" ")[0]) if match[2] else ""  # "177 elements of padding" is 177 elements
    if not word or word == unit:
        return given
    if any({word, unit} <= kind for kind in SAME_KIND):
        return given * UNITS[word][0] / UNITS[unit][0]
    raise AnswerError(f"{word} is not a unit of this answer: give {f'it in {shown}' if shown else 'a bare number'}")


def unit_named(word: str) -> str:
    """The unit's name in UNITS for a word as people write it: "GB/s" -> "GBs", "second" -> "s", "gb" -> "GB".

    "Gb" stays: it may mean bits.
    """
    known = {name: name for name in UNITS} | {long: name for name, (_, long) in UNITS.items()} | SPELLINGS
    known = {spelt.lower(): name for spelt, name in known.items()} | known
    return next((known[w] for w in (word, f"{word}s", word.removesuffix("s")) if w in known), word)
