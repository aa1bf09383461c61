"""The server that ranks are forked from: it has imported torch and the stages, so that they need not."""

import multiprocessing.forkserver
import os
import tempfile
from multiprocessing.process import BaseProcess

# Every optimizer imports torch._dynamo. What trains is here too: 0.15 s of CPU time in every rank, if it imported that.
PRELOAD = ["torch", "torch.distributed", "torch._dynamo", "refimpl.launch", "refimpl.zero.zero3", "refimpl.model.gpt"]
FROZEN = "refimpl.ranks.frozen"  # after all others
ENDED = (
    "the server that ranks are forked from has ended: killed, by hand or where memory ran out. No rank has failed; the "
    "next run starts another server"
)
_UNKNOWN = 255  # multiprocessing's exit code for who was forked from a server that can be asked no more


def start_server(*also: str) -> None:
    """Start it now, in the background. Called before this process imports torch, the two imports overlap.

    `also`: modules that every rank would import. RuntimeError where its socket can have no name.
    """
    PRELOAD.extend(also)
    multiprocessing.forkserver.set_forkserver_preload([*PRELOAD, FROZEN])
    try:
        multiprocessing.forkserver.ensure_running()
    except OSError as error:
        if "AF_UNIX path too long" not in str(error):
            raise
        folder = tempfile.gettempdir()
        raise RuntimeError(
            f"ranks are started through a socket in the folder for temporary files, and {folder} ({len(folder)} "
            "characters) is too long for that: set TMPDIR to a folder with a name of at most 70"
        ) from None


def has_ended(rank: BaseProcess) -> bool:
    """Whether a rank that seems to have ended is there still: the server has, who would have told how."""
    if rank.exitcode != _UNKNOWN or rank.pid is None:
        return False
    try:
        os.kill(rank.pid, 0)  # asks, and sends nothing
    except ProcessLookupError:
        return False
    return True
