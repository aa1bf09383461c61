"""Tensor ranks must be given the same batch, and nothing fails by itself if they are not: looked at once, at the start.

A sampler that deals samples out to all ranks of the job gives each tensor rank another text: what they add up is of
none. So at the model's first call the ranks compare a checksum of each argument; some bytes over the control line.
DeepSpeed: deepspeed/runtime/engine.py, which compares the tensors themselves at the first forward.
"""

import zlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from refimpl.comm.group import Group


def compare_first_batch(model: nn.Module, group: Group) -> None:
    """At the model's first call, a collective of `group`: ValueError on all its ranks if they got other tensors."""

    def compare(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        given = {f"argument {i}": x for i, x in enumerate(args)} | dict(kwargs)
        first, *others = group.all_gather_object({name: checksums(x) for name, x in given.items()})
        for rank, theirs in zip(group.ranks[1:], others, strict=True):
            if theirs != first:
                name = next(name for name in [*first, *theirs] if theirs.get(name) != first.get(name))
                raise ValueError(
                    f"{type(model).__name__}: {name} of rank {rank} is not that of rank {group.ranks[0]}, and ranks "
                    "that share a layer must be given the same batch: use the loader that initialize returns, or a "
                    "sampler with num_replicas=engine.dp_world_size and rank=engine.axes.feed"
                )
        hook.remove()

    hook = model.register_forward_pre_hook(compare, with_kwargs=True)


def checksums(value: Any) -> list[tuple[tuple[int, ...], str, int]]:
    """(shape, dtype, checksum) of each tensor in it."""
    tensors = [x.detach() for x in tree_leaves(value) if isinstance(x, Tensor)]
    return [
        (tuple(x.shape), str(x.dtype), zlib.crc32(x.cpu().contiguous().view(-1).view(torch.uint8).numpy().data))
        for x in tensors
    ]
