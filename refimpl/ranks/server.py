"""The server that ranks are forked from: it has imported torch and the stages, so that they need not.

Its socket is a file. multiprocessing puts it into a folder that whoever is killed leaves behind, under a name that says
nothing of whose it was: here that is a folder as `folder.py` makes, which the next job clears.
"""

import multiprocessing.forkserver
import os
import shutil
import sys
import tempfile
import time
from contextlib import AbstractContextManager
from multiprocessing.process import BaseProcess, current_process
from multiprocessing.util import Finalize

from refimpl.ranks import folder
from refimpl.ranks.environment import variables
from refimpl.ranks.errors import RankError

# Every optimizer imports torch._dynamo. What trains is here too: 0.15 s of CPU time in every rank, if it imported that.
PRELOAD = ["torch", "torch.distributed", "torch._dynamo", "refimpl.launch", "refimpl.zero.zero3", "refimpl.model.gpt"]
LOADING, FROZEN = "refimpl.ranks.loading", "refimpl.ranks.frozen"  # before and after all others
ENDED = (
    "the server that ranks are forked from has ended: killed, by hand or where memory ran out. No rank has failed; the "
    "next run starts another server"
)
_SHORT = 60  # characters of the folder for temporary files
_GONE = 1.0  # seconds to wait at most: who has ended may be an earlier server, and the present one well
_UNKNOWN = 255  # multiprocessing's exit code for who was forked from a server that can be asked no more


def start_server(*also: str) -> None:
    """Start it now, in the background. Called before this process imports torch, the two imports overlap.

    `also`: modules that every rank would import. RuntimeError where its socket can have no name.
    """
    PRELOAD.extend(also)
    multiprocessing.forkserver.set_forkserver_preload([LOADING, *PRELOAD, FROZEN])
    _take_folder()
    try:
        with _our_path():
            multiprocessing.forkserver.ensure_running()
    except OSError as error:
        if "AF_UNIX path too long" not in str(error):
            raise
        there = tempfile.gettempdir()
        raise RuntimeError(
            f"ranks are started through a socket in the folder for temporary files, and {there} ({len(there)} "
            "characters) is too long for that: set TMPDIR to a folder with a name of at most 70"
        ) from None


def _our_path() -> AbstractContextManager[None]:
    """A Python begun in the block imports from where this one does, and from its own working directory only if so.

    Python 3.11's server hears the path and ignores it. Ranks would run another refimpl than the script that starts
    them, where one is installed and the script lies in a checkout, and could not send it what they fail with.
    """
    return variables({"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONSAFEPATH": "1"})


def _take_folder() -> None:
    """Give multiprocessing a folder for the sockets of this process and its ranks, if it has none yet.

    Where the name of one in there would be too long it makes its own.
    """
    config = current_process()._config  # type: ignore[attr-defined]  # as multiprocessing.util.get_temp_dir
    if not config.get("tempdir") and len(tempfile.gettempdir()) <= _SHORT:
        directory, _ = folder.make()  # held until this process ends
        Finalize(None, shutil.rmtree, (directory,), {"ignore_errors": True}, exitpriority=-100)  # not in its forks
        config["tempdir"] = str(directory)


def has_ended(rank: BaseProcess) -> bool:
    """Whether a rank that seems to have ended is there still: the server has, who would have told how."""
    if rank.exitcode != _UNKNOWN or rank.pid is None:
        return False
    try:
        os.kill(rank.pid, 0)  # asks, and sends nothing
    except ProcessLookupError:
        return False
    return True


def ended() -> RankError:
    """The error of a server that has ended, when it is gone for the next run too, which starts another.

    A killed process closes its files a moment before. macOS tells so from Python 3.13 on.
    """
    server = multiprocessing.forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    until, ask = time.monotonic() + _GONE, os.WEXITED | os.WNOWAIT | os.WNOHANG
    while time.monotonic() < until and hasattr(os, "waitid") and os.waitid(os.P_PID, server, ask) is None:
        time.sleep(0.001)
    return RankError(ENDED)
