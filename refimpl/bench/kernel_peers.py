"""Liger-Kernel's Triton kernels, where that package is installed: the same arguments as ours, its own defaults."""

import importlib.util
from collections.abc import Callable
from typing import Any


def liger(operation: str) -> Callable[..., Any] | None:
    """Its function for an operation of ours; None where it has none, or is not there."""
    if importlib.util.find_spec("liger_kernel") is None:
        return None
    from liger_kernel.transformers import functional as theirs

    found: dict[str, Callable[..., Any]] = {
        "rms_norm": theirs.liger_rms_norm,
        "layer_norm": lambda x, weight, bias: theirs.liger_layer_norm(x, weight, bias, 1e-5),
        "softmax": theirs.liger_softmax,
        "cross_entropy": theirs.liger_cross_entropy,
        "linear_cross_entropy": theirs.liger_fused_linear_cross_entropy,
        "swiglu": theirs.liger_swiglu,
        "geglu": theirs.liger_geglu,
    }
    return found.get(operation)
