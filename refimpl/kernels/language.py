"""Triton, or a stand-in whose use says what is missing, and where a kernel can run. No other file imports triton."""

import importlib.util
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.autograd import function

PROCESSORS = 132  # streaming multiprocessors of an H100 or H200: what a rehearsal without a GPU assumes
__all__ = [
    "INSTALLED", "INTERPRETED", "REHEARSING", "Missing", "capability", "on", "once_differentiable", "processors",
    "shared_memory", "takes", "tl", "triton",
]  # fmt: skip

SHARED = {80: 163, 86: 99, 87: 163, 89: 99, 120: 99, 121: 99}  # KB that a program may use, where not 227
REHEARSING: ContextVar[int] = ContextVar("REHEARSING", default=0)  # within compiled.rehearse: for which GPU, as 90


class Missing:
    """Stands for triton where it is not installed: kernels can be defined and read; launching one is an error."""

    def __getattr__(self, name: str) -> "Missing":
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> "Missing":
        return self

    def __getitem__(self, grid: Any) -> Any:
        raise ImportError("this kernel needs triton, which is not installed; on Linux: pip install 'triton>=3.6,<3.8'")


def index_by_item() -> None:
    """A number in a kernel is an array of one, of which triton 3.6 takes int(): numpy refuses that from 2.4 on.

    All in C: a grader looks at what Python functions a line of an answer calls.
    """
    from triton.runtime import interpreter

    before = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        before(tensor, scope)
        scope.set_attr(tensor, "__index__", property(attrgetter("handle.data.item")))

    interpreter._patch_lang_tensor = patched


INSTALLED = importlib.util.find_spec("triton") is not None
if INSTALLED:
    import triton
    import triton.language as tl

    INTERPRETED = bool(triton.knobs.runtime.interpret)  # decided once: @triton.jit reads it when a kernel is defined
    if INTERPRETED and triton.__version__.startswith("3.6."):
        index_by_item()
else:
    triton = tl = Missing()
    INTERPRETED = False


def takes(*tensors: Tensor | None) -> bool:
    """Whether a Triton kernel takes this call, not torch's operator.

    All on one CUDA device, or on a CPU under TRITON_INTERPRET=1. float64 is torch's: kernels compute in fp32. So is a
    view whose minus sign is not in memory (`z.conj().imag`). Tensors on "meta" have no data; only `compiled.rehearse`
    hands them to a kernel.
    """
    given = [tensor for tensor in tensors if tensor is not None]
    devices = {tensor.device for tensor in given}
    if not INSTALLED or len(devices) > 1 or any(t.dtype == torch.float64 or t.is_complex() for t in given):
        return False
    if not torch.compiler.is_compiling() and any(t.is_neg() for t in given):
        return False
    kind = devices.pop().type
    return kind == "cuda" or (kind == "cpu" and INTERPRETED) or (kind == "meta" and REHEARSING.get() > 0)


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """torch's own, for kernels: gradients that are views whose minus sign is not in memory are written out before."""

    def written(ctx: Any, *grads: Tensor) -> Any:
        return backward(ctx, *(grad.resolve_neg() for grad in grads))

    wrapped: Callable[..., Any] = function.once_differentiable(written)
    return wrapped


def on(tensor: Tensor) -> AbstractContextManager[object]:
    """Triton launches on the current device, so make it the tensor's."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def processors(device: torch.device) -> int:
    """How many streaming multiprocessors share the work; under the interpreter 3, each a slow one."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    return 3 if INTERPRETED else PROCESSORS


def capability(device: torch.device) -> int:
    """Of the GPU that a kernel is for: 90 is Hopper's. 0 under the interpreter."""
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return 10 * major + minor
    return REHEARSING.get()


def shared_memory(device: torch.device) -> int:
    """Bytes on the chip that a program may use: 227 KB on an H100, 99 KB on many cards of the same generations."""
    if device.type == "cuda":
        most: int = torch.cuda.get_device_properties(device).shared_memory_per_block_optin  # type: ignore[attr-defined]
        return most
    return 1024 * SHARED.get(capability(device), 227)
