"""Gradients on their way: they arrive one parameter at a time, fill a bucket, travel, and become this rank's mean.

    backward -> post-accumulate hook (`arrive`) -> bucket full (`launch`) -> the stage's `reduce` -> `settle` -> `total`

Buckets are launched in one fixed order on every rank, so that ranks which leave different parameters unused still call
the same collectives; what never filled is launched, with zeros, when backward is over (so an unused parameter costs the
overlap of the buckets behind its own). A later backward before the step adds to what is there, whether it travels
(sync=True) or waits (sync=False).
Li et al. 2020, arXiv:2006.15704, section 3.2; DeepSpeed: deepspeed/runtime/zero/stage_1_and_2.py, `reduce_ipg_grads`.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from refimpl.comm.collectives import Op, Scratch
from refimpl.comm.group import Group, Work
from refimpl.zero.config import ZeroConfig
from refimpl.zero.flat import Bucket

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
        in_order: bool = True,
    ) -> None:
        self.buckets, self.reduce, self.group, self.config, self.names = buckets, reduce, group, config, names
        self.in_order = in_order
        self.bucket_of = {p: b for b in buckets for p in b.params}
        self.local: dict[Bucket, Tensor] = {}  # [P], this rank's own sum, still to travel
        self.total: dict[Bucket, Tensor] = {}  # [P] or [S], mean over ranks of all that has travelled since the step
        self._written: dict[Bucket, set[nn.Parameter]] = {}  # whose piece of `local` holds something
        self._missing: dict[Bucket, set[nn.Parameter]] | None = None  # still to arrive in this backward
        self._flights: deque[Flight] = deque()
        self._lent: list[tuple[Scratch, Tensor]] = []  # buffers that totals live in until the step
        self._scratch, self._results = Scratch(), Scratch()  # kept between steps, for `local` and for `result`
        # Divide by `before` on the way in, and multiply by `after` when summed; a plain mean divides inside the sum.
        before = group.size if config.prescale_gradients else config.gradient_predivide_factor
        plain_sum = config.gradient_allreduce_op == "sum"
        self._before: float
        self._after: float
        self._before, self._after = (1, 1) if plain_sum else (before, before / group.size)
        self.op: Op = "mean" if before == 1 and not plain_sum else "sum"
        for p in self.bucket_of:
            p.register_post_accumulate_grad_hook(self.arrive)  # type: ignore[no-untyped-call]

    def take(self, numel: int, like: Tensor) -> Tensor:
        """A [numel] buffer of like's dtype for the result of a reduction."""
        return self._results.take(numel, like)

    def backward(self, loss: Tensor, sync: bool) -> None:
        """loss.backward(), its gradients collected; with `sync` also reduced, else kept for a later pass."""
        self._missing = {b: set(b.params) for b in self.buckets}
        self._sync = sync
        try:
            loss.backward()  # type: ignore[no-untyped-call]
            if sync:
                self.launch_rest()
        finally:
            self._missing = None

    def arrive(self, p: nn.Parameter) -> None:
        """Runs inside backward when p.grad is complete: add it to the bucket, and launch what is now full."""
        if self._missing is None:
            raise RuntimeError(
                f"the gradient of {self.names[p]} arrived outside stage.backward(): "
                "call stage.backward(loss) in place of loss.backward()"
            )
        self.group.ledger.mark(f"grad {self.names[p]}")
        assert p.grad is not None
        bucket = self.bucket_of[p]
        if bucket not in self.local:
            self._open(bucket)
        piece = bucket.piece(self.local[bucket], p)
        grad = p.grad.to_dense() if p.grad.is_sparse else p.grad
        if p in self._written[bucket]:
            piece.add_(grad)
        else:
            piece.copy_(grad)
            self._written[bucket].add(p)
        p.grad = None
        if bucket in self._missing:
            self._missing[bucket].discard(p)
            self._launch_full(bucket)

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
        if not (self._sync and self.config.overlap_comm):
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
        late = [b for b in self.local if b not in self._missing]
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
        while len(self._flights) >= IN_FLIGHT:
            self._settle()
        wire = local.to(self.config.communication_data_type or local.dtype)
        if self._before != 1:
            wire.div_(self._before)
        work, result = self.reduce(bucket, wire)
        self._flights.append(Flight(bucket, work, local, result))
        if not self.config.overlap_comm:
            self._settle()

    def _settle_all(self) -> None:
        for flight in self._flights:
            flight.work.advance()  # so that the second halves of all-reduces travel together
        while self._flights:
            self._settle()

    def _settle(self) -> None:
        """Wait for the oldest reduction and add its result to the bucket's total."""
        flight = self._flights.popleft()
        flight.work.wait()
        result = flight.result.to(flight.local.dtype)
        if self.op == "sum" and self._after != 1:
            result.mul_(self._after)
        if flight.bucket in self.total:
            self.total[flight.bucket].add_(result)
        else:
            self.total[flight.bucket] = result
        total = self.total[flight.bucket].untyped_storage().data_ptr()
        for scratch, buffer in ((self._scratch, flight.local), (self._results, flight.result)):
            if scratch.lends(buffer):
                if buffer.untyped_storage().data_ptr() == total:
                    self._lent.append((scratch, buffer))
                else:
                    scratch.give(buffer)

    def finish(self) -> dict[Bucket, Tensor]:
        """All gradients since the last step as means over ranks. RuntimeError if there was no backward."""
        if self.local:  # the last backward had sync=False
            for bucket in self.buckets:
                self.launch(bucket)
            self._settle_all()
        if not self.total and self.buckets:
            raise RuntimeError("step() before any backward(): there are no gradients to apply")
        return self.total

    def clear(self) -> None:
        """Forget all gradients; their buffers stay for the next backward."""
        self.total = {}
        for scratch, buffer in self._lent:
            scratch.give(buffer)
        self._lent.clear()

    def buffers(self) -> list[Tensor]:
        """Transient memory kept between steps."""
        return self._scratch.tensors() + self._results.tensors()
