"""What one call may change in its process for the next: torch's settings, the seeds, process groups; all put back.

Unrelated jobs on ranks that stay, such as one exercise after another, must not see each other's `manual_seed` or
`set_grad_enabled(False)`. The cells of one notebook must: there nothing is put back.
"""

import random
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (torch.is_grad_enabled, torch.set_grad_enabled),
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_num_threads, torch.set_num_threads),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    (torch.get_rng_state, torch.set_rng_state),
    (random.getstate, random.setstate),
)
_CUDNN = ("benchmark", "deterministic", "enabled")
_GROUPS = 64  # process groups that a call is taken to have made on each rank
forget_groups: list[Callable[[], object]] = []  # of modules that remember groups: called when these have ended


class Settings:
    """This process's settings and seeds at the moment this is made."""

    def __init__(self) -> None:
        self.values = [(put, get()) for get, put in _SETTINGS]
        self.cudnn = {name: getattr(torch.backends.cudnn, name) for name in _CUDNN}
        self.cuda = torch.cuda.get_rng_state() if _cuda_runs() else None
        self.numpy = _numpy_random().get_state() if _numpy_random() else None
        self.calls = 0

    def restore(self) -> None:
        """Put all of them back, between calls. Seeds of what was not loaded then become new ones."""
        self.calls += 1
        _end_groups(self.calls * _GROUPS)
        for forget in forget_groups:
            forget()
        torch.set_default_device(None)  # a rank begins with none, and to set one, even the CPU, slows every call
        for put, value in self.values:
            put(value)
        for name, value in self.cudnn.items():
            setattr(torch.backends.cudnn, name, value)
        if _cuda_runs():
            if self.cuda is None:
                torch.cuda.manual_seed(torch.initial_seed())
            else:
                torch.cuda.set_rng_state(self.cuda)
        if numpy := _numpy_random():
            if self.numpy is None:
                numpy.seed()
            else:
                numpy.set_state(self.numpy)


def _end_groups(count: int) -> None:
    """Those that the last call made; all ranks have left it. gloo has three threads a group, and one hardly sleeps.

    torch makes a group's name of how many there were: a second group of one name would look for the first one's
    addresses, and ranks that count differently would wait for each other. So what has ended counts still, and all ranks
    go on from `count`, however many groups each of them was in.
    """
    known = distributed_c10d._world
    if not isinstance(known.pg_names, _Names):
        before, distributed_c10d._pg_names = known.pg_names, _Names(known.pg_names)
        before.clear()  # others have it too, and a group ends with the last who does
    count = max(count, len(known.pg_names), known.group_count)
    for handle in list(known.pg_map):
        if handle is not dist.group.WORLD:
            dist.destroy_process_group(handle)
    distributed_c10d._pg_names.ended += count - len(known.pg_names)  # type: ignore[attr-defined]
    known.group_count = count


class _Names(dict[Any, Any]):
    """torch's names of groups, as long as if it had `ended` more."""

    ended = 0

    def __len__(self) -> int:
        return super().__len__() + self.ended


def _cuda_runs() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _numpy_random() -> Any:
    """numpy's module of that name, if somebody has loaded it: it is slow to load."""
    return sys.modules.get("numpy.random")
