"""The device that this rank computes on, in the words of DeepSpeed's scripts.

There is no backend to choose: the device is the one that `join` gave this rank, or that its process group is on, and
its own CUDA device before that.
On a CPU what only a GPU has (streams, caches) is there and does nothing, memory is the process's resident memory.
DeepSpeed: accelerator/abstract_accelerator.py, cpu_accelerator.py, cuda_accelerator.py.
"""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from refimpl.comm.process_group import device_of, own_gpu
from refimpl.deepspeed.absent import absent
from refimpl.deepspeed.ops.op_builder import ALL_OPS, OpBuilder

TYPES = {
    "BFloat16Tensor": torch.bfloat16,
    "ByteTensor": torch.uint8,
    "DoubleTensor": torch.float64,
    "FloatTensor": torch.float32,
    "HalfTensor": torch.float16,
    "IntTensor": torch.int32,
    "LongTensor": torch.int64,
}


def new_tensor(dtype: torch.dtype, device: torch.device, *values: Any) -> Tensor:
    """As torch's old constructors: one list of numbers, else the sizes of a tensor that nobody has filled."""
    if len(values) == 1 and not isinstance(values[0], int):
        return torch.tensor(values[0], dtype=dtype, device=device)
    return torch.empty(values or (0,), dtype=dtype, device=device)


