"""torch.distributed's collectives with DeepSpeed's three arguments more, entered in its log of collectives.

A call that is logged is waited for at once; of `isend` and `irecv` the log has the time to where somebody waits.
DeepSpeed: `timed_op` in deepspeed/comm/comm.py. Its 0.19.8 ends the process at an all_gather_object once the log is on,
for its table has no formula for that; here objects are not logged.
"""

import functools
import inspect
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from refimpl.comm import checks
from refimpl.comm.process_group import libraries_of
from refimpl.deepspeed.accelerator import get_accelerator
from refimpl.deepspeed.utils.comms_logging import CommsLogger
from refimpl.measure.comms_log import EXCHANGES, GATHERS

SECOND = (*GATHERS, *EXCHANGES)  # operations whose message is their second argument
OTHERWISE = {  # DeepSpeed's names of the first arguments where torch has others
    "all_gather_into_tensor": ("output_tensor", "tensor"),
    "reduce_scatter_tensor": ("output_tensor", "tensor"),
    "all_to_all_single": ("output", "tensor"),
}


class Pending:
    """A message under way: `wait` also logs it. All else is its handle's."""

    def __init__(self, handle: Any, log: Callable[[], None]) -> None:
        self._handle, self._log = handle, log
        self._arrived: Any = None  # what waiting for it returned: gloo's handle can be waited for once

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        """Return when it has arrived."""
        if self._arrived is None:
            self._arrived = self._handle.wait(*args, **kwargs)
            self._log()
        return self._arrived

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handle, name)


def timed_op(log: CommsLogger, torchs: Callable[..., Any], op: str, name: str = "") -> Callable[..., Any]:
    """`torchs`, entered in `log` as a call of `op`, under `name` (or `op`) unless the caller gives a log_name."""
    own = list(inspect.signature(torchs).parameters)
    group_at = own.index("group")
    renamed = dict(zip(OTHERWISE.get(op, ()), own, strict=False))
    at = int(op in SECOND)

    @functools.wraps(torchs)
    def call(*args: Any, prof: bool = False, log_name: str = "", debug: Any = "", **kwargs: Any) -> Any:
        kwargs = {renamed.get(key, key): value for key, value in kwargs.items()}
        group = args[group_at] if len(args) > group_at else kwargs.get("group")
        refuse_elsewhere(op, [*args, *kwargs.values()], group)
        known = log_name or name or op
        ranks = dist.get_world_size(group) if log.enabled and dist.is_initialized() else -1
        if ranks < 1 or not log.wants(known, op, prof=prof):  # -1: this rank is not in the group
            return torchs(*args, **kwargs)
        size = size_of(args[at] if len(args) > at else kwargs.get(own[at]))
        record = log.name(known, 1)
        get_accelerator().synchronize()
        begun = time.perf_counter_ns()

        def done() -> None:
            get_accelerator().synchronize()
            log.append(op, record, max(1, time.perf_counter_ns() - begun) / 1e6, size, ranks)

        result = torchs(*args, **kwargs)
        if op in ("isend", "irecv"):
            return Pending(result, done)
        for handle in result if isinstance(result, list) else [result]:
            if hasattr(handle, "wait"):
                handle.wait()
        done()
        return result

    return call


def refuse_elsewhere(call: str, given: Sequence[Any], group: Any) -> None:
    """ValueError, which names the remedy, for a tensor on a device for which the group has no library.

    A rank that is not in the group sends nothing.
    """
    if not dist.is_initialized() or group is dist.GroupMember.NON_GROUP_MEMBER:
        return
    there = libraries_of(group or dist.group.WORLD)
    for tensor in (tensor for one in given for tensor in (one if isinstance(one, list | tuple) else [one])):
        if isinstance(tensor, Tensor) and tensor.device.type not in there:
            raise checks.elsewhere(call, "tensor", tensor, there)


def size_of(message: Any) -> int:
    """Bytes of a tensor or of a list of them; 0 of anything else, such as a barrier's group."""
    tensors = message if isinstance(message, list | tuple) else [message]
    return sum(t.numel() * t.element_size() for t in tensors if isinstance(t, Tensor))
