"""A range in NVIDIA's profiler for each call of a function. DeepSpeed: deepspeed/utils/nvtx.py."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

from refimpl.deepspeed.accelerator import get_accelerator

P = ParamSpec("P")
R = TypeVar("R")


def instrument_w_nvtx(func: Callable[P, R]) -> Callable[P, R]:
    """`func`, its calls named in the profile; on a CPU and under torch.compile nothing is recorded."""

    @functools.wraps(func)
    def instrumented(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            return func(*args, **kwargs)
        get_accelerator().range_push(func.__qualname__)
        try:
            return func(*args, **kwargs)
        finally:
            get_accelerator().range_pop()

    return instrumented
