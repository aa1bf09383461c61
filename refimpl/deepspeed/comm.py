"""`deepspeed.comm`: torch.distributed's collectives under DeepSpeed's names, and `init_distributed`.

Where DeepSpeed's function is torch's, it is torch's here. Without a launcher `init_distributed` makes a world of one,
in which every collective works. Calls, and an engine's, are logged where `comms_logger` or `configure` asks for it;
bytes sent are counted by an engine's own ledger (`engine.group.ledger`).
DeepSpeed: deepspeed/comm/comm.py and deepspeed/comm/torch.py.
"""

import functools
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from refimpl import launch
from refimpl.comm.native import current
from refimpl.deepspeed.accelerator import get_accelerator
from refimpl.deepspeed.timed import refuse_elsewhere, timed_op
from refimpl.deepspeed.utils.comms_logging import CommsLogger
from refimpl.deepspeed.utils.logging import logger
from refimpl.engine.engine import Engine
from refimpl.measure.comms_log import CommsLog
from refimpl.ranks import environment

default_pg_timeout = timedelta(minutes=int(os.environ.get("DEEPSPEED_TIMEOUT", "30")))


comm = sys.modules[__name__]  # `deepspeed.comm.comm` is a file there; OpenFold asks it by attribute
comms_logger = CommsLogger()  # the functions here take no object that could hold it
_timed = functools.partial(timed_op, comms_logger)

all_reduce = _timed(dist.all_reduce, "all_reduce")
inference_all_reduce = _timed(dist.all_reduce, "inference_all_reduce", "all_reduce")
all_gather = _timed(dist.all_gather, "all_gather")
all_gather_into_tensor = _timed(current("all_gather"), "all_gather_into_tensor")
reduce_scatter_tensor = _timed(current("reduce_scatter"), "reduce_scatter_tensor")
allgather_fn, reduce_scatter_fn = all_gather_into_tensor, reduce_scatter_tensor
reduce_scatter = _timed(dist.reduce_scatter, "reduce_scatter")
all_to_all_single = _timed(dist.all_to_all_single, "all_to_all_single")
all_to_all = _timed(dist.all_to_all, "all_to_all")
broadcast = _timed(dist.broadcast, "broadcast")
reduce = _timed(dist.reduce, "reduce")
gather = _timed(dist.gather, "gather")
scatter = _timed(dist.scatter, "scatter")
send, recv = _timed(dist.send, "send"), _timed(dist.recv, "recv")
isend, irecv = _timed(dist.isend, "isend"), _timed(dist.irecv, "irecv")


class TorchBackend:
    """Which of torch's functions gather and scatter, for who calls them unlogged (DeepSpeedExamples' benchmarks)."""

    get_all_gather_function = staticmethod(functools.partial(current, "all_gather"))
    get_reduce_scatter_function = staticmethod(functools.partial(current, "reduce_scatter"))


class P2POp:
    """A message of `batch_isend_irecv`. op: `isend` or `irecv` of here, or torch's; peer: a rank of the world."""

    def __init__(
        self, op: Callable[..., Any], tensor: Tensor, peer: int, group: ProcessGroup | None = None, tag: int = 0
    ) -> None:
        """ValueError for another op."""
        torchs = {isend: dist.isend, irecv: dist.irecv, dist.isend: dist.isend, dist.irecv: dist.irecv}.get(op)
        if torchs is None:
            raise ValueError(f"P2POp: {op} is neither deepspeed.comm.isend nor deepspeed.comm.irecv")
        self.op, self.tensor, self.peer, self.group, self.tag = torchs, tensor, peer, group, tag


def batch_isend_irecv(
    p2p_op_list: Sequence[P2POp], prof: bool = False, log_name: str = "", debug: Any = ""
) -> list[dist.Work]:
    """Start these messages as one, and return what can be waited for. Not logged: they have no one size."""
    for p in p2p_op_list:
        refuse_elsewhere(p.op.__name__, [p.tensor], p.group)
    return dist.batch_isend_irecv([dist.P2POp(p.op, p.tensor, p.peer, p.group, p.tag) for p in p2p_op_list])


