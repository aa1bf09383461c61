"""What torch's process group says of itself: the library of a device's tensors, its device, a group for control."""

import os

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d


def device_of(handle: dist.ProcessGroup | None) -> torch.device:
    """Where this rank's tensors live: what started the rank says so, or the device that its group is bound to."""
    if "REFIMPL_DEVICE" in os.environ:
        return torch.device(os.environ["REFIMPL_DEVICE"])
    return (handle.bound_device_id if handle else None) or torch.device("cpu")


def backend_of(handle: dist.ProcessGroup | None, device: torch.device) -> str:
    """The library for this device's tensors: "nccl" for a GPU's where the group was made with "cpu:gloo,cuda:nccl".

    RuntimeError if the group has none.
    """
    if handle is None:
        return "none"
    config: str = dist.get_backend_config(handle)
    libraries = dict(pair.split(":") for pair in config.split(","))
    if device.type not in libraries:
        raise RuntimeError(
            f"this process group speaks {config}, and has no library for tensors on {device}: init_process_group("
            '"cpu:gloo,cuda:nccl"), or set REFIMPL_DEVICE to where the tensors are'
        )
    return libraries[device.type]


def by_name(name: str) -> dist.ProcessGroup:
    """torch's group of this name: who still holds one when Python exits makes the process abort."""
    return distributed_c10d._resolve_process_group(name)  # type: ignore[attr-defined, arg-type]


class ControlLine:
    """What carries a group's objects and barriers: on NCCL a gloo group of the same ranks, made by the first call.

    NCCL would send them through the GPU, behind whatever is queued there, with the host waiting; and it does not answer
    once one of its collectives hangs.
    """

    def __init__(self, handle: dist.ProcessGroup, backend: str) -> None:
        self._group, self._name = handle.group_name, handle.group_name if backend != "nccl" else None

    @property
    def handle(self) -> dist.ProcessGroup:
        """The first time a collective of the group."""
        if self._name is None:
            ranks = dist.get_process_group_ranks(by_name(self._group))
            line = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
            assert line is not None
            self._name = line.group_name
        return by_name(self._name)
