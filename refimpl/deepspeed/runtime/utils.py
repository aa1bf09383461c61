"""Small helpers that scripts import. DeepSpeed: deepspeed/runtime/utils.py."""

import gc
import os
import random
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed import ReduceOp

from refimpl.deepspeed import comm
from refimpl.deepspeed.absent import absent
from refimpl.deepspeed.accelerator import get_accelerator
from refimpl.deepspeed.utils import groups
from refimpl.engine.cut import OTHERS_FLAGS
from refimpl.parallel.pipeline.partition import uniform
from refimpl.zero.parameter import stage_of

T = TypeVar("T")

PartitionedTensor = absent("deepspeed.runtime.utils.PartitionedTensor", "an engine of one's own; use PipelineEngine")


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2, mpu: Any = None
) -> Tensor:
    """Scale all gradients so that their norm is at most `max_norm`; the norm before.

    Gradients that a stage holds are clipped by it over all ranks (L2 only), others by `norm_of_plain`: a collective.
    `mpu` says along which ranks the others' model is split.
    """
    params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    stages = {id(s): s for p in params if isinstance(p, nn.Parameter) and (s := stage_of(p)) is not None}
    if not stages:
        norm = norm_of_plain(params, norm_type, mpu)
        nn.utils.clip_grads_with_norm_(params, max_norm, norm)
        return norm
    if len(stages) > 1 or norm_type != 2:
        raise ValueError(f"clip_grad_norm_: one engine's parameters and norm_type=2, not {len(stages)} and {norm_type}")
    (stage,) = stages.values()
    return torch.as_tensor(stage.clip_grad_norm_(max_norm))


def norm_of_plain(params: Sequence[Tensor], norm_type: float = 2, mpu: Any = None) -> Tensor:
    """The norm of gradients that no stage holds, over the parts of the model; its mean over data-parallel ranks.

    The mean is DeepSpeed's: where gradients differ between ranks, as experts' do, all of them are clipped alike.
    A parameter without `model_parallel` or `tensor_model_parallel` is on all ranks of `mpu`'s group, and counts once.
    """
    once = mpu is None or mpu.get_model_parallel_rank() == 0
    counted = [p.grad for p in params if p.grad is not None and (once or is_model_parallel_parameter(p))]
    norm = nn.utils.get_total_norm(counted, norm_type).float()
    norm = norm if counted else norm.to(get_accelerator().current_device_name())  # torch's zero is at the host
    if mpu is not None and norm_type == torch.inf:
        comm.all_reduce(norm, ReduceOp.MAX, group=mpu.get_model_parallel_group())
    elif mpu is not None:
        norm = norm**norm_type
        comm.all_reduce(norm, group=mpu.get_model_parallel_group())
        norm = norm ** (1 / norm_type)
    if comm.is_initialized():
        group = groups._get_data_parallel_group() if mpu is None else mpu.get_data_parallel_group()
        comm.all_reduce(norm, group=group)
        norm /= comm.get_world_size(group)
    return norm


def is_model_parallel_parameter(p: Tensor) -> bool:
    """Whether it is a part: its author has said so."""
    return any(getattr(p, flag, False) for flag in OTHERS_FLAGS)


def see_memory_usage(message: str, force: bool = False) -> None:
    """Print `message` and the memory in use, on rank 0, if `force`."""
    if not force or (comm.is_initialized() and comm.get_rank() != 0):
        return
    gc.collect()
    accelerator, gib = get_accelerator(), 1024**3
    now, peak = accelerator.memory_allocated() / gib, accelerator.max_memory_allocated() / gib
    print(f"{message}\nMA {now:.2f} GB, Max_MA {peak:.2f} GB", flush=True)
    accelerator.reset_peak_memory_stats()


def move_to_device(item: Any, device: torch.device | str, criterion_func: Callable[[Any], bool] | None = None) -> Any:
    """`item` with its tensors on `device`, through lists, tuples and dictionaries.

    With `criterion_func` what it says yes to is moved in place, and then even inside tensors that are held elsewhere,
    and all else stays.
    """
    if criterion_func is not None and criterion_func(item):
        item.data = item.to(device).data
        return item
    if isinstance(item, list | tuple):
        moved = [move_to_device(value, device, criterion_func) for value in item]
        return moved if isinstance(item, list) else tuple(moved)
    if isinstance(item, dict):
        return {key: move_to_device(value, device, criterion_func) for key, value in item.items()}
    return item.to(device) if criterion_func is None else item


def set_random_seed(seed: int) -> None:
    """Seed Python, numpy and torch."""
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    torch.manual_seed(seed)


def partition_uniform(num_items: int, num_parts: int) -> list[int]:
    """Bounds of `num_parts` runs of items whose lengths differ by one at most, the longer ones first."""
    return uniform(num_items, num_parts)


def partition_balanced(weights: Sequence[float], num_parts: int) -> list[int]:
    """Bounds of `num_parts` runs of items; of the ways to cut, the heaviest and lightest run are made to differ least.

    Dynamic programming over (items, runs), keeping one best cut for each, as DeepSpeed does.
    """
    if len(weights) <= num_parts:
        return partition_uniform(len(weights), num_parts)
    before = [0.0, *accumulate(weights)]
    inf = float("inf")
    best = {(0, 0): (0.0, 0.0, inf, 0)}  # (items, runs) -> difference, heaviest, lightest, begin of the last run
    for items in range(1, len(weights) + 1):
        for runs in range(1, min(items, num_parts) + 1):
            for begin in range(items):
                _, heaviest, lightest, _ = best.get((begin, runs - 1), (inf, inf, inf, 0))
                run = before[items] - before[begin]
                heavy, light = max(heaviest, run), min(lightest, run)
                if heavy - light <= best.get((items, runs), (inf,))[0]:
                    best[items, runs] = (heavy - light, heavy, light, begin)
    bounds = [len(weights)]
    for runs in range(num_parts, 0, -1):
        bounds.insert(0, best[bounds[0], runs][3])
    return bounds


def prefix_sum_inc(weights: Sequence[float]) -> list[float]:
    """The running sum, each item included."""
    return list(accumulate(weights))


def get_only_unique_item(items: Iterable[T]) -> T:
    """The item that all of them are. RuntimeError if they differ."""
    (*one,) = set(items)
    if len(one) != 1:
        raise RuntimeError(f"expected one unique element, there are {one}")
    return one[0]


def call_to_str(base: str, *args: object, **kwargs: object) -> str:
    """How the call looks in a program: `base(1, x=2)`."""
    return f"{base}({', '.join([*map(repr, args), *(f'{name}={value!r}' for name, value in kwargs.items())])})"


def ensure_directory_exists(filename: str) -> None:
    """Make the folder that `filename` will lie in."""
    os.makedirs(os.path.dirname(filename) or ".", exist_ok=True)


def empty_cache() -> None:
    """Give the allocator's free memory back to the device."""
    get_accelerator().empty_cache()
