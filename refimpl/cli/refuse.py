"""How a command refuses: one line on stderr, once for all of a launcher's ranks, and exit status 2."""

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from refimpl.ranks.environment import find


def refuse(command: str, reason: object, status: int = 2) -> NoReturn:
    """Say why `command` cannot do it, and leave. SystemExit with this status."""
    place = find()
    if place is None or place.rank == 0:
        print(f"{command}: {reason}", file=sys.stderr)
    raise SystemExit(status)


@contextmanager
def refusing(command: str, *errors: type[Exception], status: int = 2) -> Iterator[None]:
    """`refuse` for each of these errors that the block raises."""
    try:
        yield
    except errors as reason:
        refuse(command, reason, status)


@contextmanager
def keeping_progress(command: str) -> Iterator[None]:
    """`refuse` where what the learner has reached cannot be written."""
    try:
        yield
    except OSError as reason:
        refuse(command, f"cannot keep your progress: {reason}; set REFIMPL_DATA to a folder that you can write")


@contextmanager
def finding_room(command: str) -> Iterator[None]:
    """`refuse` where what the block prints or writes finds no room: `refimpl plan ... > FILE` on a full disk."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except OSError as reason:
        if reason.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more, at its end
        refuse(command, reason)
