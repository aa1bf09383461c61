"""The folder that those ranks of a job have in common that are on this machine, whoever has started them.

`launch.run` names it beforehand (REFIMPL_BOARD; empty: there is none). Of ranks that torch has joined, in a script of
its own or in `join`, the first on a machine to ask makes one, and the job's store tells the others: no collective, so
each may ask when it likes, and ranks that never do are not waited for.

Each holds it until the job is over there, and the last takes it away (see `folder`). A job may be followed by another
on the same store (`init_process_group` after `destroy_process_group`, under torchrun): that one has another folder, as
each rank counts the jobs in which it has asked.
"""

import os
import socket
import sys
from pathlib import Path
from weakref import WeakKeyDictionary, finalize

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store, _get_default_store

from refimpl.ranks import folder

VARIABLE = "REFIMPL_BOARD"
_known: WeakKeyDictionary[Store, Path | None] = WeakKeyDictionary()  # of each job, which its own store stands for


def of_job() -> Path | None:
    """The folder; None in a process without a job, and where a job has none."""
    said = os.environ.get(VARIABLE)
    if said is not None:
        return Path(said) if said else None
    real = dist.is_initialized() and dist.get_backend() != "fake"  # whose ranks are not there
    return agreed() if real else None


def agreed() -> Path | None:
    """The folder of which the job's store knows; None if it is gone, or lies where this rank does not see it."""
    store = _get_default_store()
    if store not in _known:
        _known[store] = _meet(store)
    return _known[store]


def _meet(store: Store) -> Path | None:
    job = store.add(f"refimpl/jobs/{dist.get_rank()}", 1)
    key = f"refimpl/folder/{job}/{host()}"
    if store.add(f"{key}/asked", 1) == 1:
        found, handle = folder.make()
        store.set(key, str(found))
    else:
        found = Path(store.get(key).decode())
        try:
            handle = folder.hold(found)
        except FileNotFoundError:
            return None
    finalize(store, _leave, handle)  # at the end of the process too
    return found


def _leave(handle: int) -> None:
    os.close(handle)
    folder.clear()


def host() -> str:
    """What processes that find each other in /proc have in common: the running kernel, the numbering of processes."""
    if sys.platform != "linux":
        return socket.gethostname()
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
