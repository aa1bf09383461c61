"""What a computation depends on beside its arguments: random generators, autocast, the default device, as they were.

A dropout that is computed again must drop the same elements, an autocast region must round in the same places, and a
constant made inside `with torch.device(...)` must be there again; all are thread or process state that has moved on by
the time backward runs. Bytes: 5,056 for the CPU's generator (a Mersenne twister), 16 for a CUDA device's (Philox: a
seed and an offset), in every checkpoint.
torch: torch/utils/checkpoint.py, `get_device_states`. DeepSpeed adds named generators of Megatron-LM
(deepspeed/runtime/activation_checkpointing/checkpointing.py, `CudaRNGStatesTracker`): here `trackers`.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


class Tracker(Protocol):
    """Generators by name, as Megatron-LM keeps them."""

    def get_states(self) -> Any:
        """A copy of all states."""

    def set_states(self, states: Any) -> None:
        """The inverse."""


@dataclass(frozen=True)
class RandomState:
    """The generators of the CPU, of some CUDA devices, and of trackers, at one moment."""

    cpu: Tensor  # [5056] uint8
    cuda: dict[int, Tensor]  # device index -> [16] uint8
    tracked: list[tuple[Tracker, Any]]

    @classmethod
    def now(cls, devices: Iterable[int] = (), trackers: Sequence[Tracker] = ()) -> "RandomState":
        cuda = {index: torch.cuda.get_rng_state(index) for index in devices}
        return cls(torch.get_rng_state(), cuda, [(tracker, tracker.get_states()) for tracker in trackers])

    def restore(self) -> None:
        torch.set_rng_state(self.cpu)
        for index, state in self.cuda.items():
            torch.cuda.set_rng_state(state, index)
        for tracker, states in self.tracked:
            tracker.set_states(states)


def cuda_devices(tensors: Iterable[Tensor]) -> list[int]:
    """Devices whose generators a function of these tensors may use: theirs and the current one."""
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):  # type: ignore[no-untyped-call]
        return []
    return sorted({torch.cuda.current_device(), *(t.device.index for t in tensors if t.is_cuda)})


@dataclass(frozen=True)
class Autocast:
    """One device type's autocast."""

    device: str
    enabled: bool
    dtype: torch.dtype
    caches: bool

    @classmethod
    def now(cls) -> "list[Autocast]":
        """Those of the CPU and, where there is one, of CUDA."""
        kinds = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
        caches = torch.is_autocast_cache_enabled()
        return [cls(k, torch.is_autocast_enabled(k), torch.get_autocast_dtype(k), caches) for k in kinds]

    def again(self) -> torch.autocast:
        return torch.autocast(self.device, dtype=self.dtype, enabled=self.enabled, cache_enabled=self.caches)


@dataclass(frozen=True)
class State:
    """Everything of this file. `random` None: the generators go on as they are."""

    random: RandomState | None
    autocasts: list[Autocast]
    device: torch.device  # the default one

    @classmethod
    def now(cls, tensors: Iterable[Tensor], random: bool, trackers: Sequence[Tracker]) -> "State":
        """`tensors`: the arguments, which say what devices matter."""
        return cls(
            RandomState.now(cuda_devices(tensors), trackers) if random else None,
            Autocast.now(),
            torch.get_default_device(),
        )

    @contextmanager
    def again(self) -> Iterator[None]:
        """As it was, for a `with` block; afterwards all is where it stood before the block."""
        with ExitStack() as stack:
            if torch.get_default_device() != self.device:
                stack.enter_context(self.device)
            for autocast in self.autocasts:
                stack.enter_context(autocast.again())
            if self.random is not None:
                trackers = [tracker for tracker, _ in self.random.tracked]
                stack.callback(RandomState.now(self.random.cuda, trackers).restore)
                self.random.restore()
            yield


@contextmanager
def aside(device: torch.device, seed: int | None = None) -> Iterator[None]:
    """What is drawn within it, on the CPU and on `device`, is drawn again after it; it begins with `seed`, if given.

    `torch.manual_seed` alone would let every GPU of this process begin anew, for good.
    """
    there = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(there):
        if seed is not None:
            (torch.manual_seed if there else torch.default_generator.manual_seed)(seed)
        yield
