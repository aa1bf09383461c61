"""What kernels ask of their arguments: an answer at once, by name, instead of an illegal access later."""

import math
from typing import Any

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def tensors(operation: str, **given: Any) -> None:
    """Raise TypeError unless each is a tensor, and a dense one."""
    for name, x in given.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{operation}: {name} is a {type(x).__name__}; it must be a tensor")
        if x.layout != torch.strided:
            raise TypeError(f"{operation}: {name} is {x.layout}; it must be dense: pass {name}.to_dense()")


def present(**given: Any) -> dict[str, Any]:
    """Those that are not None: of arguments that may be left out."""
    return {name: x for name, x in given.items() if x is not None}


def number(operation: str, least: float, most: float = math.inf, **values: Any) -> None:
    """Raise TypeError unless each is a number, ValueError unless it is from `least` to `most`."""
    for name, value in values.items():
        if not hasattr(value, "__float__") or isinstance(value, Tensor):
            raise TypeError(f"{operation}: {name} is {value!r}; it must be a number")
        if not least <= value <= most:
            limits = f"between {least:g} and {most:g}" if math.isfinite(most) else f"a number, {least:g} or more"
            raise ValueError(f"{operation}: {name} is {value}; it must be {limits}")


def whole(operation: str, **values: Any) -> None:
    """Raise TypeError unless each is a whole number."""
    for name, value in values.items():
        if not hasattr(value, "__index__") or isinstance(value, Tensor):
            raise TypeError(f"{operation}: {name} is {value!r}; it must be a whole number")


def floating(operation: str, **given: Any) -> None:
    """Raise TypeError unless each is fp32, bf16, fp16 (or fp64, which torch's operator takes)."""
    tensors(operation, **given)
    for name, tensor in given.items():
        if tensor.dtype not in FLOATS:
            raise TypeError(f"{operation}: {name} is {tensor.dtype}; it must be float32, bfloat16 or float16")


def integer(operation: str, **given: Any) -> None:
    """Raise TypeError unless each is int32 or int64."""
    tensors(operation, **given)
    for name, tensor in given.items():
        if tensor.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"{operation}: {name} is {tensor.dtype}; it must be int64 or int32")


def one_device(operation: str, **given: Tensor | None) -> None:
    """Raise ValueError unless all that are not None lie on one device."""
    tensors(operation, **present(**given))
    devices = {name: tensor.device for name, tensor in given.items() if tensor is not None}
    if len(set(devices.values())) > 1:
        where = ", ".join(f"{name} on {device}" for name, device in devices.items())
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
    kind = next((t.device.type for t in tensors if isinstance(t, Tensor)), "none")
    if kind not in ("cuda", "cpu") or not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.float32 if wide else torch.get_autocast_dtype(kind)
    return tuple(t.to(dtype) if isinstance(t, Tensor) and t.dtype in FLOATS[:3] else t for t in tensors)


def has_values(tensor: Tensor) -> bool:
    """Whether its numbers may be looked at: it lies on a CPU, where nothing waits, and nobody is tracing the call."""
    return tensor.device.type == "cpu" and type(tensor) is Tensor and not torch.compiler.is_compiling()


def rows(x: Tensor) -> Tensor:
    """x [..., N] -> [M, N] with a last stride of 1; a view where strides allow it, else a copy."""
    size = x.shape[-1]
    flat = x.reshape(math.prod(x.shape[:-1]), size)
    return flat if size == 1 or flat.stride(1) == 1 else flat.contiguous()
