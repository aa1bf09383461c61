"""torch's process groups: one for each list of ranks, what it says of itself, and a group for control.

A group of gloo is 3 threads and a socket to every other member, one of NCCL a communicator with buffers, and torch
keeps each until the job's end. So whoever needs one of these ranks gets the one that was made before (`of_rows`);
torch's own table of groups is where it is found, and it goes with the world.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d


def device_of(handle: dist.ProcessGroup | None) -> torch.device:
    """Where this rank's tensors live: what started the rank says so, or the device that its group is bound to.

    Of a group that NCCL serves, and that is bound to none, see `own_gpu`.
    """
    if "REFIMPL_DEVICE" in os.environ:
        return torch.device(os.environ["REFIMPL_DEVICE"])
    if handle is not None and handle.bound_device_id is not None:
        return handle.bound_device_id
    if handle is not None and "nccl" in dist.get_backend_config(handle) and torch.cuda.is_available():
        return own_gpu()
    return torch.device("cpu")


def own_gpu() -> torch.device:
    """The process's current GPU; where nobody has chosen one, that of the rank's number on its machine."""
    own = int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()
    return torch.device("cuda", torch.cuda.current_device() or own)


def libraries_of(handle: dist.ProcessGroup | None) -> dict[str, str]:
    """The library of each type of device: {"cpu": "gloo", "cuda": "nccl"}; none for a group of one rank."""
    if handle is None:
        return {}
    return dict(pair.split(":") for pair in dist.get_backend_config(handle).split(","))


def backend_of(handle: dist.ProcessGroup | None, device: torch.device) -> str:
    """The library for this device's tensors: "nccl" for a GPU's where the group was made with "cpu:gloo,cuda:nccl".

    RuntimeError if the group has none.
    """
    if handle is None:
        return "none"
    libraries = libraries_of(handle)
    if device.type not in libraries:
        config = ",".join(map(":".join, libraries.items()))
        raise RuntimeError(
            f"this process group speaks {config}, and has no library for tensors on {device}: init_process_group("
            '"cpu:gloo,cuda:nccl"), or set REFIMPL_DEVICE to where the tensors are'
        )
    return libraries[device.type]


def by_name(name: str) -> dist.ProcessGroup:
    """torch's group of this name: who still holds one when Python exits makes the process abort."""
    return distributed_c10d._resolve_process_group(name)  # type: ignore[attr-defined, arg-type]


OURS = "refimpl"  # torch's description of the groups that are shared


def of_rows(rows: Sequence[Sequence[int]]) -> dist.ProcessGroup:
    """torch's group of the row that this rank is in; each row is ascending.

    The first time a collective of all ranks in the rows (on NCCL of the job), then the same object ever after. Who
    calls from a thread of its own takes a group of its own (`anew`): calls of one group are matched by their order.
    """
    return _made(_own(rows)) or anew(rows, OURS)


def anew(rows: Sequence[Sequence[int]], description: str | None = None) -> dist.ProcessGroup:
    """A group of this rank's row that nobody else has. A collective of all ranks in the rows.

    Rows that do not share out the whole job are made by their ranks alone.
    """
    mine = _own(rows)
    if sum(map(len, rows)) < dist.get_world_size():
        return _of_members(mine, None, description)
    made: list[dist.ProcessGroup] = [dist.new_group(list(row), timeout=limit(), group_desc=description) for row in rows]
    return made[list(rows).index(mine)]


def limit(least: timedelta = timedelta()) -> timedelta | None:
    """How long a collective may take: as for the job's own group, but `least` at least. None: torch's default.

    torch itself would give a group that is made later its default.
    """
    job = dist.group.WORLD
    assert job is not None
    own = limit_of(job)
    return None if own is None else max(own, least)


def limit_of(handle: dist.ProcessGroup) -> timedelta | None:
    """How long a collective of this group may take. None: its ranks are only played."""
    options = getattr(handle._get_backend(handle._device_types[0]), "options", None)
    return None if options is None else options._timeout


