"""What has been answered, and when to ask again: a JSON file in the user's data folder, scheduled by FSRS.

FSRS models memory of a card by stability (days until recall falls to 90%) and difficulty, and asks again when recall is
about to fall below that. https://github.com/open-spaced-repetition/free-spaced-repetition-scheduler
"""

import random
import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

from fsrs import Card as Memory
from fsrs import Rating, Scheduler
from pydantic import BaseModel, ConfigDict, ValidationError

from refimpl import userdata

RATINGS = {"again": Rating.Again, "hard": Rating.Hard, "good": Rating.Good, "easy": Rating.Easy}


class Entry(BaseModel):
    """One card's history. `memory` is FSRS's own record."""

    model_config = ConfigDict(extra="forbid")

    memory: dict[str, Any]
    answered: int = 0
    right: int = 0

    def model_post_init(self, context: Any) -> None:
        Memory.from_dict(self.memory)  # type: ignore[arg-type]  # a damaged one raises here

    @property
    def due(self) -> datetime:
        due: datetime = Memory.from_dict(self.memory).due  # type: ignore[arg-type]
        return due


class Stored(BaseModel):
    """The file."""

    model_config = ConfigDict(extra="forbid")

    version: Literal[1] = 1
    cards: dict[str, Entry] = {}


class Progress:
    """The progress file. It is read before and written after each answer, so that an interruption loses nothing."""

    def __init__(self, folder: Path | None = None) -> None:
        self.path = (folder or userdata.data_folder()) / "quiz.json"
        self._scheduler = Scheduler(enable_fuzzing=False)

    def read(self) -> dict[str, Entry]:
        """Entries by card id. A file that cannot be understood is set aside, with a message, and never overwritten."""
        if not self.path.exists():
            return {}
        try:
            return Stored.model_validate_json(self.path.read_bytes()).cards
        except (ValidationError, ValueError, KeyError, TypeError) as error:
            reason = error.errors()[0]["msg"] if isinstance(error, ValidationError) else repr(error)
            aside = userdata.set_aside(self.path)
            print(
                f"The quiz's progress file is damaged ({reason}). It is kept as {aside}; starting anew.",
                file=sys.stderr,
            )
            return {}

    def record(self, card_id: str, rating: str, now: datetime | None = None) -> Entry:
        """Count an answer, rated again, hard, good or easy, and schedule the next time. Saved when this returns."""
        entries = self.read()
        old = entries.get(card_id)
        memory = Memory.from_dict(old.memory) if old else Memory()  # type: ignore[arg-type]
        memory, _ = self._scheduler.review_card(memory, RATINGS[rating], now or datetime.now(UTC))
        entries[card_id] = Entry(
            memory=dict(memory.to_dict()),
            answered=(old.answered if old else 0) + 1,
            right=(old.right if old else 0) + (rating != "again"),
        )
        userdata.replace(self.path, Stored(cards=entries).model_dump_json(indent=1) + "\n")
        return entries[card_id]


class Asked(Protocol):
    """A card, or whatever else comes again by its id."""

    @property
    def id(self) -> str: ...


AnyAsked = TypeVar("AnyAsked", bound=Asked)


def choose(
    cards: Iterable[AnyAsked], entries: dict[str, Entry], n: int, seed: int, now: datetime | None = None
) -> list[AnyAsked]:
    """What to ask next, at most n: due cards, longest due first; then new ones, by chance; then those soonest due."""
    now, pool = now or datetime.now(UTC), list(cards)
    known = sorted((c for c in pool if c.id in entries), key=lambda c: entries[c.id].due)
    fresh = [c for c in pool if c.id not in entries]
    random.Random(seed).shuffle(fresh)
    due = [c for c in known if entries[c.id].due <= now]
    return [*due, *fresh, *known[len(due) :]][:n]
