"""An attempt: ranks that torchrun starts again meet in the store of the attempt before, where its addresses still lie.

torchrun keeps one store for all attempts, at one port. Gloo would read there where a rank that is dead has listened,
and be refused. So each rank writes a name that nobody had before; rank 0 says which names it has seen, again whenever
one changes, until each rank has found its own and has said so. The number of restarts that torchrun tells is no such
name: a machine that has come later counts fewer of them.
"""

import datetime
import time
from uuid import uuid4

from torch.distributed.distributed_c10d import PrefixStore, Store

PAUSE = 0.01  # seconds between two looks


def of_this_attempt(store: Store, rank: int, size: int, limit: datetime.timedelta) -> Store:
    """The part of the store that this attempt's ranks have for themselves. Each of them must call it.

    RuntimeError if that takes longer than `limit`.
    """
    mine, due = uuid4().hex, time.monotonic() + limit.total_seconds()
    store.set(f"joined/{rank}", mine)
    seen: list[str] = []
    while rank == 0 or mine not in seen:
        if rank == 0:
            seen = _announced(store, size, seen)
            if PrefixStore(mine, store).check(seen[1:]):
                break
        elif store.check(["attempt"]):
            seen = store.get("attempt").decode().split()
        if time.monotonic() > due:
            raise RuntimeError(f"rank {rank}: after {limit} not all {size} ranks of this attempt have come")
        time.sleep(PAUSE)
    ours = PrefixStore(seen[0], store)
    ours.set(mine, "")
    return ours


def _announced(store: Store, size: int, before: list[str]) -> list[str]:
    """By rank 0: the newest name of each rank, said to the others if one has changed."""
    keys = [f"joined/{rank}" for rank in range(size)]
    store.wait(keys)
    names = [name.decode() for name in store.multi_get(keys)]
    if names != before:
        store.set("attempt", " ".join(names))
    return names
