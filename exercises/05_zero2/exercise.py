"""Chapter 05, ZeRO-2: gradients leave for their owners while backward runs, and their memory
goes with them.

A bucket of parameters has one flat gradient [P], padded with zeros to a multiple of the number
of ranks N; a rank keeps 1/N of its mean over ranks, the shard [S].

`group` is a refimpl Group: `group.rank`, `group.size`, and

    group.reduce_scatter(out, x, "mean", async_op=True) -> work  # x [P] on every rank, out [S]
    group.all_reduce(x, "sum")                                   # in place

An async work is done after work.wait(); until then neither x nor out may be touched. A
parameter whose `.grad` is None was not used by this rank; its gradient counts as zero. A
gradient need not be contiguous.
Strategies are called "ddp", "zero1" and "zero2".
"""

from collections import deque
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from refimpl.comm.group import Group
from refimpl.comm.work import Work


def assign_buckets(
    params: Sequence[nn.Parameter], limit: int
) -> list[list[nn.Parameter]]:  # given
    """Parameters, less the frozen ones, in buckets of at most `limit` elements, in the order of
    backward.
    """
    buckets: list[list[nn.Parameter]] = []
    room = 0
    for p in reversed(params):
        if not p.requires_grad:
            continue
        if not buckets or p.numel() > room:
            buckets.append([])
            room = limit
        buckets[-1].append(p)
        room -= p.numel()
    return buckets


class GradientShards:
    """Reduce-scatters gradients bucket by bucket inside backward; keeps this rank's shards and
    nothing else.

        gradients = GradientShards(model, group, limit=1000)
        for micro_batch in step:
            model(micro_batch).backward()   # the hooks launch the buckets, in one order
            gradients.finish()              # all have travelled, and added to the shards
        update(gradients.shards)            # bucket number -> [S]: mean over ranks, sum over
                                            # micro-batches
        gradients.shards.clear()

    At most one bucket is under way, in the dtype of the gradients. Memory besides the shards:
    the bucket under way, and the gradients that wait for their bucket to fill. Traffic: one
    reduce-scatter a bucket and micro-batch.
    """

    def __init__(self, model: nn.Module, group: Group, limit: int) -> None:
        """Put a hook on every parameter that is not frozen.

        All ranks have the same weights already.
        """
        raise NotImplementedError("GradientShards.__init__")

    def on_gradient(self, p: nn.Parameter) -> None:
        """Runs inside backward, when p.grad is complete: launch the buckets that are full now,
        in order.
        """
        raise NotImplementedError("GradientShards.on_gradient")

    def launch(self) -> None:
        """Copy the next bucket's gradients into a flat buffer, free them, and start its
        reduce-scatter.
        """
        raise NotImplementedError("GradientShards.launch")

    def settle(self) -> None:
        """If a bucket is under way: wait for it, add its result to the shards, and let go of
        its buffer.
        """
        raise NotImplementedError("GradientShards.settle")

    def finish(self) -> None:
        """After each backward: launch what never filled, wait for the last one, and be ready
        for the next backward.
        """
        raise NotImplementedError("GradientShards.finish")


class InFlight:
    """Reduce-scatters on their way, at most `most` at a time, so that backward need not wait
    for the bucket before.

        flights = InFlight(group, most=2)
        flights.launch(0, flat)   # flat [P], padded, is under way, and is not copied
        flights.launch(1, other)
        flights.launch(0, third)  # bucket 0 of the next micro-batch: first waits for `flat`
        flights.land()            # all have arrived
        flights.shards            # bucket number -> [S]: mean over ranks, sum over its launches

    A launch waits only if `most` are under way, and then for the oldest alone. What has arrived
    is added to its shard, in memory of its own and in the dtype of the buffer, and the buffer
    is let go.
    """

    def __init__(self, group: Group, most: int) -> None:
        """Nothing is under way, and there are no shards."""
        raise NotImplementedError("InFlight.__init__")

    def launch(self, number: int, flat: Tensor) -> None:
        """Start the reduce-scatter of flat [P], the gradients of bucket `number`."""
        raise NotImplementedError("InFlight.launch")

    def settle(self) -> None:
        """Wait for the oldest, and add what has arrived to its shard."""
        raise NotImplementedError("InFlight.settle")

    def land(self) -> None:
        """Wait for all that are under way, the oldest first."""
        raise NotImplementedError("InFlight.land")


def clip_global_norm(group: Group, shards: Mapping[str, Tensor], limit: float) -> float:
    """Clip, in place, gradients of which this rank holds the shards; returns their L2 norm
    before clipping.

    The norm is that of the whole gradient over all ranks, and when it exceeds `limit`, every
    element is multiplied by limit / norm: the same number on every rank. `shards` may be empty
    on some ranks. A tied parameter has two names for one and the same tensor, and counts once.
    Shards are fp32 or 16 bits (fp16 ends at 65504, and the square of 1e20 is too large for
    fp32). One all-reduce of one number.
    """
    raise NotImplementedError("clip_global_norm")


def accumulated_bytes(
    strategy: str, params: int, ranks: int, itemsize: int, samples: int, room: int
) -> dict[str, int]:
    """Bytes a rank sends in a step over `samples` samples, if memory has room for `room` of
    them at once.

    So backward runs ceil(samples / room) times. DDP and ZeRO-1 keep whole gradients, and send
    them after the last; ZeRO-2 cannot. ZeRO-1 and 2 gather the new weights once. `params` is a
    multiple of `ranks`. Keys: the collectives used, of "all_reduce", "reduce_scatter",
    "all_gather".
    Example: "zero2", 8 parameters of 4 bytes, 2 ranks, 5 samples, room for 2 -> 48 by
    reduce_scatter, 16 by all_gather.
    """
    raise NotImplementedError("accumulated_bytes")


def peak_gradient_bytes(buckets: Sequence[int], ranks: int, itemsize: int) -> int:
    """The most bytes that gradients take on a rank during the first backward of ZeRO-2, one
    bucket after another.

    A bucket of n elements is a flat buffer, padded to a multiple of `ranks`; its shard is a
    buffer of its own, made before the bucket travels. When it has arrived, the flat buffer is
    freed, and the next bucket begins. Shards stay.
    Example: buckets [8, 4], 2 ranks, 1 byte -> 12: 8 + 4 while the first travels,
    4 + 2 + 4 = 10 for the second.
    """
    raise NotImplementedError("peak_gradient_bytes")