def beside(handle: dist.ProcessGroup, meet: Callable[[], None]) -> dist.ProcessGroup:
    """A second group of the same ranks, for whoever starts calls behind the others' back, in the order of theirs.

    The first time a collective, which `meet`, until all ranks have come, begins; then the same object ever after.
    """
    ranks, description = dist.get_process_group_ranks(handle), f"{OURS}, beside {handle.group_name}"
    found = _described(description, ranks)
    if found is None:
        meet()
        found = anew([ranks], description)
    return found


def _of_members(
    ranks: Sequence[int], backend: str | None, description: str | None = None, least: timedelta = timedelta()
) -> dist.ProcessGroup:
    """A group that is its own ranks' business: a collective of these alone, whatever groups the others are in.

    `least`: see `limit`.
    """
    with _named(ranks), _not_split():
        made: dist.ProcessGroup = dist.new_group(
            list(ranks), limit(least), backend, use_local_synchronization=True, group_desc=description
        )
    return made


@contextmanager
def _named(ranks: Sequence[int]) -> Iterator[None]:
    """A group made inside is named by its ranks, and how many of these they have made.

    torch would name it by how many groups of any kind a rank is in: where its ranks are in different numbers of them,
    they would wait for each other for ever.
    """
    who = "-".join(map(str, ranks))
    number = distributed_c10d._get_default_store().add(f"refimpl/groups/{who}/{dist.get_rank()}", 1)
    naming = distributed_c10d._process_group_name
    distributed_c10d._process_group_name = lambda *_, **__: f"refimpl/{who}/{number}"  # type: ignore[assignment]
    try:
        yield
    finally:
        distributed_c10d._process_group_name = naming


@contextmanager
def _not_split() -> Iterator[None]:
    """Of a job that is bound to its devices torch lets NCCL split the communicator, for which all its ranks must come.

    (ncclCommSplit.) Where only some do, they wait for ever (pytorch issue 134314, pull request 129965).
    """
    job = dist.group.WORLD
    assert job is not None
    device, job.bound_device_id = job.bound_device_id, None
    try:
        yield
    finally:
        job.bound_device_id = device


def _own(rows: Sequence[Sequence[int]]) -> Sequence[int]:
    return next(row for row in rows if dist.get_rank() in row)


def _made(ranks: Sequence[int]) -> dist.ProcessGroup | None:
    """That of all ranks, or one of ours that is there already."""
    if len(ranks) == dist.get_world_size():
        return dist.group.WORLD
    return _described(OURS, ranks)


def _described(description: str, ranks: Sequence[int]) -> dist.ProcessGroup | None:
    for handle, places in distributed_c10d._world.pg_group_ranks.items():
        # What stands there for groups of others is no group.
        if isinstance(handle, dist.ProcessGroup) and handle.group_desc == description and list(places) == list(ranks):
            return handle
    return None


class ControlLine:
    """What carries a group's objects and barriers: on NCCL a gloo group of the same ranks, made by the first call.

    NCCL would send them through the GPU, behind whatever is queued there, with the host waiting; and it does not answer
    once one of its collectives hangs. A rank may come later to a barrier, after a long save, than NCCL waits for data.
    There is one for each of torch's groups, whoever uses that: a `Group` may be made anew for every call of a layer.
    """

    def __init__(self, handle: dist.ProcessGroup, backend: str) -> None:
        self._group, self._name = handle.group_name, handle.group_name if backend != "nccl" else None

    @property
    def handle(self) -> dist.ProcessGroup:
        """The first time a collective of the group."""
        if self._name is None:
            ranks = dist.get_process_group_ranks(by_name(self._group))
            description = f"{OURS}, control of {self._group}"
            found = _described(description, ranks)
            found = found or _of_members(ranks, "gloo", description, distributed_c10d.default_pg_timeout)
            self._name = found.group_name
        return by_name(self._name)
