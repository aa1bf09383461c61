"""How a command refuses: one line on stderr, once for all of a launcher's ranks, and exit status 2."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from refimpl.ranks.environment import find


def refuse(command: str, reason: object) -> NoReturn:
    """Say why `command` cannot do it, and leave. SystemExit with status 2."""
    place = find()
    if place is None or place.rank == 0:
        print(f"{command}: {reason}", file=sys.stderr)
    raise SystemExit(2)


@contextmanager
def refusing(command: str, *errors: type[Exception]) -> Iterator[None]:
    """`refuse` for each of these errors that the block raises."""
    try:
        yield
    except errors as reason:
        refuse(command, reason)
