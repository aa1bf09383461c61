"""The bank: the cards of interview_bank/*.toml, a file a topic, checked as they are read.

A file has `topic = "..."` at its top and a `[[card]]` for each question; `refimpl.bank.card` has the fields.
"""

import difflib
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from refimpl.bank.card import CARD, FORMS, LEVELS, TOPICS, AnyCard
from refimpl.bank.place import ROOT
from refimpl.bank.scope import BankError

FOLDER = ROOT / "interview_bank"


def load(folder: Path = FOLDER) -> dict[str, AnyCard]:
    """All cards by id, in the files' order. BankError names the file and the card that is wrong."""
    files = sorted(folder.glob("*.toml"))
    if not files:
        raise BankError(
            f"no question cards in {folder}: run from a clone of the project, installed by pip install -e ."
        )
    cards: dict[str, AnyCard] = {}
    for file in files:
        for card in _read(file):
            if card.id in cards:
                raise BankError(f"{file.name}: card {card.id!r} is there twice")
            cards[card.id] = card
    return cards


def select(topic: str | None = None, level: str | None = None, form: str | None = None) -> dict[str, AnyCard]:
    """The cards of one topic, level and form (None: any). ValueError names the nearest that there is."""
    wanted = {"topic": topic, "level": level, "form": form}
    for name, known in {"topic": TOPICS, "level": LEVELS, "form": FORMS}.items():
        given = wanted[name]
        if given is not None and given not in known:
            near = difflib.get_close_matches(given, known, 1)
            hint = f"did you mean {near[0]}? Choose" if near else "choose"
            raise ValueError(f"there is no {name} {given!r}; {hint} from {', '.join(known)}")
    cards = {c.id: c for c in load().values() if all(v is None or getattr(c, k) == v for k, v in wanted.items())}
    if not cards:
        asked = ", ".join(f"{name} {given}" for name, given in wanted.items() if given)
        raise ValueError(f"no card has {asked}; leave one of them out")
    return cards


def _read(file: Path) -> Iterator[AnyCard]:
    try:
        content: dict[str, Any] = tomllib.loads(file.read_text())
    except tomllib.TOMLDecodeError as error:
        raise BankError(f"{file.name}: {error}") from error
    for raw in content["card"]:
        try:
            yield CARD.validate_python({"topic": content["topic"], **raw})
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"][1:])
            raise BankError(f"{file.name}: card {raw.get('id')!r}: {where}: {first['msg']}") from error
