"""Who belongs together on each axis, as the last engine was laid out. DeepSpeed: deepspeed/utils/groups.py.

Before `initialize` all ranks are data-parallel. `_get_sequence_data_parallel_*` are the ranks that a gradient is
averaged over, `_get_data_parallel_*` those that read different batches. Experts' groups, of which there may be several,
are asked for by name: "ep_size_4" is that of layers whose experts four ranks share.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TypeVar

import torch.distributed as dist
from torch.distributed import ProcessGroup

from refimpl.comm.axes import Axes, expert_groups, neighbours
from refimpl.comm.group import Group
from refimpl.comm.process_group import of_rows
from refimpl.deepspeed import comm
from refimpl.parallel.expert.marks import name_of
from refimpl.ranks.settings import forget_groups

T = TypeVar("T")


@dataclass
class _LaidOut:
    """What `initialize` has found: DeepSpeed's functions take no object that could hold it."""

    axes: Axes | None = None
    experts: dict[str, tuple[Group, Group]] = field(default_factory=dict)  # who share experts, who have the same
    cut_experts: int = 1  # tensor ranks that share an expert

    def now(self) -> Axes:
        if self.axes is None or self.axes.world.size != comm.get_world_size():
            return Axes.of_data(Group.world())
        return self.axes


_laid_out = _LaidOut()
forget_groups.append(lambda: vars(_laid_out).update(vars(_LaidOut())))


def adopt(axes: Axes) -> None:
    """From now on the functions here answer for these."""
    _laid_out.axes = axes


def laid_out() -> Axes:
    """The axes that the functions here answer for."""
    return _laid_out.now()


def adopt_experts(expert: Group, expert_data: Group, cut_experts: int) -> None:
    """A layer's: the ranks that share its experts, those that have the same; cut_experts: tensor ranks an expert."""
    _laid_out.experts[name_of(expert.size)] = expert, expert_data
    _laid_out.cut_experts = cut_experts


def expert_ranks(ep: int, data_before_expert: bool = False) -> tuple[Group, Group]:
    """The groups of `ep_size_N`, made among the data-parallel ranks where they are not there yet: then a collective.

    data_before_expert: neighbours have the same experts. ValueError if ep does not divide the ranks.
    """
    if (name := name_of(ep)) not in _laid_out.experts:
        data = laid_out().replicas
        groups = expert_groups(data, ep)
        if data_before_expert:
            same, shared = neighbours(data, data.size // ep)
            groups = shared, same
        _laid_out.experts[name] = groups
    return _laid_out.experts[name]


def _create_expert_and_data_parallel(
    expert_parallel_size_: int, use_data_before_expert_parallel_: bool = False
) -> None:
    """Make the groups of `ep_size_N`. A collective."""
    expert_ranks(expert_parallel_size_, use_data_before_expert_parallel_)


def _clone_world_group() -> ProcessGroup | None:
    """A group of its own of all ranks."""
    return dist.new_group(ranks=list(range(comm.get_world_size()))) if dist.is_initialized() else None


def _experts(group_name: str) -> tuple[Group, Group]:
    found = _laid_out.experts.get(group_name)
    if found is None:
        raise AssertionError(f"expert parallel group {group_name!r} is not initialized: there is no layer of that size")
    return found


def _handle(group: Group) -> ProcessGroup | None:
    """torch's group, made where this rank is alone in it: None would be all ranks. None without torch.distributed."""
    if group.handle is None and dist.is_initialized():
        return of_rows([[dist.get_rank()]])
    return group.handle


def _first(group: Group) -> int:
    return group.ranks[0]


def _asked(axis: str, what: Callable[[Group], T]) -> Callable[[], T]:
    """What is asked of this rank's group on an axis."""
    return lambda: what(getattr(_laid_out.now(), axis))


def _asked_of_experts(which: int, what: Callable[[Group], T]) -> Callable[[str], T]:
    """What is asked of the ranks that share a layer's experts (0), or of those that have the same (1)."""
    return lambda group_name: what(_experts(group_name)[which])


_size, _rank, _ranks = attrgetter("size"), attrgetter("rank"), attrgetter("ranks")

# The ranks that read different batches; where sequences are shared, those with the same tokens' places.
get_data_parallel_group = _get_data_parallel_group = _asked("data", _handle)
_get_data_parallel_group_ranks = _asked("data", _ranks)

# The ranks that a gradient is averaged over.
_get_sequence_data_parallel_group = _asked("replicas", _handle)
_get_sequence_data_parallel_world_size = _asked("replicas", _size)
_get_sequence_data_parallel_rank = _asked("replicas", _rank)
_get_broadcast_src_rank = _asked("replicas", _first)

# The ranks that share a sequence.
_get_sequence_parallel_group = _asked("context", _handle)
_get_sequence_parallel_world_size = _asked("context", _size)
_get_sequence_parallel_rank = _asked("context", _rank)

# The ranks that share every layer.
get_model_parallel_group = get_tensor_model_parallel_group = _asked("tensor", _handle)
get_model_parallel_world_size = _get_model_parallel_world_size = _asked("tensor", _size)
get_tensor_model_parallel_world_size = get_model_parallel_world_size
get_model_parallel_rank = get_tensor_model_parallel_rank = _asked("tensor", _rank)
get_tensor_model_parallel_src_rank = _asked("tensor", _first)

# Of a group's name: the ranks that share a layer's experts, and those that have the same.
_get_expert_parallel_group = _asked_of_experts(0, _handle)
_get_expert_parallel_group_ranks = _asked_of_experts(0, _ranks)
_get_expert_parallel_world_size = _asked_of_experts(0, _size)
_get_expert_parallel_rank = _asked_of_experts(0, _rank)
_get_expert_parallel_src_rank = _asked_of_experts(0, _first)
_get_expert_data_parallel_group = _asked_of_experts(1, _handle)
_get_expert_data_parallel_group_ranks = _asked_of_experts(1, _ranks)
_get_expert_data_parallel_world_size = _asked_of_experts(1, _size)
_get_expert_data_parallel_rank = _asked_of_experts(1, _rank)
_get_expert_broadcast_src_rank = _asked_of_experts(1, _first)


def _get_data_parallel_world_size() -> int:
    return _laid_out.now().feeds


def _get_data_parallel_rank() -> int:
    return _laid_out.now().feed


def _get_expert_model_parallel_world_size() -> int:
    """Tensor ranks that share an expert."""
    return _laid_out.cut_experts


def _get_expert_parallel_group_dict() -> Mapping[str, ProcessGroup | None]:
    return {name: _handle(expert) for name, (expert, _) in _laid_out.experts.items()}


def _get_expert_data_parallel_group_dict() -> Mapping[str, ProcessGroup | None]:
    return {name: _handle(same) for name, (_, same) in _laid_out.experts.items()}


def _get_max_expert_size() -> int:
    """The most ranks that share a layer's experts. AssertionError without any."""
    if not _laid_out.experts:
        raise AssertionError("expert parallel group is not initialized: there is no layer of experts")
    return max(expert.size for expert, _ in _laid_out.experts.values())


def _get_max_expert_size_name() -> str:
    return name_of(_get_max_expert_size())


def _get_max_expert_parallel_group() -> ProcessGroup | None:
    return _get_expert_parallel_group(_get_max_expert_size_name())


get_data_parallel_world_size = _get_data_parallel_world_size
get_data_parallel_rank = _get_data_parallel_rank
