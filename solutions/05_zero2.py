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
        self.group = group
        self.buckets = assign_buckets(list(model.parameters()), limit)
        self.shards: dict[int, Tensor] = {}
        self.ready: set[nn.Parameter] = set()  # whose gradient of this backward is complete
        self.launched = 0  # buckets of this backward
        self.flight: tuple[Work, Tensor, Tensor] | None = None  # work, flat [P], shard [S]
        for bucket in self.buckets:
            for p in bucket:
                p.register_post_accumulate_grad_hook(self.on_gradient)

    def on_gradient(self, p: nn.Parameter) -> None:
        """Runs inside backward, when p.grad is complete: launch the buckets that are full now,
        in order.
        """
        self.ready.add(p)
        while self.launched < len(self.buckets) and self.ready.issuperset(
            self.buckets[self.launched]
        ):
            self.launch()

    def launch(self) -> None:
        """Copy the next bucket's gradients into a flat buffer, free them, and start its
        reduce-scatter.
        """
        self.settle()
        bucket, ranks = self.buckets[self.launched], self.group.size
        shard = -(-sum(p.numel() for p in bucket) // ranks)
        flat, at = torch.zeros(shard * ranks, dtype=bucket[0].dtype), 0
        for p in bucket:
            if p.grad is not None:
                flat[at : at + p.numel()].view(p.shape).copy_(p.grad)
            p.grad = None
            at += p.numel()
        mine = torch.empty_like(flat[:shard])
        self.flight = (self.group.reduce_scatter(mine, flat, "mean", async_op=True), flat, mine)
        self.launched += 1

    def settle(self) -> None:
        """If a bucket is under way: wait for it, add its result to the shards, and let go of
        its buffer.
        """
        if self.flight is None:
            return
        work, _, mine = self.flight
        work.wait()
        number = self.launched - 1
        self.shards[number] = self.shards[number] + mine if number in self.shards else mine
        self.flight = None

    def finish(self) -> None:
        """After each backward: launch what never filled, wait for the last one, and be ready
        for the next backward.
        """
        while self.launched < len(self.buckets):
            self.launch()
        self.settle()
        self.ready.clear()
        self.launched = 0


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
        self.group, self.most = group, most
        self.shards: dict[int, Tensor] = {}
        # Number of the bucket, work, flat [P], mine [S]; the oldest first.
        self.flights: deque[tuple[int, Work, Tensor, Tensor]] = deque()

    def launch(self, number: int, flat: Tensor) -> None:
        """Start the reduce-scatter of flat [P], the gradients of bucket `number`."""
        if len(self.flights) == self.most:
            self.settle()
        mine = torch.empty_like(flat[: len(flat) // self.group.size])
        work = self.group.reduce_scatter(mine, flat, "mean", async_op=True)
        self.flights.append((number, work, flat, mine))

    def settle(self) -> None:
        """Wait for the oldest, and add what has arrived to its shard."""
        number, work, _, mine = self.flights.popleft()
        work.wait()
        self.shards[number] = self.shards[number] + mine if number in self.shards else mine

    def land(self) -> None:
        """Wait for all that are under way, the oldest first."""
        while self.flights:
            self.settle()


def clip_global_norm(group: Group, shards: Mapping[str, Tensor], limit: float) -> float:
    """Clip, in place, gradients of which this rank holds the shards; returns their L2 norm
    before clipping.

    The norm is that of the whole gradient over all ranks, and when it exceeds `limit`, every
    element is multiplied by limit / norm: the same number on every rank. `shards` may be empty
    on some ranks. A tied parameter has two names for one and the same tensor, and counts once.
    Shards are fp32 or 16 bits (fp16 ends at 65504, and the square of 1e20 is too large for
    fp32). One all-reduce of one number.
    """
    once = list({id(shard): shard for shard in shards.values()}.values())
    squares = torch.zeros(1, dtype=torch.float64)
    for shard in once:
        squares += shard.double().pow(2).sum()
    group.all_reduce(squares)
    norm = squares.sqrt().item()
    if norm > limit:
        for shard in once:
            shard.mul_(limit / norm)
    return norm


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
    once = params // ranks * (ranks - 1) * itemsize
    if strategy == "ddp":
        return {"all_reduce": 2 * once}
    backwards = -(-samples // room) if strategy == "zero2" else 1
    return {"reduce_scatter": backwards * once, "all_gather": once}


def peak_gradient_bytes(buckets: Sequence[int], ranks: int, itemsize: int) -> int:
    """The most bytes that gradients take on a rank during the first backward of ZeRO-2, one
    bucket after another.

    A bucket of n elements is a flat buffer, padded to a multiple of `ranks`; its shard is a
    buffer of its own, made before the bucket travels. When it has arrived, the flat buffer is
    freed, and the next bucket begins. Shards stay.
    Example: buckets [8, 4], 2 ranks, 1 byte -> 12: 8 + 4 while the first travels,
    4 + 2 + 4 = 10 for the second.
    """
    kept = peak = 0
    for numel in buckets:
        shard = -(-numel // ranks)
        kept += shard
        peak = max(peak, kept + shard * ranks)
    return peak * itemsize


HINTS = {
    "GradientShards": [
        "__init__: p.register_post_accumulate_grad_hook(fn) calls fn(p) inside backward, when p.grad is complete.",
        "on_gradient: remember p. While the next bucket in order has all its parameters, launch it.",
        "launch: first settle the one before. Copy the gradients into a padded buffer, set p.grad = None, make a [S] "
        "tensor of its own for the result (a view would keep the whole buffer alive), and start.",
        "settle: work.wait(), then add to the shard if there is one from an earlier micro-batch; drop the buffer.",
        "finish: launch what is left (unused parameters are zeros), settle, and reset what belongs to one backward.",
    ],
    "InFlight": [
        "What must be kept of each that is under way? Its number, its work, the result, and the buffer that travels.",
        "The oldest is the one that was launched first: a queue, `collections.deque`, with append and popleft.",
        "launch: while there is room nothing is waited for. The result is a tensor of its own, not a view of `flat`.",
        "The same number can be launched again while the first is still under way: so add when it arrives.",
    ],
    "clip_global_norm": [
        "Each rank knows only its own part of the sum of squares. What must travel, squares or roots?",
        "Two names can hold the very same tensor: a dict by id(tensor) leaves one of each.",
        "All-reduce the sum of squares in fp64, take the root, and multiply by limit / norm only if norm > limit.",
    ],
    "accumulated_bytes": [
        "How often does backward run? Round samples / room up.",
        "ZeRO-2 has no memory for a whole gradient: each backward's gradients must leave before the next.",
        "The weights change once a step, however many backwards there were.",
    ],
    "peak_gradient_bytes": [
        "Play it through: which buffers are alive while bucket number i travels?",
        "The flat buffer of bucket i, its shard, and the shards of all buckets before it.",
    ],
}
