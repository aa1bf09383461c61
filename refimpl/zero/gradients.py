"""Gradients on their way: they arrive one parameter at a time, fill a bucket, travel, and become this rank's mean.

    a bucket is   until                                                  its gradients lie in
    empty         `add`: the first gradient arrives (`arrive` is the hook)
    filling       `launch`: full, or backward is over                     filling: [P], see `Filling`
    travelling    `settle`: the reduction has arrived                     flights, see `Flights`
    reduced       `clear`: the step has used it                           total [P] or [S]

Buckets are launched in one fixed order on every rank, so that ranks which leave different parameters unused still call
the same collectives; what never filled is launched, with zeros, when backward is over (so an unused parameter costs the
overlap of the buckets behind its own). A later backward before the step adds to what is there, whether it travels or
waits (`sync` False).
Li et al. 2020, arXiv:2006.15704, section 3.2; DeepSpeed: deepspeed/runtime/zero/stage_1_and_2.py, `reduce_ipg_grads`.
"""

import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from refimpl.comm.group import Group
from refimpl.offload.blocks import OffloadError
from refimpl.offload.homes import is_here
from refimpl.zero.config import ZeroConfig
from refimpl.zero.flat import Bucket
from refimpl.zero.parameter import GRAD, REQUIRES_GRAD
from refimpl.zero.reduction.filling import Filling
from refimpl.zero.reduction.flights import Flight, Flights, Reduction

IN_FLIGHT = 2  # two buckets travel while a third fills
DROPPED = (
    "Nothing was updated, and the gradients since the last step are dropped on every rank: save, or go on when the "
    "disk is well"
)


