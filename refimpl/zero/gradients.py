"""Gradients on their way: they arrive one parameter at a time, fill a bucket, travel, and become this rank's mean.

    backward -> post-accumulate hook (`arrive`) -> bucket full (`launch`) -> the stage's `reduce` -> `settle` -> `total`

Buckets are launched in one fixed order on every rank, so that ranks which leave different parameters unused still call
the same collectives; what never filled is launched, with zeros, when backward is over (so an unused parameter costs the
overlap of the buckets behind its own). A later backward before the step adds to what is there, whether it travels or
waits (`sync` False).
Li et al. 2020, arXiv:2006.15704, section 3.2; DeepSpeed: deepspeed/runtime/zero/stage_1_and_2.py, `reduce_ipg_grads`.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from refimpl.comm.collectives import Op, Scratch
from refimpl.comm.group import Group
from refimpl.comm.work import Work
from refimpl.zero.config import ZeroConfig
from refimpl.zero.flat import Bucket
from refimpl.zero.parameter import clear_raw_grad, raw_grad

IN_FLIGHT = 2  # one bucket travels while the next one fills


@dataclass
class Flight:
    """One reduction under way: `local` [P] must stay untouched until `result` ([P] or [S]) is there."""

    bucket: Bucket
    work: Work
    local: Tensor
    result: Tensor


class Gradients:
    """Receives the gradients of `buckets` and hands each full one to `reduce(bucket, local [P]) -> (work, result)`.

    `result` may be a view of `local` (DDP, ZeRO-1: the memory stays in use until the step) or memory of its own
    (ZeRO-2, ZeRO-3: `local` is free again as soon as it has travelled).
    """

    def __init__(
        self,
        buckets: list[Bucket],
        reduce: Callable[[Bucket, Tensor], tuple[Work, Tensor]],
        group: Group,
        config: ZeroConfig,
        names: dict[nn.Parameter, str],
        sign: Callable[[], None],
        in_order: bool = True,
    ) -> None:
        """`sign` is called whenever a gradient arrives, before it is looked at: see `BackwardPass`."""
        self.buckets: list[Bucket] = []
        self.reduce, self.group, self.config, self.names = reduce, group, config, names
        self.sign, self.in_order = sign, in_order
        self.divisor: float = 1  # of every gradient that arrives: to average over micro-batches
        self.sync = True  # whether a backward reduces its gradients, or keeps them for a later one
        self.used: set[nn.Parameter] = set()  # that this rank has a gradient of since the step
        self.dropped: set[nn.Parameter] = set()  # whose reduced gradient was dropped, on every rank
        self.generation = 0  # counts the changes of `total`
        self.held: Callable[[Bucket], bool] = lambda _: False  # whether somebody has kept a view of its total
        self.bucket_of: dict[nn.Parameter, Bucket] = {}
        self._first: Tensor | None = None  # whether the first gradient of this backward was finite
        self._handles: list[Any] = []
        self.local: dict[Bucket, Tensor] = {}  # [P], this rank's own sum, still to travel
        self.total: dict[Bucket, Tensor] = {}  # [P] or [S], mean over ranks of all that has travelled since the step
        self._written: dict[Bucket, set[nn.Parameter]] = {}  # whose piece of `local` holds something
        self._missing: dict[Bucket, set[nn.Parameter]] | None = None  # still to arrive in this backward
        self.flights: deque[Flight] = deque()  # reductions under way, the oldest first
        self._lent: list[tuple[Scratch, Tensor]] = []  # buffers that totals live in until the step
        self._scratch, self._results = (
            Scratch(group.empty),
            Scratch(),
        )  # kept between steps, for `local` and for `result`
        # Divide by `before` on the way in, and multiply by `after` when summed; a plain mean divides inside the sum.
        before = group.size if config.prescale_gradients else config.gradient_predivide_factor
        plain_sum = config.gradient_allreduce_op == "sum"
        self._before: float
        self._after: float
        self._before, self._after = (1, 1) if plain_sum else (before, before / group.size)
        self.op: Op = "mean" if before == 1 and not plain_sum else "sum"
        self.watch(buckets)

    def watch(self, buckets: list[Bucket]) -> None:
        """Receive the gradients of these buckets too."""
        self.buckets += buckets
        for bucket in buckets:
            for p in bucket.params:
                self.bucket_of[p] = bucket
                self._handles.append(p.register_post_accumulate_grad_hook(self.arrive))  # type: ignore[no-untyped-call]

    def take(self, numel: int, like: Tensor) -> Tensor:
        """A [numel] buffer of like's dtype for the result of a reduction."""
        return self._results.take(numel, like)

    def begin(self) -> None:
        """A backward begins: every bucket with something to train awaits its gradients."""
        while self.flights:  # of a backward that raised
            self._settle(discard=True)
        self._missing = {b: missing for b in self.buckets if (missing := {p for p in b.params if p.requires_grad})}
        self._first = None

    def end(self, asked: bool) -> None:
        """Backward is over: reduce what it left, unless gradients wait for a later pass.

        A pass that nobody asked for and that brought nothing (`torch.autograd.grad`, another model's loss) sends
        nothing.
        """
        try:
            if self.sync and (asked or self._first is not None):
                self.launch_rest()
        finally:
            self._missing = None

    def drop(self) -> None:
        """Forget everything since the last step. What still travels is waited for when the next backward begins."""
        self._missing = None
        for local in self.local.values():
            self._scratch.give(local)
        self.local, self._written = {}, {}
        self.clear()

    def arrive(self, p: nn.Parameter) -> None:
        """Runs inside backward when p's gradient is complete: add it to the bucket, and launch what is now full."""
        self.sign()
        self.group.ledger.mark(f"grad {self.names[p]}")
        grad = raw_grad(p)
        assert grad is not None
        clear_raw_grad(p)
        bucket = self.bucket_of[p]
        self.add(p, grad if self.divisor == 1 else grad / self.divisor)
        if self._missing and bucket in self._missing:
            self._missing[bucket].discard(p)
            self._launch_full(bucket)

    @torch.no_grad()
    def add(self, p: nn.Parameter, grad: Tensor) -> None:
        """Add this rank's own gradient of p, to be reduced later."""
        bucket = self.bucket_of[p]
        if bucket not in self.local:
            self._open(bucket)
        piece = bucket.piece(self.local[bucket], p)
        grad = grad.to_dense() if grad.is_sparse else grad
        if self._first is None:
            self._first = grad.isfinite().all()
        if p in self._written[bucket]:
            piece.add_(grad)
        else:
            piece.copy_(grad)
            self._written[bucket].add(p)
        self.used.add(p)

    def waiting(self, p: nn.Parameter) -> Tensor | None:
        """This rank's own gradient of p that is not reduced yet, in p's shape."""
        bucket = self.bucket_of[p]
        return bucket.piece(self.local[bucket], p) if p in self._written.get(bucket, ()) else None

    def discard(self, p: nn.Parameter) -> None:
        """Drop the gradient of p alone."""
        bucket = self.bucket_of[p]
        self.used.discard(p)
        if bucket in self.total:
            self.dropped.add(p)
            bucket.part(self.total[bucket], p).zero_()
        self._written.get(bucket, set()).discard(p)

    @property
    def arrived(self) -> bool:
        """Whether the last backward brought a gradient."""
        return self._first is not None

    @property
    def was_finite(self) -> bool:
        """Whether the first gradient of the last backward was: NaN in this rank's own loss shows there."""
        return self._first is None or bool(self._first)

    def _open(self, bucket: Bucket) -> None:
        """Give the bucket a [P] buffer to fill."""
        dtype = self.config.grad_accum_dtype or bucket.dtype
        like = torch.empty(0, dtype=dtype, device=bucket.device)
        self.local[bucket] = self._scratch.take(bucket.padded, like)
        self.local[bucket][bucket.numel :].zero_()
        self._written[bucket] = set()

    def _launch_full(self, touched: Bucket) -> None:
        """Launch what is full. `_missing` lists, in launch order, the buckets not launched in this backward."""
        assert self._missing is not None
        if not (self.sync and self.config.overlap_comm):
            return
        for bucket in list(self._missing) if self.in_order else [touched]:
            if self._missing[bucket]:
                return
            self.launch(bucket)

    def launch_rest(self) -> None:
        """Backward is over: launch what unused parameters kept from filling, and what arrived late; wait for all."""
        assert self._missing is not None
        if not self.config.ignore_unused_parameters:
            unused = [self.names[p] for missing in self._missing.values() for p in missing]
            if unused:
                raise RuntimeError(
                    f"rank {self.group.rank}: no gradient for {', '.join(unused)}; freeze what the loss does not use, "
                    "or set ignore_unused_parameters=True"
                )
        late = [b for b in self.buckets if b in self.local and b not in self._missing]
        for bucket in [*self._missing, *late]:
            self.launch(bucket)
        self._settle_all()

    def launch(self, bucket: Bucket) -> None:
        """Start the reduction of the bucket's local gradients; what was not written counts as zero."""
        if self._missing is not None:
            self._missing.pop(bucket, None)
        if bucket not in self.local:
            self._open(bucket)
        local, written = self.local.pop(bucket), self._written.pop(bucket)
        for p in bucket.params:
            if p not in written:
                bucket.piece(local, p).zero_()
        while len(self.flights) >= IN_FLIGHT:
            self._settle()
        wire = local.to(self.config.communication_data_type or local.dtype)
        if self._before != 1:
            wire.div_(self._before)
        work, result = self.reduce(bucket, wire)
        self.flights.append(Flight(bucket, work, local, result))
        if not self.config.overlap_comm:
            self._settle()

    def _settle_all(self) -> None:
        for flight in self.flights:
            flight.work.advance()  # so that the second halves of all-reduces travel together
        while self.flights:
            self._settle()

    def _settle(self, discard: bool = False) -> None:
        """Wait for the oldest reduction and add its result to the bucket's total."""
        flight = self.flights.popleft()
        flight.work.wait()
        if not discard:
            self.generation += 1
            self.dropped -= set(flight.bucket.params)
            result = flight.result.to(flight.local.dtype)
            if self.op == "sum" and self._after != 1:
                result.mul_(self._after)
            if flight.bucket in self.total:
                self.total[flight.bucket].add_(result)
            else:
                self.total[flight.bucket] = result
        total = self.total.get(flight.bucket)
        kept = 0 if total is None else total.untyped_storage().data_ptr()
        for scratch, buffer in ((self._scratch, flight.local), (self._results, flight.result)):
            if scratch.lends(buffer):
                if buffer.untyped_storage().data_ptr() == kept:
                    self._lent.append((scratch, buffer))
                else:
                    scratch.give(buffer)

    def finish(self) -> dict[Bucket, Tensor]:
        """All gradients since the last step as means over ranks; a bucket in which all is frozen has none."""
        if self.local:  # the last backward was not reduced
            for bucket in self.buckets:
                if bucket in self.local or any(p.requires_grad for p in bucket.params):
                    self.launch(bucket)
            self._settle_all()
        return self.total

    def clear(self) -> None:
        """Forget all gradients; their buffers stay for the next backward."""
        kept = {total.untyped_storage().data_ptr() for bucket, total in self.total.items() if self.held(bucket)}
        self.total = {}
        self.used, self.dropped = set(), set()
        self.generation += 1
        for scratch, buffer in self._lent:
            scratch.give(buffer, keep=buffer.untyped_storage().data_ptr() not in kept)
        self._lent.clear()

    def buffers(self) -> list[Tensor]:
        """Transient memory kept between steps."""
        return self._scratch.tensors() + self._results.tensors()

    def remove(self) -> None:
        """Let go of the parameters."""
        for handle in self._handles:
            handle.remove()
