"""Gradients that travel, and what has arrived: reductions under way become this rank's part of the mean.

    a reduction    its result
    travels        is written to its own memory
    arrives        is scaled; becomes the bucket's total, or is added to it: later micro-batches add up
                   rests elsewhere, if there is a home for it (see `Resting`)
    is used up     gives its memory back, for the next backward; what somebody has kept a view of is left to him

Where ranks beside these have the same shards and read other data (`across`), what has arrived waits until backward is
over, and then meets theirs.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from refimpl.comm.collectives import Op, Scratch
from refimpl.comm.group import Group
from refimpl.comm.work import Work
from refimpl.zero.config import ZeroConfig
from refimpl.zero.flat import Bucket
from refimpl.zero.reduction.resting import Resting


@dataclass
class Reduction:
    """What a stage's `reduce` started: `result` is this rank's part of the mean once `work` is done.

    It lives in `memory`, which is in use until the step: all of the bucket's gradients (DDP, ZeRO-1), or the shard.
    """

    work: Work
    result: Tensor  # [P] or [S]
    memory: Tensor


@dataclass
class Flight:
    """One reduction under way: `local` [P] must stay untouched until it is done."""

    bucket: Bucket
    local: Tensor
    reduction: Reduction


class Flights:
    """Of these `buckets`, in the order in which they are launched."""

    def __init__(self, group: Group, config: ZeroConfig) -> None:
        self.buckets: list[Bucket] = []
        self.group, self.config = group, config
        self.across: Group | None = None  # the ranks with the same shards and other data, see `Stage.replicate`
        self.resting: Resting | None = None  # where the totals of some buckets wait, if not in memory
        self.held: Callable[[Bucket], bool] = lambda _: False  # whether somebody has kept a view of its total
        self.flights: deque[Flight] = deque()  # reductions under way, the oldest first
        self.total: dict[Bucket, Tensor] = {}  # [P] or [S], mean over ranks of all that has travelled since the step
        self.dropped: set[nn.Parameter] = set()  # whose part of it was dropped, on every rank
        self.generation = 0  # counts the changes of `total`
        self.versions: dict[Bucket, int] = {}  # of the totals, when they arrived: who writes to one raises it
        self._arrived: dict[Bucket, Flight] = {}  # reduced here, still to meet what is `across`
        self._lent: dict[Bucket, Tensor] = {}  # the buffers that totals live in until the step
        # Kept between steps, for what fills, which the ranks exchange, and for the results.
        self._scratch, self.results = Scratch(group.streams, group.empty), Scratch(group.streams)
        divisor = group.size if config.prescale_gradients else config.gradient_predivide_factor
        plain_sum = config.gradient_allreduce_op == "sum"
        self.op: Op = "mean" if divisor == 1 and not plain_sum else "sum"  # a plain mean divides inside the sum
        self._predivide: float = 1 if plain_sum else divisor
        self._postscale: float = 1 if plain_sum or self.op == "mean" else divisor / group.size

    def settle(self, met: bool = False) -> None:
        """Wait for the oldest reduction and add its result to the bucket's total; `met`: also those `across` have."""
        flight = self.flights.popleft()
        bucket, reduction = flight.bucket, flight.reduction
        reduction.work.wait()
        if self.across is not None and not met:
            self._arrived[bucket] = flight
            return
        result = reduction.result.to(flight.local.dtype)
        if self._postscale != 1:
            result.mul_(self._postscale)
        elif self.op == "mean" and bucket.group.size < self.group.size:  # an expert's tokens are all ranks'
            result.div_(self.group.size / bucket.group.size)
        if self.resting is not None and bucket in self.resting.buckets:
            self.total[bucket] = self.resting.add(bucket, result)
            self.group.ledger.mark(f"home {bucket.name}")
        elif bucket in self.total:
            self.total[bucket].add_(result)
        else:
            self.total[bucket] = result
            if result is reduction.result:
                self._lent[bucket] = reduction.memory
        self.versions[bucket] = self.total[bucket]._version
        self._give_back(flight)
        if self.dropped:
            self.dropped.difference_update(bucket.params)
        self.generation += 1

    def settle_all(self) -> None:
        """Wait for all; meet the ranks `across` in one order: these may have used the layers in another."""
        while self.flights:
            self.settle()
        for bucket in [bucket for bucket in self.buckets if bucket in self._arrived]:
            assert self.across is not None
            self.flights.append(self._arrived.pop(bucket))
            op: Op = "sum" if self.config.gradient_allreduce_op == "sum" else "mean"
            self.across.all_reduce(self.flights[0].reduction.result, op, tag="gradients across")
            self.settle(met=True)
        if self.resting is not None:
            self.resting.arrived()

    def _give_back(self, flight: Flight) -> None:
        """The buffers of a reduction that is over or of no use, but for what its bucket's total lives in."""
        flight.reduction.work.wait()
        for scratch, buffer in ((self._scratch, flight.local), (self.results, flight.reduction.memory)):
            if scratch.lends(buffer) and buffer is not self._lent.get(flight.bucket):
                scratch.give(buffer)

    def abandon(self) -> None:
        """What travels is of no use: wait for it, and take its buffers back."""
        self.flights += self._arrived.values()
        self._arrived = {}
        while self.flights:
            self._give_back(self.flights.popleft())

    def reduced(self, bucket: Bucket) -> Tensor | None:
        """The mean over ranks of all that has travelled since the step: [P] or [S]; a copy, if it rests on a disk."""
        if self.resting is not None and bucket in self.resting.squares:
            return self.resting.whole(bucket)
        return self.total.get(bucket)

    def change(self, bucket: Bucket, start: int, end: int, write: Callable[[Tensor], object]) -> None:
        """Let `write` change the elements start to end of a bucket's total, wherever that is."""
        if self.resting is not None and bucket in self.resting.squares:
            self.resting.change(bucket, start, end, write)
            self.generation += 1
        else:
            write(self.total[bucket][start:end])

    def clear(self) -> None:
        """Forget all gradients; their buffers stay for the next backward."""
        for bucket, buffer in self._lent.items():
            scratch = self._scratch if self._scratch.lends(buffer) else self.results
            scratch.give(buffer, keep=not self.held(bucket))
        self._lent, self.total = {}, {}
        if self.resting is not None:
            self.resting.clear(self.held)
        self.dropped = set()
        self.generation += 1

    def buffers(self) -> list[Tensor]:
        """Transient memory kept between steps."""
        resting = self.resting.memory() if self.resting else []
        return self._scratch.tensors() + self.results.tensors() + resting

    def trim(self) -> None:
        """Keep no buffer that is free."""
        self._scratch.trim()
        self.results.trim()