class Gradients(Flights):
    """Receives the gradients of `buckets` and hands each full one to `reduce(bucket, local [P])`."""

    def __init__(
        self,
        buckets: list[Bucket],
        reduce: Callable[[Bucket, Tensor], Reduction],
        group: Group,
        config: ZeroConfig,
        names: dict[nn.Parameter, str],
        sign: Callable[[], None],
        in_order: bool = True,
    ) -> None:
        """`sign` is called whenever a gradient arrives, before it is looked at: see `BackwardPass`."""
        super().__init__(group, config)
        self.reduce, self.names, self.sign, self.in_order = reduce, names, sign, in_order
        self.divisor: float = 1  # of every gradient that arrives: to average over micro-batches
        self.sync = True  # whether a backward reduces its gradients, or keeps them for a later one
        self.used: set[nn.Parameter] = set()  # that this rank has a gradient of since the step
        self.passes = 0  # backwards since the step that brought this rank a gradient
        self.frozen_in: Counter[nn.Parameter] = Counter()  # in how many of them a parameter was frozen
        self.dropping: Callable[[], None] = lambda: None  # called when gradients are forgotten before a step
        self.bucket_of: dict[nn.Parameter, Bucket] = {}
        self.awaited: dict[Bucket, list[nn.Parameter]] = {}  # what of each bucket may have a gradient
        self.twice: list[str] = []  # whose gradient came once more behind its bucket's launch, since the step, in order
        self.brought = False  # whether this backward, or the last one, had a gradient
        self.first_finite: Tensor | None = None  # whether the first one of every backward was, since the step
        self._handles: dict[nn.Parameter, Any] = {}
        self.filling: dict[Bucket, Filling] = {}  # this rank's own sum, still to travel
        self._missing: dict[Bucket, set[nn.Parameter]] | None = None  # still to arrive in this backward
        self._frozen: list[nn.Parameter] = []  # in this backward
        self.watch(buckets, [p for bucket in buckets for p in bucket.params])

    def watch(self, buckets: list[Bucket], params: list[nn.Parameter]) -> None:
        """Receive the gradients of these parameters too, and these buckets. A bucket may have others beside them."""
        self.buckets += buckets
        lies_in = {p: bucket for bucket in self.buckets for p in bucket.params}
        for p in params:
            self.bucket_of[p] = lies_in[p]
            self.listen(p)
        self.awaited = {b: [p for p in b.params if p in self.bucket_of] for b in self.buckets}

    def listen(self, p: nn.Parameter) -> None:
        """Take p's gradient behind all hooks of the user's, which see this rank's own, as under torch's DDP."""
        if p in self._handles:
            self._handles.pop(p).remove()
        here, mark = weakref.ref(self), f"grad {self.names[p]}"
        # Python's garbage collector does not see through this kind of hook: what it holds is held for ever.
        hook = lambda p: there.arrive(p, mark) if (there := here()) else None  # noqa: E731
        self._handles[p] = Tensor.register_post_accumulate_grad_hook(p, hook)  # type: ignore[no-untyped-call]

    def begin(self) -> None:
        """A backward begins: every bucket with something to train awaits its gradients."""
        if self.flights or self._arrived:  # of a backward that raised
            self.abandon()
        with torch._C.DisableTorchFunctionSubclass():  # a freed parameter's way of being asked, which takes longer
            trained = {b: set(filter(REQUIRES_GRAD.__get__, those)) for b, those in self.awaited.items()}
            self._missing = {bucket: params for bucket, params in trained.items() if params}
            some = [(b, those) for b, those in trained.items() if len(those) < len(b.params)]
            self._frozen = [p for b, those in some for p in b.params if p not in those]
        self.brought = False

    def end(self, asked: bool) -> None:
        """Backward is over: reduce what it left, unless gradients wait for a later pass.

        A pass that nobody asked for and that brought nothing (`torch.autograd.grad`, another model's loss) sends
        nothing.
        """
        if asked or self.brought:
            self.passes += 1
            self.frozen_in.update(self._frozen)
        try:
            if self.sync and (asked or self.brought):
                self.launch_rest()
        finally:
            self._missing = None

    def drop(self) -> None:
        """Forget everything since the last step. What still travels is waited for when the next backward begins."""
        self._missing = None
        for filling in self.filling.values():
            self._scratch.give(filling.buffer)
        self.filling = {}
        self.dropping()
        self.clear()

    def arrive(self, p: nn.Parameter, mark: str) -> None:
        """Runs inside backward when p's gradient is complete: add it to the bucket, and launch what is now full."""
        bucket = self.bucket_of[p]
        self.sign()
        self.group.ledger.mark(mark)
        grad: Tensor | None = GRAD.__get__(p)  # autograd's: `p.grad` would show the stage's
        GRAD.__set__(p, None)
        if grad is None:  # frozen since the forward
            return
        self.add(p, grad if self.divisor == 1 else grad / self.divisor, bucket)
        missing = self._missing.get(bucket) if self._missing else None
        if missing is not None:
            missing.discard(p)
            if not missing:
                self._launch_full(bucket)

    def add(self, p: nn.Parameter, grad: Tensor, bucket: Bucket | None = None) -> None:
        """Add this rank's own gradient of p to its bucket, to be reduced later."""
        bucket = bucket or self.bucket_of[p]
        grad = grad.detach() if grad.requires_grad else grad  # recorded: create_graph
        grad = grad.to_dense() if grad.is_sparse else grad
        if not self.brought:
            self.brought, finite = True, grad.isfinite().all()
            self.first_finite = finite if self.first_finite is None else self.first_finite & finite
        self.used.add(p)
        (self.filling.get(bucket) or self._open(bucket)).add(p, grad)

    def waiting(self, p: nn.Parameter) -> Tensor | None:
        """This rank's own gradient of p that is not reduced yet, in p's shape."""
        filling = self.filling.get(self.bucket_of[p])
        return None if filling is None else filling.of(p)

    def discard(self, p: nn.Parameter) -> None:
        """Drop the gradient of p alone."""
        bucket = self.bucket_of[p]
        self.used.discard(p)
        if bucket in self.total:
            self.dropped.add(p)
            self.change(bucket, *bucket.within(self.total[bucket].numel(), p), Tensor.zero_)
        if bucket in self.filling:
            self.filling[bucket].discard(p)

    def _open(self, bucket: Bucket) -> Filling:
        """The bucket's gradients of this rank, with a buffer to fill."""
        if bucket not in self.filling:
            self.filling[bucket] = Filling(bucket, self._scratch, self.config.grad_accum_dtype)
        return self.filling[bucket]

    def _launch_full(self, touched: Bucket) -> None:
        """Launch what is full. `_missing` lists, in launch order, the buckets not launched in this backward."""
        assert self._missing is not None
        if not (self.sync and self.config.overlap_comm):
            return
        for bucket in list(self._missing) if self.in_order else [touched]:
            if self._missing[bucket] or bucket.awaited > 0:
                return
            self.launch(bucket)

    def complete(self, bucket: Bucket) -> None:
        """Backward is through with all that uses the bucket: launch it, also if some of it was not used."""
        due = self._missing is not None and bucket in self._missing and self.sync and self.config.overlap_comm
        if due and (self.config.ignore_unused_parameters or not self._missing[bucket]):  # type: ignore[index]
            self.launch(bucket)

    def launch_rest(self) -> None:
        """Backward is over: launch what unused parameters kept from filling, and what arrived late; wait for all."""
        assert self._missing is not None
        if not self.config.ignore_unused_parameters:
            unused = [self.names[p] for missing in self._missing.values() for p in missing]
            if unused:
                raise RuntimeError(
                    f"rank {self.group.ranks[self.group.rank]}: no gradient for {', '.join(unused)}; freeze what the "
                    "loss does not use, or set ignore_unused_parameters=True"
                )
        late = [b for b in self.buckets if b in self.filling and b not in self._missing]
        again = [(p, self.filling[b].arrived) for b in late if b.group is self.group for p in b.params]
        self.twice += [self.names[p] for p, arrived in again if p in arrived]
        for bucket in [*self._missing, *late]:
            self.launch(bucket)
        self.settle_all()

    def launch(self, bucket: Bucket) -> None:
        """Start the reduction of the bucket's local gradients; what was not written counts as zero."""
        if self._missing is not None:
            self._missing.pop(bucket, None)
        bucket.awaited = 0
        local = self._open(bucket).complete()
        del self.filling[bucket]
        while len(self.flights) >= IN_FLIGHT:
            self.settle()
        wire = local.to(self.config.communication_data_type or local.dtype)
        if self._predivide != 1:
            wire.div_(self._predivide)
        self.flights.append(Flight(bucket, local, self.reduce(bucket, wire)))
        if not self.config.overlap_comm:
            self.settle()

    def finish(self) -> dict[Bucket, Tensor]:
        """All gradients since the last step as means over ranks; a bucket in which all is frozen has none.

        OffloadError on every rank if a disk has lost some of one's: all are dropped, and a backward begins anew.
        """
        if self.filling:  # the last backward was not reduced
            for bucket in self.buckets:
                if bucket in self.filling or any(p.requires_grad for p in bucket.params):
                    self.launch(bucket)
            self.settle_all()
        if self.resting is not None and self.total:
            try:
                self.resting.settle(self.group)
            except OffloadError as error:
                self.drop()
                raise OffloadError(f"{error}. {DROPPED}") from error
        return self.total

    def clear(self) -> None:
        super().clear()
        self.used, self.passes, self.frozen_in, self.first_finite, self.twice = set(), 0, Counter(), None, []

    def tensors(self) -> list[Tensor]:
        """The gradients since the last step: reduced, or this rank's own."""
        totals = [total for total in self.total.values() if is_here(total)]
        return [*totals, *(filling.buffer for filling in self.filling.values())]

    def remove(self) -> None:
        """Let go of the parameters."""
        for handle in self._handles.values():
            handle.remove()


def take_raw_grad(p: nn.Parameter) -> Tensor | None:
    """The gradient that autograd has put there, taken away."""
    grad: Tensor | None = GRAD.__get__(p)
    GRAD.__set__(p, None)
    return grad