barrier = _timed(dist.barrier, "barrier")
monitored_barrier = _timed(dist.monitored_barrier, "monitored_barrier")


def _unlogged(torchs: Callable[..., Any]) -> Callable[..., Any]:
    """torch's function, which also takes DeepSpeed's arguments for its log: an object has no size to log."""

    @functools.wraps(torchs)
    def call(*args: Any, prof: bool = False, log_name: str = "", debug: Any = "", **kwargs: Any) -> Any:
        return torchs(*args, **kwargs)

    return call


all_gather_object = _unlogged(dist.all_gather_object)
broadcast_object_list = _unlogged(dist.broadcast_object_list)
gather_object = _unlogged(dist.gather_object)

is_available = dist.is_available
is_initialized = dist.is_initialized
destroy_process_group = dist.destroy_process_group


def new_group(ranks: Sequence[int] | None = None, *args: Any, **options: Any) -> Any:
    """torch's; and where ranks ask for different ones at once, as each pipeline for its ends, each gets its own.

    Those wait for ever in torch, which calls groups that are made at the same time by the same name. A collective of
    all ranks, or with use_local_synchronization of the group's.
    """
    if options.get("use_local_synchronization"):
        return dist.new_group(ranks, *args, **options)
    mine = None if ranks is None else tuple(ranks)
    asked: list[Any] = [mine] * dist.get_world_size()
    dist.all_gather_object(asked, mine)
    return {row: dist.new_group(row and list(row), *args, **options) for row in dict.fromkeys(asked)}[mine]


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = 29500,
    verbose: bool = True,
    timeout: timedelta = default_pg_timeout,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Join the launcher's ranks (torchrun, srun, mpirun), or those of `init_method`, `rank` and `world_size`.

    Nothing when they are joined already. Without a launcher: a world of one. nccl without a GPU for every rank is taken
    as gloo, with one warning. RuntimeError for `dist_init_required=False` when nothing is joined, and for one of
    several ranks which is not told where they meet.
    """
    if dist.is_initialized():
        return
    if dist_init_required is False:
        raise RuntimeError("dist_init_required=False, but torch.distributed is not initialised: leave it out")
    if rank < 0 and init_method is None and not launch.under_torchrun():
        environment.expect_alone()
        rank, world_size, init_method = 0, 1, f"file://{Path(tempfile.gettempdir(), f'alone-{uuid4().hex}')}"
    place = (rank, world_size) if rank >= 0 else (None, None)
    launch.join(timeout=timeout, init_method=init_method, backend=dist_backend, rank=place[0], world_size=place[1])


def mpi_discovery(distributed_port: int = 29500, verbose: bool = True) -> None:
    """Set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT to what mpirun or srun said of this process.

    DeepSpeed asks MPI, and its ranks tell each other where the first one is; here nobody sends anything: of several
    machines MASTER_ADDR must be set, where srun does not say it. RuntimeError otherwise. `init_distributed` needs none
    of it.
    """
    os.environ.update(said := environment.in_torchruns_words(distributed_port))
    if verbose:
        logger.info("mpi_discovery: " + (", ".join(f"{name}={value}" for name, value in said.items()) or "by torchrun"))


def get_rank(group: ProcessGroup | None = None) -> int:
    """This process's number in `group` (all ranks by default), -1 outside it; 0 before anything is joined."""
    return dist.get_rank(group) if _joined() else 0


def get_world_size(group: ProcessGroup | None = None) -> int:
    """How many ranks `group` has, -1 outside it; 1 before anything is joined."""
    return dist.get_world_size(group) if _joined() else 1


