"""A kernel beside torch's operator in float64: results and gradients, within a bound that the number format sets."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from refimpl.kernels.case import forward_and_backward

# Of the greatest entry. The interpreter cuts off what a GPU rounds: 2**-7 in bf16, of a result and an operand of it.
BOUND = {torch.float32: 3e-6, torch.bfloat16: 1.6e-2, torch.float16: 1.5e-3}


def in_float64(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same values; floating tensors as leaves in float64."""
    return tuple(
        x.detach().double().requires_grad_(x.requires_grad) if isinstance(x, Tensor) and x.is_floating_point() else x
        for x in inputs
    )


def assert_agrees(
    call: Callable[..., Any], reference: Callable[..., Any], inputs: tuple[Any, ...], bound: float | None = None
) -> None:
    """Results and gradients of `call` have the dtypes torch gives and lie within `bound` of float64's."""
    wide = in_float64(inputs)  # before the call, which may change its inputs
    found, grads = forward_and_backward(call, inputs)
    exact, exact_grads = forward_and_backward(reference, wide)
    leaves = [x for x in inputs if isinstance(x, Tensor) and x.requires_grad]
    assert [g.dtype for g in grads] == [x.dtype for x in leaves]
    assert len(found) == len(exact)
    assert len(grads) == len(exact_grads)
    floats = [x for x in inputs if isinstance(x, Tensor) and x.is_floating_point()]
    limit = bound if bound is not None else max(BOUND[x.dtype] for x in floats)
    for name, ours, theirs in [
        *((f"result {i}", *pair) for i, pair in enumerate(zip(found, exact, strict=True))),
        *((f"gradient {i}", *pair) for i, pair in enumerate(zip(grads, exact_grads, strict=True))),
    ]:
        assert ours.shape == theirs.shape, name
        error = error_of(ours, theirs)
        assert error <= limit, f"{name}: off by {error:.2e} of the greatest entry, {limit:.0e} allowed"


def error_of(ours: Tensor, exact: Tensor) -> float:
    """The greatest difference, as a part of the greatest entry of `exact`; NaN is an infinite one."""
    if exact.numel() == 0:
        return 0.0
    off = (ours.detach().double() - exact.detach()).abs().max() / exact.detach().abs().max().clamp(min=1e-30)
    return float(off.nan_to_num(float("inf")))
