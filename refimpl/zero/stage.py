"""What DDP and the three stages have in common for whoever trains with one. A plain training loop stays as it is:

    stage = Zero2(model, optimizer)      # the only new line

    loss = model(batch)
    loss.backward()                      # gradients are reduced while backward runs
    optimizer.step()                     # is the stage's step: check, clip, update this rank's shard, gather
    optimizer.zero_grad()

`stage.backward(loss)` and `stage.step()` say the same explicitly; `stage.backward` scales the loss for fp16 and, with
`sync=False`, keeps gradients for a later pass. A step uses gradients up: they do not add up over steps. `p.grad` shows
them between backward and step (see `GradientView`). A subclass says what a rank owns of a bucket (`owned`) and how a
full bucket is reduced (`reduce`); what a rank does not own is gathered after the update.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn, optim

from refimpl.comm.group import Group
from refimpl.offload.blocks import OffloadError
from refimpl.optim.loss_scale import LossScaler
from refimpl.zero.agreement.alike import Alike
from refimpl.zero.agreement.beside import Beside
from refimpl.zero.backward import BackwardPass, refuse_inside
from refimpl.zero.chosen import gradients_of, update_kind
from refimpl.zero.config import ZeroConfig
from refimpl.zero.experts import apart
from refimpl.zero.flat import Bucket, gather_all, groups_of, lay_out
from refimpl.zero.gradients import take_raw_grad
from refimpl.zero.loop import since, start
from refimpl.zero.loop.buffers import Buffers
from refimpl.zero.loop.grad_view import GradientView
from refimpl.zero.loop.held import Held
from refimpl.zero.loop.hooked import Hooked
from refimpl.zero.loop.owned import not_taken, take_over
from refimpl.zero.loop.parked import Parked
from refimpl.zero.loop.scaled import Scaled
from refimpl.zero.loop.wrapped import refuse_wrapping
from refimpl.zero.parameter import Freed, Managed, Shown, stage_of
from refimpl.zero.reduction.compressed import Compressed
from refimpl.zero.reduction.flights import Reduction


class Stage(Hooked, Beside, Held):
    """A data-parallel strategy around a model and, if there is something to train, its optimizer."""

    reduces_always = False  # whether there is no memory in which a whole gradient could wait for a later pass
    manages_all = False  # whether also parameters of no optimizer group are the stage's
    in_order = True  # whether buckets are reduced in one fixed order

    def __init__(
        self,
        model: nn.Module | Iterable[nn.Parameter],
        optimizer: optim.Optimizer | None = None,
        group: Group | None = None,
        config: ZeroConfig | None = None,
        scaler: LossScaler | None = None,
        experts: Mapping[nn.Parameter, Group] | None = None,
    ) -> None:
        """`model` is a module, or bare parameters (not in ZeRO-3). Rank 0's weights and buffers are taken by all.

        Without `optimizer` nothing is updated: for inference, or until `attach` hands one over. Parameters in none of
        its groups are left alone. `group`: default all ranks. `scaler`: the loss scale of fp16.
        `experts`: the parameters that only some ranks of `group` have, and which ones: see experts.py.
        """
        self.model = start.module_of(model)
        self.group, self.config, self.given_scaler = group or start.ranks_of(self.model), config or ZeroConfig(), scaler
        if self.config.gradient_home is not None and not self.reduces_always:
            raise ValueError(
                f"gradient_home: {type(self).__name__} keeps whole gradients on every rank; shards rest elsewhere from "
                "ZeRO-2 on"
            )
        self.names = {p: name for name, p in self.model.named_parameters()}
        everywhere = self.group.size
        self.experts = {p: same if same.size < everywhere else self.group for p, same in (experts or {}).items()}
        self.parted = any(same is not self.group for same in self.experts.values())
        start.refuse_unfit(self.model, self.names)
        self.handles: list[Any] = []
        self.on_drop: list[Callable[[], None]] = []
        self.parked = Parked(self)
        self.shown = Shown()
        self.build(optimizer)

    def build(self, optimizer: optim.Optimizer | None) -> None:
        """Lay the model out for this optimizer, and listen to it."""
        self.group_of = groups_of(not_taken(optimizer), self.model)
        managed = [p for p in self.names if p in self.group_of or self.manages_all]
        start.refuse_foreign({p: self.names[p] for p in managed if stage_of(p) is not self}, optimizer is not None)
        everywhere = {name: p for p, name in self.names.items() if self.experts.get(p, self.group) is self.group}
        start.refuse_different(self.group, everywhere, self.group_of, optimizer, self.config, type(self).__name__)
        self.scaled = Scaled(self.given_scaler)
        self.passes = BackwardPass(self.begin_backward, self.end_backward, self.drop_backward)
        self.buckets = self.lay_out([p for p in self.names if p in self.group_of and p.requires_grad])
        parted = [module for _, module, same in apart(self.model, self.experts) if same is not self.group]
        left_out = {inside for module in parted for inside in module.modules()}
        self.group.trim()  # of the copies that brought rank 0's values
        self.buffers = Buffers(self.model, self.group, self.config.broadcast_buffers, left_out)
        self.thawed, self.later = {}, []
        self.compressed = Compressed(self, self.config.compression) if self.config.compression else None
        self.gradients = gradients_of(self, optimizer, self.compressed)
        self.view = GradientView(self.gradients, self.passes.settle, parted=self.parted)
        owned = {b: self.owned(b) for b in self.buckets}
        kind = update_kind(optimizer, self.config)
        self.update = kind(optimizer, owned, self.group, self.config, self.given_scaler, type(self).__name__)
        self.update.slices.gradient_of = self.view.of_slice
        self.update.alike = Alike(self)
        self.gradients.resting = self.update.resting
        if optimizer is not None:
            take_over(optimizer, self)
        for p in managed:
            p.__class__ = Freed if isinstance(p, Freed) else Managed
            p.stage = self  # type: ignore[attr-defined]
        refuse_wrapping(self.model)
        self.listen()

    # What makes a stage.

    def lay_out(self, params: list[nn.Parameter]) -> list[Bucket]:
        """The buckets of what is trained, with rank 0's weights; the rest of the model gets them too."""
        size, dtype = self.config.reduce_bucket_size, self.config.dtype
        buckets = lay_out(params, self.group_of, self.group, size, dtype, self.experts)
        start.share(self.model, set(params), self.group, dtype, self.experts)
        return buckets

    @abstractmethod
    def owned(self, bucket: Bucket) -> Tensor:
        """What of a bucket's parameters this rank updates: [P], or its shard [S]."""

    @abstractmethod
    def reduce(self, bucket: Bucket, local: Tensor) -> Reduction:
        """Runs inside backward, the moment a bucket is full: start to make this rank's gradients of local [P]."""

    # Training.

    def backward(self, loss: Tensor, sync: bool = True, **options: Any) -> None:
        """loss.backward(), the loss scaled if there is a scaler; `options` are those of `Tensor.backward`.

        Gradients of several calls before a step add up; to average over A micro-batches, divide the loss by A.
        `sync=False` for all but the last of them lets DDP and ZeRO-1 send once a step. ZeRO-2 and ZeRO-3 have no
        room for a whole gradient and always send.
        """
        with self.no_sync(not sync), self.passes.explicit():
            self.scale(loss).backward(**options)  # type: ignore[no-untyped-call]

    def scale(self, loss: Tensor) -> Tensor:
        """loss times the loss scale, fp32; the loss itself without a scaler. For a `backward()` called by hand."""
        return self.scaled(loss)

    @contextmanager
    def no_sync(self, enabled: bool = True) -> Iterator[None]:
        """Backwards in the block keep their gradients on this rank, where the stage has room for that (DDP, ZeRO-1)."""
        before = self.gradients.sync
        self.gradients.sync = before and not (enabled and not self.reduces_always)
        try:
            yield
        finally:
            self.gradients.sync = before

    def step(self) -> bool:
        """Update and gather. False if skipped because a gradient on any rank was not finite.

        RuntimeError if there was no backward since the last step, or if the last one was interrupted.
        """
        gradients = self.collect()
        if not gradients and self.buckets:
            since.refuse_nothing(self.model, self.names)
        return self.apply(gradients)

    def optimizer_step(self, closure: Callable[[], Any] | None = None) -> Any:
        """`optimizer.step()`: as `step`, but without a gradient nothing happens, as in torch. Returns the closure's."""
        if closure is not None and not self.update.slices.kind.asks_once:
            return self.search(closure)
        with torch.enable_grad():
            result = closure() if closure else None
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # what a torch schedule looks for
        if gradients := self.collect():
            self.apply(gradients)
        return result

    def reduce_rest(self) -> None:
        """Reduce what `no_sync` has kept; the next step would. A collective."""
        refuse_inside("reduce_rest()")
        self.passes.settle()
        self.gradients.finish()

    def collect(self) -> dict[Bucket, Tensor]:
        """The mean gradients since the last step."""
        self.free_gathered()
        if not self.handles:
            raise RuntimeError(
                f"step() of a {type(self).__name__} that was released (an engine's destroy()): make another"
            )
        self.refuse_without_optimizer()
        refuse_inside("step()")
        self.parked.refuse()
        if not self.passes.settle():
            raise RuntimeError("step() after a backward that raised: its gradients were dropped; run a backward first")
        if self.scaled.is_missing and self.gradients.used:
            raise self.scaled.error()
        for p in self.include_thawed():
            if (grad := take_raw_grad(p)) is not None:
                self.gradients.add(p, grad)
        since.refuse_replaced(self.model, self.names, self.gradients)
        # It walks the model: at the 1st, 2nd, 4th, 8th, ... step, and where there is nothing else.
        if not self.gradients.used or not self.update.steps & (self.update.steps + 1):
            since.warn_of_added(self.model, self.names)
            start.refuse_in_backward(self.names)
        return self.gradients.finish()

    def apply(self, gradients: dict[Bucket, Tensor]) -> bool:
        """Update this rank's part and gather; False if the update is skipped."""
        finite = self.update.prepare(gradients, self.gradients.used, self.gradients.first_finite)
        since.warn_of_nothing(self.update.left_alone, self.gradients, type(self).__name__)
        with self.raising_behind(lambda: self.after_update(finite)):
            if finite:
                self.update.apply()
        self.after_update(finite)
        return finite

    @contextmanager
    def raising_behind(self, gather: Callable[[], None]) -> Iterator[None]:
        """What the optimizer's step, or a hook of it, raises here comes behind `gather`: the other ranks are in it."""
        try:
            yield
        except OffloadError:  # on every rank
            raise
        except Exception as error:
            self.update.note(error)
            gather()
            raise

    def search(self, closure: Callable[[], Any]) -> Any:
        """For an optimizer that asks for the loss as often as it likes (LBFGS); returns what that returns."""

        def evaluate() -> Any:
            for bucket in self.buckets:
                self.update.publish(bucket)
            with torch.enable_grad():
                loss = closure()
            self.update.prepare(self.collect(), self.gradients.used, self.gradients.first_finite)
            return loss

        result = self.update.apply(evaluate)
        self.after_update(True)
        return result

    def rewrite(self, write: Callable[[Any], object]) -> None:
        """write(optimizer), which writes to its parameters outside of a step; the weights follow. A collective."""
        refuse_inside("a change of the optimizer's mode")
        self.come_to_rest()
        self.update.rewrite(write)
        self.gather()

    def after_update(self, done: bool) -> None:
        """The gradients are used up; bring the new weights to where the next forward needs them."""
        self.update.release()
        self.gradients.clear()
        if self.compressed is not None:
            self.compressed.settle(done, self.update.left_alone)
        if done:
            self.gather()
            # As an in-place update does: a graph that was recorded with the old weights can no longer run backward.
            torch.autograd.graph.increment_version([p for p in self.gradients.bucket_of if not isinstance(p, Freed)])
            self.update.alike.stepped()

    def gather(self) -> None:
        """Every rank's updated shard to every rank; nothing of what each rank has updated whole."""
        cut = [b for b in self.buckets if self.update.owned[b] is not b.full]
        gather_all(cut, self.config.allgather_bucket_size)

    def catch_up(self) -> None:
        """Finish an update that is one step late (`delayed_update`), and gather; nothing without one. A collective."""
        if self.config.delayed_update:
            self.free_gathered()  # what is gathered ahead has the old weights
        with self.raising_behind(self.gather):
            is_late = self.update.catch_up()
        if is_late:
            self.gather()

    def free_gathered(self) -> None:
        """Nothing is gathered for a use, here: see `Zero3`."""

    def come_to_rest(self) -> None:
        """Nothing is on its way, or gathered, when this returns. A collective."""
        self.passes.settle()
        self.catch_up()
        self.free_gathered()

    def zero_grad(self) -> None:
        """Drop all gradients since the last step."""
        refuse_inside("zero_grad()")
        self.passes.settle()
        self.gradients.drop()
        self.scaled.is_missing = False
        for p in self.group_of:
            if p not in self.gradients.bucket_of:
                take_raw_grad(p)
