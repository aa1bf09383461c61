"""A lost connection is an echo: some other rank left first, and its own error says why."""

import re

import torch.distributed as dist

_CONNECTION_LOST = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|broken pipe|socket (closed|timeout)|timed out waiting"
    r"|remote process (has )?(exited|failed)|communicator was aborted",
    re.IGNORECASE,
)


class RankLost(RuntimeError):
    """A collective can not end because another rank left: it returned, raised or was killed."""


def lost_connection(error: BaseException | None) -> bool:
    """Whether this error, or one that it was raised from, only says that another rank went away."""
    while error is not None:
        if isinstance(error, RankLost | ConnectionError | dist.DistNetworkError) or (
            isinstance(error, RuntimeError) and _CONNECTION_LOST.search(str(error))
        ):
            return True
        error = error.__cause__ or error.__context__
    return False
