"""The server that ranks are forked from: it has imported torch, so that they need not."""

import multiprocessing.forkserver

PRELOAD = ["torch", "torch.distributed", "torch._dynamo", "refimpl.launch"]  # every optimizer imports torch._dynamo
FROZEN = "refimpl.ranks.frozen"  # after all others


def start_server(*also: str) -> None:
    """Start it now, in the background. Called before this process imports torch, the two imports overlap.

    `also`: modules that every rank would import.
    """
    PRELOAD.extend(also)
    multiprocessing.forkserver.set_forkserver_preload([*PRELOAD, FROZEN])
    multiprocessing.forkserver.ensure_running()
