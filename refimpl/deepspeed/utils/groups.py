"""Who belongs together: all ranks are data-parallel, every other axis has one rank. DeepSpeed: utils/groups.py.

Its experts' groups come with the mixture of experts.
"""

import torch.distributed as dist
from torch.distributed import ProcessGroup

from refimpl.deepspeed import comm


def _one() -> int:
    """The size of an axis that is not used."""
    return 1


def _zero() -> int:
    """This rank's number on an axis that is not used."""
    return 0


def _none() -> None:
    """The group of an axis that is not used."""


def _get_data_parallel_group() -> ProcessGroup | None:
    """All ranks."""
    return comm.get_world_group()


def _clone_world_group() -> ProcessGroup | None:
    """A group of its own of all ranks."""
    return dist.new_group(ranks=list(range(comm.get_world_size()))) if dist.is_initialized() else None


def _get_data_parallel_world_size() -> int:
    return comm.get_world_size()


def _get_data_parallel_rank() -> int:
    return comm.get_rank()


def _get_data_parallel_group_ranks() -> list[int]:
    return list(range(comm.get_world_size()))


def _get_broadcast_src_rank() -> int:
    return 0


get_data_parallel_group = _get_data_parallel_group
get_data_parallel_world_size = _get_sequence_data_parallel_world_size = _get_data_parallel_world_size
get_data_parallel_rank = _get_sequence_data_parallel_rank = _get_data_parallel_rank
_get_sequence_data_parallel_group = _get_data_parallel_group
_get_model_parallel_world_size = get_model_parallel_world_size = get_tensor_model_parallel_world_size = _one
_get_sequence_parallel_world_size = _get_expert_model_parallel_world_size = _one
_get_sequence_parallel_rank = get_model_parallel_rank = get_tensor_model_parallel_rank = _zero
_get_sequence_parallel_group = get_model_parallel_group = get_tensor_model_parallel_group = _none
