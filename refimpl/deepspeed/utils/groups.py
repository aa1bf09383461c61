"""Who belongs together on each axis, as the last engine was laid out. DeepSpeed: deepspeed/utils/groups.py.

Before `initialize` all ranks are data-parallel. `_get_sequence_data_parallel_*` are the ranks that a gradient is
averaged over, `_get_data_parallel_*` those that read different batches. Experts' groups come with the mixture of
experts.
"""

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed import ProcessGroup

from refimpl.comm.axes import Axes
from refimpl.comm.group import Group
from refimpl.deepspeed import comm


@dataclass
class _LaidOut:
    """What `initialize` has found: DeepSpeed's functions take no object that could hold it."""

    axes: Axes | None = None

    def now(self) -> Axes:
        if self.axes is None or self.axes.world.size != comm.get_world_size():
            return Axes.of_data(Group.world())
        return self.axes


_laid_out = _LaidOut()


def adopt(axes: Axes) -> None:
    """From now on the functions here answer for these."""
    _laid_out.axes = axes


def _get_data_parallel_group() -> ProcessGroup | None:
    """The ranks that read different batches; where sequences are shared, those with the same tokens' places."""
    axes = _laid_out.now()
    return axes.data.handle or (comm.get_world_group() if axes.data.size == comm.get_world_size() else None)


def _get_sequence_data_parallel_group() -> ProcessGroup | None:
    """The ranks that a gradient is averaged over."""
    axes = _laid_out.now()
    return axes.replicas.handle or (comm.get_world_group() if axes.replicas.size == comm.get_world_size() else None)


def _get_sequence_parallel_group() -> ProcessGroup | None:
    """The ranks that share a sequence."""
    return _laid_out.now().context.handle


def get_tensor_model_parallel_group() -> ProcessGroup | None:
    """The ranks that share every layer."""
    return _laid_out.now().tensor.handle


def _clone_world_group() -> ProcessGroup | None:
    """A group of its own of all ranks."""
    return dist.new_group(ranks=list(range(comm.get_world_size()))) if dist.is_initialized() else None


def _get_data_parallel_world_size() -> int:
    return _laid_out.now().feeds


def _get_data_parallel_rank() -> int:
    return _laid_out.now().feed


def _get_data_parallel_group_ranks() -> list[int]:
    return _laid_out.now().data.ranks


def _get_sequence_data_parallel_world_size() -> int:
    return _laid_out.now().replicas.size


def _get_sequence_data_parallel_rank() -> int:
    return _laid_out.now().replicas.rank


def _get_sequence_parallel_world_size() -> int:
    return _laid_out.now().context.size


def _get_sequence_parallel_rank() -> int:
    return _laid_out.now().context.rank


def get_tensor_model_parallel_world_size() -> int:
    return _laid_out.now().tensor.size


def get_tensor_model_parallel_rank() -> int:
    return _laid_out.now().tensor.rank


def get_tensor_model_parallel_src_rank() -> int:
    """The job's number of the first of them."""
    return _laid_out.now().tensor.ranks[0]


def _get_broadcast_src_rank() -> int:
    """The job's number of the first rank of the data-parallel group."""
    return _laid_out.now().replicas.ranks[0]


def _get_expert_model_parallel_world_size() -> int:
    return 1


get_data_parallel_group = _get_data_parallel_group
get_data_parallel_world_size = _get_data_parallel_world_size
get_data_parallel_rank = _get_data_parallel_rank
get_model_parallel_group = get_tensor_model_parallel_group
get_model_parallel_world_size = _get_model_parallel_world_size = get_tensor_model_parallel_world_size
get_model_parallel_rank = get_tensor_model_parallel_rank
