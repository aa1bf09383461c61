"""Echoes: a rank lost its connection because some other left first, or raises what another has told it.

The other rank's own error says why, and where.
"""

import re
from typing import TypeVar

import torch.distributed as dist

from refimpl.ranks.causes import causes

E = TypeVar("E", bound=Exception)

_CONNECTION_LOST = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|broken pipe|socket (closed|timeout)|timed out waiting"
    r"|application timeout|remote process (has )?(exited|failed)|communicator was aborted",
    re.IGNORECASE,
)


class RankLost(RuntimeError):
    """A collective can not end because another rank left: it returned, raised or was killed."""


def lost_connection(error: BaseException | None) -> bool:
    """Whether this error, or one that it was raised from, only says that another rank went away."""
    return any(
        isinstance(layer, RankLost | ConnectionError | dist.DistNetworkError)
        or (isinstance(layer, RuntimeError) and _CONNECTION_LOST.search(str(layer)))
        for layer in causes(error)
    )


def echo(error: E) -> E:
    """`error`, which this rank raises because another one has failed and told all."""
    error.is_echo = True  # type: ignore[attr-defined]
    return error


def is_echo(error: BaseException) -> bool:
    """Whether another rank's error says more than this one, or any that it was raised from."""
    return any(getattr(layer, "is_echo", False) for layer in causes(error)) or lost_connection(error)
