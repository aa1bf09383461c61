"""The ranks that share sequences, as an `mpu`: this module itself is handed to `initialize`, as in DeepSpeed.

All other ranks read other sequences; gradients are averaged over all. The model's axis is another name of the
sequence's. DeepSpeed: deepspeed/runtime/sequence_parallel/parallel_state_sp.py.
"""

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed import ProcessGroup

from refimpl.ranks.settings import forget_groups


@dataclass
class _Made:
    """What `initialize_sequence_parallel` has made: DeepSpeed's functions take no object that could hold it."""

    world: ProcessGroup | None = None  # in which they were made
    sequence: ProcessGroup | None = None
    everybody: ProcessGroup | None = None


_made = _Made()
forget_groups.append(lambda: vars(_made).update(vars(_Made())))


def initialize_sequence_parallel(sequence_parallel_size: int) -> None:
    """Blocks of so many consecutive ranks share sequences. A collective.

    ValueError for a size that is not 2 or more, or does not divide the ranks; RuntimeError if they share by another.
    """
    ranks, rank = dist.get_world_size(), dist.get_rank()
    if sequence_parallel_size < 2 or ranks % sequence_parallel_size:
        raise ValueError(
            f"sequence_parallel_size {sequence_parallel_size}: it must be 2 or more, and divide {ranks} ranks"
        )
    if _made.world is dist.group.WORLD:
        if (size := get_sequence_parallel_world_size()) != sequence_parallel_size:
            raise RuntimeError(f"the ranks share sequences already, {size} of them each, not {sequence_parallel_size}")
        return
    for first in range(0, ranks, sequence_parallel_size):
        block = dist.new_group(list(range(first, first + sequence_parallel_size)))
        if first <= rank < first + sequence_parallel_size:
            _made.sequence = block
    _made.everybody, _made.world = dist.new_group(list(range(ranks))), dist.group.WORLD


def get_sequence_parallel_group() -> ProcessGroup:
    """Those that share this rank's sequences. RuntimeError before they do."""
    return _there(_made.sequence)


def get_sequence_data_parallel_group() -> ProcessGroup:
    """Those over which gradients are averaged. RuntimeError before they share."""
    return _there(_made.everybody)


def get_sequence_parallel_world_size() -> int:
    return dist.get_world_size(get_sequence_parallel_group())


def get_sequence_parallel_rank() -> int:
    return dist.get_rank(get_sequence_parallel_group())


def get_sequence_data_parallel_world_size() -> int:
    return dist.get_world_size(get_sequence_data_parallel_group())


def get_sequence_data_parallel_rank() -> int:
    return dist.get_rank(get_sequence_data_parallel_group())


get_model_parallel_group = get_sequence_parallel_group
get_model_parallel_world_size = get_sequence_parallel_world_size
get_model_parallel_rank = get_sequence_parallel_rank


def _there(group: ProcessGroup | None) -> ProcessGroup:
    if group is None:
        raise RuntimeError("no ranks share sequences yet: call initialize_sequence_parallel on all of them")
    return group