class DeepSpeedAccelerator:
    """Without state: every question is asked of the process anew."""

    def device(self, device_index: int | None = None) -> Any:
        """A context manager that makes device number `device_index` the current one."""
        return torch.cuda.device(self._index(device_index)) if self._cuda else nullcontext()

    def _here(self) -> torch.device:
        if dist.is_initialized() or "REFIMPL_DEVICE" in os.environ:  # of a script's own group nobody has said it
            return device_of(dist.group.WORLD if dist.is_initialized() else None)
        return own_gpu() if torch.cuda.is_available() else torch.device("cpu")

    @property
    def _cuda(self) -> bool:
        return self._here().type == "cuda"

    def _index(self, index: int | None) -> int | None:
        return self._here().index if index is None else index

    def _device(self, index: int | None) -> torch.device:
        return self._here() if index is None else torch.device("cuda", index)

    # Which device.

    @property
    def _name(self) -> str:
        return self._here().type

    @property
    def _communication_backend_name(self) -> str:
        return self.communication_backend_name()

    def device_name(self, device_index: int | str | None = None) -> str:
        """ "cpu", or "cuda", or "cuda:1" for index 1."""
        return self._name if device_index is None or not self._cuda else f"{self._name}:{device_index}"

    def current_device_name(self) -> str:
        """ "cpu", or "cuda:0"."""
        return str(self._here())

    def current_device(self) -> int | str:
        """The CUDA device's number, or "cpu"."""
        return torch.cuda.current_device() if self._cuda else "cpu"

    def set_device(self, device_index: int) -> None:
        """Make CUDA device number `device_index` the current one; nothing on a CPU."""
        if self._cuda:
            torch.cuda.set_device(device_index)

    def device_count(self) -> int:
        """CUDA devices that this process sees; on a CPU the ranks of this host: scripts take `rank % device_count`."""
        return torch.cuda.device_count() if torch.cuda.is_available() else int(os.environ.get("LOCAL_WORLD_SIZE", "1"))

    def is_available(self) -> bool:
        """Always: a CPU is there."""
        return True

    def is_synchronized_device(self) -> bool:
        """Whether an operation is done when its call returns."""
        return not self._cuda

    use_host_timers = resolves_data_dependency = handles_memory_backpressure = is_synchronized_device

    def communication_backend_name(self) -> str:
        """ "nccl" where ranks have a GPU each, else "gloo"."""
        return "nccl" if self._cuda else "gloo"

    def on_accelerator(self, tensor: Tensor) -> bool:
        """Whether `tensor` lies where this rank computes."""
        return tensor.device.type == self._name

    # Time.

    def synchronize(self, device_index: int | None = None) -> None:
        """Return when all that was asked of the device is done."""
        if self._cuda:
            torch.cuda.synchronize(self._index(device_index))

    def Stream(self, *args: Any, **kwargs: Any) -> Any:
        """A CUDA stream; None on a CPU."""
        return torch.cuda.Stream(*args, **kwargs) if self._cuda else None  # type: ignore[no-untyped-call]

    def stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Compute in `stream` inside the block."""
        return torch.cuda.stream(stream) if self._cuda else nullcontext()

    def current_stream(self, device_index: int | None = None) -> Any:
        """The CUDA stream that is computed in; None on a CPU."""
        return torch.cuda.current_stream(self._index(device_index)) if self._cuda else None

    def default_stream(self, device_index: int | None = None) -> Any:
        """The CUDA stream that is computed in where nobody asks for another; None on a CPU."""
        return torch.cuda.default_stream(self._index(device_index)) if self._cuda else None

    def Event(self, **kwargs: Any) -> Any:
        """A CUDA event; None on a CPU."""
        return torch.cuda.Event(**kwargs) if self._cuda else None  # type: ignore[no-untyped-call]

    def lazy_call(self, callback: Callable[[], Any]) -> Any:
        """Call it, on a GPU as soon as there is a context."""
        return torch.cuda._lazy_call(callback) if self._cuda else callback()  # type: ignore[no-untyped-call]

    def range_push(self, msg: str) -> None:
        """Open a range in NVIDIA's profiler."""
        if self._cuda:
            torch.cuda.nvtx.range_push(msg)  # type: ignore[no-untyped-call]

    def range_pop(self) -> None:
        """Close it."""
        if self._cuda:
            torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]

    # Random numbers.

    def random(self) -> Any:
        """torch.random."""
        return torch.random

    def manual_seed(self, seed: int) -> Any:
        """Seed the device's generator; beside a GPU's the CPU's goes on."""
        return torch.cuda.manual_seed(seed) if self._cuda else torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> Any:
        """Those of all devices."""
        return torch.cuda.manual_seed_all(seed) if self._cuda else torch.manual_seed(seed)

    def initial_seed(self) -> int:
        """The seed that the device's generator began with."""
        return torch.cuda.initial_seed() if self._cuda else torch.initial_seed()

    def get_rng_state(self, device_index: int | None = None) -> Tensor:
        """The state of the generator of CUDA device number `device_index`, by default this rank's, or of the CPU."""
        return torch.cuda.get_rng_state(self._device(device_index)) if self._cuda else torch.get_rng_state()

    def set_rng_state(self, new_state: Tensor, device_index: int | None = None) -> None:
        """Set what `get_rng_state` gives."""
        if self._cuda:
            torch.cuda.set_rng_state(new_state, self._device(device_index))
        else:
            torch.set_rng_state(new_state)

    def default_generator(self, device_index: int) -> torch.Generator:
        """What random numbers on device number `device_index` are drawn from."""
        return torch.cuda.default_generators[device_index] if self._cuda else torch.default_generator

    # Memory, in bytes.

    def empty_cache(self) -> None:
        """Give the allocator's free memory back to the device."""
        if self._cuda:
            torch.cuda.empty_cache()

    def memory_allocated(self, device_index: int | None = None) -> int:
        """Held by tensors now; on a CPU, by the process."""
        return (
            torch.cuda.memory_allocated(self._index(device_index)) if self._cuda else psutil.Process().memory_info().rss
        )

    def memory_reserved(self, device_index: int | None = None) -> int:
        """Held by the allocator, for tensors now and later; on a CPU, by the process."""
        return torch.cuda.memory_reserved(self._index(device_index)) if self._cuda else self.memory_allocated()

    memory_cached = memory_reserved

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        """The most held at one time; on a CPU, what is held now."""
        return torch.cuda.max_memory_allocated(self._index(device_index)) if self._cuda else self.memory_allocated()

    def max_memory_reserved(self, device_index: int | None = None) -> int:
        """The most that the allocator held at one time; on a CPU, what is held now."""
        return torch.cuda.max_memory_reserved(self._index(device_index)) if self._cuda else self.memory_allocated()

    max_memory_cached = max_memory_reserved

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        """Begin anew to look for the most."""
        if self._cuda:
            torch.cuda.reset_peak_memory_stats(self._index(device_index))

    reset_max_memory_allocated = reset_max_memory_cached = reset_peak_memory_stats

    def total_memory(self, device_index: int | None = None) -> int:
        """Of the device, or of the machine."""
        if self._cuda:
            return torch.cuda.get_device_properties(self._device(device_index)).total_memory
        return psutil.virtual_memory().total

    def available_memory(self, device_index: int | None = None) -> int:
        """What can still be asked for."""
        if self._cuda:
            return torch.cuda.mem_get_info(self._device(device_index))[0]
        return psutil.virtual_memory().available

    def pin_memory(self, tensor: Tensor, make_copy: bool = True, match_shape: bool = True) -> Tensor:
        """`tensor` in page-locked memory where there is a GPU to copy to."""
        return tensor.pin_memory() if self._cuda else tensor

    def is_pinned(self, tensor: Tensor) -> bool:
        """Whether it is."""
        return tensor.is_pinned()

    # Types.

    def __getattr__(self, name: str) -> Callable[[Any], Tensor]:
        """`FloatTensor` and its kin: a list of numbers, or a size, becomes a tensor of that type on the device."""
        if name not in TYPES:
            raise AttributeError(f"get_accelerator().{name}: not part of this project; this `deepspeed` is refimpl")
        return partial(new_tensor, TYPES[name], self._here())

    def is_bf16_supported(self) -> bool:
        """Whether the device computes in bf16."""
        return torch.cuda.is_bf16_supported() if self._cuda else True

    def is_fp16_supported(self) -> bool:
        """Whether the device computes in fp16."""
        return True

    def supported_dtypes(self) -> list[torch.dtype]:
        """What a model may be trained in."""
        return [torch.float32, torch.float16, torch.bfloat16]

    def is_triton_supported(self) -> bool:
        """Whether Triton can compile for the device."""
        return self._cuda

    # Kernels.

    def get_op_builder(self, class_name: str) -> type[OpBuilder]:
        """The builder of that name; of one that nobody knows, a class that says so on use."""
        unknown = absent(f"deepspeed.ops.op_builder.{class_name}", "a builder of kernels; nothing is compiled here")
        return next((op for op in ALL_OPS.values() if op.__name__ == class_name), unknown)

    def create_op_builder(self, class_name: str) -> OpBuilder:
        """One of them."""
        return self.get_op_builder(class_name)()
