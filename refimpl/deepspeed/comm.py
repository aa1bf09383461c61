"""`deepspeed.comm`: torch.distributed's collectives under DeepSpeed's names, and `init_distributed`.

Where DeepSpeed's function is torch's, it is torch's here. Without a launcher `init_distributed` makes a world of one,
in which every collective works. Bytes are counted by an engine's own ledger (`engine.group.ledger`), not here.
DeepSpeed: deepspeed/comm/comm.py and deepspeed/comm/torch.py.
"""

import functools
import os
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from refimpl import launch
from refimpl.deepspeed.accelerator import get_accelerator

default_pg_timeout = timedelta(minutes=int(os.environ.get("DEEPSPEED_TIMEOUT", "30")))


def _same(torchs: Callable[..., Any]) -> Callable[..., Any]:
    """torch's function, which also takes DeepSpeed's three arguments for its log and ignores them."""

    @functools.wraps(torchs)
    def call(*args: Any, prof: bool = False, log_name: str = "", debug: str = "", **kwargs: Any) -> Any:
        return torchs(*args, **kwargs)

    return call


all_reduce = inference_all_reduce = _same(dist.all_reduce)
all_gather = _same(dist.all_gather)
# torch 2.13 has renamed these two and warns about the old names, 2.11 has only those.
all_gather_into_tensor = _same(getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor)
reduce_scatter_tensor = _same(getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor)
allgather_fn, reduce_scatter_fn = all_gather_into_tensor, reduce_scatter_tensor
reduce_scatter = _same(dist.reduce_scatter)
all_to_all_single = _same(dist.all_to_all_single)
broadcast = _same(dist.broadcast)
reduce = _same(dist.reduce)
gather = _same(dist.gather)
scatter = _same(dist.scatter)
send, recv, isend, irecv = map(_same, (dist.send, dist.recv, dist.isend, dist.irecv))
barrier = _same(dist.barrier)
monitored_barrier = _same(dist.monitored_barrier)
all_gather_object = _same(dist.all_gather_object)
broadcast_object_list = _same(dist.broadcast_object_list)
gather_object = _same(dist.gather_object)

is_available = dist.is_available
is_initialized = dist.is_initialized
new_group = dist.new_group
destroy_process_group = dist.destroy_process_group


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
    as gloo, with one warning. RuntimeError for `dist_init_required=False` when nothing is joined.
    """
    if dist.is_initialized():
        return
    if dist_init_required is False:
        raise RuntimeError("dist_init_required=False, but torch.distributed is not initialised: leave it out")
    if rank < 0 and init_method is None and not launch.under_torchrun():
        rank, world_size, init_method = 0, 1, f"file://{Path(tempfile.mkdtemp(), 'alone')}"
    place = (rank, world_size) if rank >= 0 else (None, None)
    launch.join(timeout=timeout, init_method=init_method, backend=dist_backend, rank=place[0], world_size=place[1])


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


def all_to_all(
    output_tensor_list: list[Tensor],
    input_tensor_list: list[Tensor],
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Any:
    """Tensor i of every rank to rank i, as torch's."""
    return dist.all_to_all(output_tensor_list, input_tensor_list, group=group, async_op=async_op)


def all_reduce_coalesced(
    tensors: list[Tensor], op: Any = ReduceOp.SUM, group: ProcessGroup | None = None, async_op: bool = False
) -> list[Any]:
    """`all_reduce` of each tensor; their handles."""
    return [dist.all_reduce(tensor, op, group, async_op) for tensor in tensors]


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


def configure(*args: Any, **kwargs: Any) -> None:
    """DeepSpeed's log of collectives is configured by `comms_logger` in the JSON file."""


def log_summary(show_straggler: bool = False, return_dict: bool = False) -> dict[str, Any] | None:
    """Say where the table is: an engine counts its own collectives."""
    if get_rank() == 0:
        print("comm.log_summary: see engine.group.ledger.table(), or comms_logger.enabled in the configuration")
    return {} if return_dict else None


def _joined() -> bool:
    """Whether the ranks are joined. RuntimeError if a launcher started several and they are not."""
    if not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise RuntimeError("this is one of several ranks, not joined yet: call deepspeed.init_distributed() first")
    return dist.is_initialized()
