"""What kernels ask of their arguments: an answer at once, by name, instead of an illegal access later."""

import math
from typing import Any

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def floating(operation: str, **tensors: Tensor | None) -> None:
    """Raise TypeError unless each is fp32, bf16, fp16 (or fp64, which torch's operator takes)."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.dtype not in FLOATS:
            raise TypeError(f"{operation}: {name} is {tensor.dtype}; it must be float32, bfloat16 or float16")


def integer(operation: str, **tensors: Tensor | None) -> None:
    """Raise TypeError unless each is int32 or int64."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"{operation}: {name} is {tensor.dtype}; it must be int64 or int32")


def one_device(operation: str, **tensors: Tensor | None) -> None:
    """Raise ValueError unless all lie on one device."""
    given = {name: tensor.device for name, tensor in tensors.items() if tensor is not None}
    if len(set(given.values())) > 1:
        where = ", ".join(f"{name} on {device}" for name, device in given.items())
        raise ValueError(f"{operation}: all tensors must be on one device, but {where}")


def last_dim(operation: str, x: Tensor, **vectors: Tensor | None) -> int:
    """The size of x's last dimension, which each vector must have; ValueError if not, or if x has no dimension."""
    if x.dim() == 0:
        raise ValueError(f"{operation}: x is a scalar; it needs at least one dimension")
    size = x.shape[-1]
    for name, vector in vectors.items():
        if vector is not None and vector.shape != (size,):
            raise ValueError(f"{operation}: {name} has shape {list(vector.shape)}, but x's last dimension is {size}")
    return size


def same_shape(operation: str, **tensors: Tensor) -> None:
    """Raise ValueError unless all have the first one's shape."""
    if len({tensor.shape for tensor in tensors.values()}) > 1:
        shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in tensors.items())
        raise ValueError(f"{operation}: shapes must be equal, but {shapes}")


def autocast(*tensors: Tensor | None, wide: bool = False) -> tuple[Any, ...]:
    """The tensors as torch's operators on a GPU take them under autocast; otherwise, and float64 always, as they are.

    wide: in fp32, as softmax and norms; else in autocast's dtype, as matrix products. On a CPU just so: what is built
    there has the dtypes that it will have.
    """
    kind = next(t.device.type for t in tensors if t is not None)
    if kind not in ("cuda", "cpu") or not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.float32 if wide else torch.get_autocast_dtype(kind)
    return tuple(t.to(dtype) if t is not None and t.dtype in FLOATS[:3] else t for t in tensors)


def has_values(tensor: Tensor) -> bool:
    """Whether its numbers may be looked at: it lies on a CPU, where nothing waits, and nobody is tracing the call."""
    return tensor.device.type == "cpu" and type(tensor) is Tensor and not torch.compiler.is_compiling()


def rows(x: Tensor) -> Tensor:
    """x [..., N] -> [M, N] with a last stride of 1; a view where strides allow it, else a copy."""
    size = x.shape[-1]
    flat = x.reshape(math.prod(x.shape[:-1]), size)
    return flat if size == 1 or flat.stride(1) == 1 else flat.contiguous()
