"""A card: one question of the kind that interviews ask, its answers, and what proves them.

`short` is the answer in 30 seconds, `deep` the derivation. `wrong` holds common wrong answers, each with its reason; in
a choice or bug card they are the options beside `answer`. `code` points at what can be read, `proof` at the test that
fails when the claim is false; a card about what is not built here says "literature", and its `sources` are the proof.
Six forms: open (graded by oneself), choice, numeric (fresh numbers each time), bug (a snippet that misbehaves), order,
and code (a task of the exercises, written and graded).
"""

import random
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, model_validator

from refimpl.bank.scope import UNITS, bind, value

Level = Literal["junior", "mid", "senior", "staff"]
Topic = Literal[
    "basics", "architecture", "zero", "parallelism", "memory", "communication", "internals", "performance",
    "system-design", "advanced",
]  # fmt: skip
Form = Literal["open", "choice", "numeric", "bug", "order", "code"]
LEVELS: tuple[str, ...] = get_args(Level)
TOPICS: tuple[str, ...] = get_args(Topic)
FORMS: tuple[str, ...] = get_args(Form)
LITERATURE = "literature"

Text = Annotated[str, Field(min_length=1)]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Wrong(Strict):
    """A common wrong answer, and why it is wrong."""

    claim: Text
    why: Text


class Base(Strict):
    """What every card has. Texts are Markdown with `{{ expression }}` for figures."""

    id: Annotated[str, Field(pattern=r"^[a-z0-9]+(-[a-z0-9]+)*$")]
    level: Level
    topic: Topic
    ask: Text
    short: Text
    deep: Text
    wrong: Annotated[tuple[Wrong, ...], Field(min_length=1)]
    follow_ups: Annotated[tuple[Text, ...], Field(min_length=1)]  # ids of cards, or questions
    code: tuple[Annotated[str, Field(pattern=r"^refimpl(\.\w+)*:\w+(\.\w+)*$")], ...] = ()
    proof: Annotated[str, Field(pattern=rf"^({LITERATURE}|(tests|exercises)/[\w/]+\.py::test_\w+)$")]
    sources: Annotated[tuple[Text, ...], Field(min_length=1)]
    let: dict[str, str] = {}  # names for the texts: name -> expression, in order

    @model_validator(mode="after")
    def has_code(self) -> Self:
        if not self.code and self.proof != LITERATURE:
            raise ValueError(f"code: Field required, or proof = {LITERATURE!r}")
        return self

    def draw(self, seed: int) -> dict[str, Any]:
        """The numbers that are fresh each time: none, but in a numeric card."""
        return {}

    def names(self, seed: int) -> dict[str, Any]:
        """What the texts' expressions may use."""
        return bind(self.let, self.draw(seed))


class Open(Base):
    """Answered aloud or in one's head, then compared."""

    form: Literal["open"]


class Choice(Base):
    """One right answer among the wrong ones."""

    form: Literal["choice"]
    answer: Text
    wrong: Annotated[tuple[Wrong, ...], Field(min_length=2)]


class Numeric(Base):
    """`draw`: name -> values to choose from. `answer`: an expression, in base units (bytes, seconds)."""

    form: Literal["numeric"]
    numbers: dict[str, Annotated[list[int | float | str], Field(min_length=2)]]
    answer: Text
    unit: str = ""
    tolerance: Annotated[float, Field(ge=0, lt=0.5)] = 0.02  # relative

    @model_validator(mode="after")
    def unit_is_known(self) -> "Numeric":
        if self.unit and self.unit not in UNITS:
            raise ValueError(f"unit {self.unit!r} is none of {', '.join(UNITS)}")
        return self

    def draw(self, seed: int) -> dict[str, Any]:
        chance = random.Random(f"{self.id} {seed}")
        return {name: chance.choice(values) for name, values in self.numbers.items()}

    def names(self, seed: int) -> dict[str, Any]:
        """As of every card, and `answer`, so that the texts can show it."""
        names = super().names(seed)
        return {**names, "answer": value(self.answer, names)}


class Fix(Strict):
    """The change that makes the snippet right."""

    old: Text
    new: str


class Bug(Base):
    """A snippet that runs and misbehaves. `symptom`: an expression over its names (and `error`, what it raised)
    that is true of the snippet, and false once it is fixed. The question: what is the cause?"""

    form: Literal["bug"]
    snippet: Text
    symptom: Text
    fix: Fix
    answer: Text
    wrong: Annotated[tuple[Wrong, ...], Field(min_length=2)]

    @model_validator(mode="after")
    def fix_fits(self) -> "Bug":
        if self.snippet.count(self.fix.old) != 1:
            raise ValueError("fix.old must occur exactly once in the snippet")
        return self

    def fixed(self) -> str:
        return self.snippet.replace(self.fix.old, self.fix.new)


class Order(Base):
    """Steps to put in order; `items` has them in the right one."""

    form: Literal["order"]
    items: Annotated[tuple[Text, ...], Field(min_length=3)]


class Code(Base):
    """Live coding: the learner writes this task in the chapter's exercise.py, and the exercise's grader judges it."""

    form: Literal["code"]
    chapter: Annotated[str, Field(pattern=r"^\d\d_\w+$")]
    task: Text

    @property
    def file(self) -> str:
        """Where the learner writes."""
        return f"exercises/{self.chapter}/exercise.py"

    @property
    def command(self) -> str:
        """What grades it. `proof` is the grader's own place."""
        return f"pytest {self.proof}"


Card = Annotated[Open | Choice | Numeric | Bug | Order | Code, Field(discriminator="form")]
AnyCard = Open | Choice | Numeric | Bug | Order | Code
CARD: TypeAdapter[AnyCard] = TypeAdapter(Card)


def texts(card: AnyCard) -> dict[str, str]:
    """Every text of a card that people read, by field, with its placeholders."""
    found = {"ask": card.ask, "short": card.short, "deep": card.deep}
    for i, wrong in enumerate(card.wrong):
        found |= {f"wrong {i} claim": wrong.claim, f"wrong {i} why": wrong.why}
    found |= {f"follow-up {i}": text for i, text in enumerate(card.follow_ups)}
    if isinstance(card, Choice | Bug):
        found["answer"] = card.answer
    if isinstance(card, Order):
        found |= {f"item {i}": text for i, text in enumerate(card.items)}
    return found