def get_local_rank() -> int:
    """This process's number on its machine, 0 without a launcher."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def get_global_rank(group: ProcessGroup | None = None, group_rank: int = 0) -> int:
    """The number in the world of rank `group_rank` of `group`."""
    return dist.get_global_rank(group, group_rank) if group is not None else group_rank


def get_world_group() -> ProcessGroup | None:
    """All ranks; None before anything is joined."""
    return dist.group.WORLD if _joined() else None


def get_all_ranks_from_group(group: ProcessGroup | None = None) -> list[int]:
    """The numbers in the world of all ranks of `group`."""
    return dist.get_process_group_ranks(group)


def _each_all_reduce(
    tensors: list[Tensor], op: Any = ReduceOp.SUM, group: ProcessGroup | None = None, async_op: bool = False
) -> list[Any]:
    """`all_reduce` of each tensor; their handles."""
    return [dist.all_reduce(tensor, op, group, async_op) for tensor in tensors]


all_reduce_coalesced = _timed(_each_all_reduce, "all_reduce_coalesced", "all_reduce")


def all_gather_coalesced(
    output_tensors: list[Tensor], input_tensors: list[Tensor], group: ProcessGroup | None = None, async_op: bool = False
) -> list[Any]:
    """`all_gather_into_tensor` of each pair; their handles."""
    pairs = zip(output_tensors, input_tensors, strict=True)
    return [all_gather_into_tensor(out, one, group=group, async_op=async_op) for out, one in pairs]


def has_all_gather_into_tensor() -> bool:
    """Always."""
    return True


has_reduce_scatter_tensor = has_all_reduce_coalesced = has_coalescing_manager = has_all_gather_into_tensor


def initialize_mesh_device(mesh_shape: tuple[int, ...], mesh_dim_names: tuple[str, ...]) -> DeviceMesh:
    """torch's device mesh over all ranks."""
    return init_device_mesh(get_accelerator()._name, mesh_shape, mesh_dim_names=mesh_dim_names)


def configure(
    deepspeed_config: Any = None,
    enabled: bool | None = None,
    prof_all: bool | None = None,
    prof_ops: list[str] | None = None,
    verbose: bool | None = None,
    debug: bool | None = None,
) -> None:
    """Turn the log of collectives on or off, or change what it does; what is None stays.

    `deepspeed_config`: an object with `comms_logger`, such as `engine.config`. An engine's file does it by itself.
    """
    if deepspeed_config is not None:
        comms_logger.configure(getattr(deepspeed_config, "comms_config", deepspeed_config))
    given = {"enabled": enabled, "prof_all": prof_all, "prof_ops": prof_ops, "verbose": verbose, "debug": debug}
    for name, value in given.items():
        if value is not None:
            setattr(comms_logger, name, value)


def adopt(engine: Engine) -> None:
    """From now on the engine's collectives are logged here, and those of its start are."""
    ledger = engine.axes.world.ledger
    if isinstance(ledger.log, CommsLog) and ledger.log is not comms_logger:
        comms_logger.configure(engine._config)
        comms_logger.take(ledger.log)
    ledger.log = comms_logger


def log_summary(show_straggler: bool = False, return_dict: bool = False) -> dict[str, Any] | None:
    """Rank 0 prints the table of the collectives that were logged; see `CommsLog.log_all`. On every rank.

    All ranks get their own numbers, if `return_dict`.
    """
    if _joined():
        barrier(log_name="log_summary_barrier")
    found = comms_logger.log_all(get_rank() == 0, show_straggler, return_dict)
    if _joined():
        barrier(log_name="log_summary_barrier")
    return found


def reset_log() -> None:
    """Forget what was logged."""
    comms_logger.reset_data()


def has_comm_data() -> bool:
    """Whether anything was logged."""
    return comms_logger.has_data()


def get_comm_operation_count() -> int:
    """How many calls were logged."""
    return comms_logger.get_total_operations()


def get_logged_comm_ops() -> list[str]:
    """The names that calls were logged under."""
    return comms_logger.get_operation_names()


def _joined() -> bool:
    """Whether the ranks are joined. RuntimeError if a launcher started several and they are not."""
    if not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise RuntimeError("this is one of several ranks, not joined yet: call deepspeed.init_distributed() first")
    return dist.is_initialized()
