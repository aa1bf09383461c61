"""What may change after a stage was built: its optimizer, what it trains, and whether there is a stage at all.

Parameters that are to be trained from now on (unfrozen, or of a new optimizer group) get buckets of their own, behind
those that are there: nothing moves, and no state is lost.
"""

from typing import Any

from torch import Tensor, nn, optim

from refimpl.zero.built import Built
from refimpl.zero.flat import Bucket, lay_out
from refimpl.zero.gather.unit import unit_of
from refimpl.zero.gather.units import make_whole
from refimpl.zero.loop.owned import let_go
from refimpl.zero.parameter import Managed, place, stage_of


class Changing(Built):
    """A part of `Stage`."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Neither copied nor pickled: it is one rank's part of what all ranks do."""
        kind = type(self).__name__
        raise TypeError(
            f"a {kind} cannot be copied or pickled: copy.deepcopy(model) is a plain model with the whole weights, and "
            "state_dict() this rank's part of a checkpoint (each on every rank)"
        )

    @property
    def optimizer(self) -> optim.Optimizer:
        """The optimizer, which is the caller's own object. RuntimeError if there is none."""
        self.refuse_without_optimizer()
        assert self.update.slices.optimizer is not None
        return self.update.slices.optimizer

    @optimizer.setter
    def optimizer(self, other: optim.Optimizer | None) -> None:
        if other is not self.update.slices.optimizer:  # it would never be asked to step
            raise AttributeError(
                "optimizer: it cannot be replaced, as its state is of this rank's slices of the model. For another "
                "rate, decay or betas set engine.optimizer.param_groups on every rank; for another optimizer "
                "engine.destroy(), and initialize(model=..., optimizer=...) anew (of a stage: release(), and build "
                "another)"
            )

    def refuse_without_optimizer(self) -> None:
        if self.update.slices.optimizer is None:
            raise RuntimeError(
                f"{type(self).__name__} has no optimizer: give one to `initialize`, or its configuration a section "
                '"optimizer"; a stage of your own takes one when it is built, or by `attach`'
            )

    def attach(self, optimizer: optim.Optimizer) -> None:
        """Train with this optimizer, over parameters of the model, from now on. For a stage built without one."""
        if self.update.slices.optimizer is not None:
            raise ValueError(f"attach: {type(self).__name__} has an optimizer already")
        update, gradients, across, parted = self.update, self.gradients, self.buffers.across, self.view.parted
        self.detach_all()
        self.build(optimizer)
        # What the stage was told of ranks beside its own, and of micro-batches, is true of this optimizer's steps too.
        self.gradients.across = self.update.across = update.across
        self.update.beyond, self.buffers.across, self.view.parted = update.beyond, across, parted
        self.gradients.divisor = gradients.divisor

    def add_param_group(self, group: dict[str, Any]) -> None:
        """Train more of the model: a group as for `optimizer.add_param_group`. On every rank alike."""
        self.refuse_without_optimizer()
        optimizer = self.update.slices.optimizer
        assert optimizer is not None
        given: list[Any] = [group["params"]] if isinstance(group["params"], Tensor) else list(group["params"])
        tensors = [one[1] if isinstance(one, tuple) else one for one in given]
        for tensor in tensors:
            if tensor not in self.names:
                raise ValueError(
                    f"add_param_group: a tensor of shape {tuple(tensor.shape)} is not of the stage's model"
                )
            if tensor in self.group_of:
                raise ValueError(f"add_param_group: {self.names[tensor]} is in a group of the optimizer already")
        groups, first = optimizer.param_groups, len(optimizer.param_groups)
        self.update.slices.kind.cls.add_param_group(optimizer, {**group, "params": given})  # Muon makes two groups
        added = {p: number for number, one in enumerate(groups[first:], first) for p in one["params"]}
        if apart := self.apart(added):
            del groups[first:]
            raise ValueError(apart)
        for one in groups[first:]:
            one["params"] = []
        self.group_of |= added
        self.thawed |= dict.fromkeys(p for p in tensors if p.requires_grad)
        self.include_thawed()

    def apart(self, number_of: dict[nn.Parameter, int]) -> str:
        """Why not, where a unit of ZeRO-3's would be trained in two groups, as it is updated as one; "" if none is."""
        for p, number in number_of.items():
            if (unit := unit_of(p)) is None:
                continue
            for q in unit.params:
                other = number_of.get(q, unit.group_index)
                if other not in (-1, number):
                    return (
                        f"ZeRO-3 gathers and updates {self.names[p]} together with {self.names[q]}, which is trained "
                        f"in group {other}, not {number}. Add both in one group, or give the optimizer both, frozen, "
                        "in groups of their own before the stage is built"
                    )
        return ""

    def unfrozen(self, p: nn.Parameter) -> None:
        """p.requires_grad was set to True."""
        if p in self.group_of and p not in self.gradients.bucket_of:
            self.thawed[p] = None

    def include_thawed(self) -> list[nn.Parameter]:
        """Make buckets of what is to be trained from now on; returns it."""
        thawed = [p for p in self.names if p in self.thawed and p.requires_grad] if self.thawed else []
        self.thawed = {}
        if thawed:
            same = [p for p in thawed if self.experts.get(p, self.group) is self.group]
            self.later += [f"{self.names[p]} of group {self.group_of[p]}" for p in same]
            self.catch_up()
            fresh = self.lay_out_more(thawed)
            self.buckets += fresh
            self.gradients.watch(fresh, thawed)
            self.update.add({b: self.owned(b) for b in fresh})
        return thawed

    def lay_out_more(self, params: list[nn.Parameter]) -> list[Bucket]:
        """Buckets of parameters that were not trained until now, in the model's order."""
        buckets = lay_out(params, self.group_of, self.group, self.config.reduce_bucket_size, None, self.experts)
        for p in params:
            p.stage = self  # type: ignore[attr-defined]
        return buckets

    def release(self, in_shards: bool = False) -> None:
        """Let go: the model is an ordinary one again, with whole weights, and so is its optimizer, without state.

        in_shards: what ZeRO-3 has in shards stays so, for a stage that takes the model next.
        """
        self.detach_all()
        if not in_shards:
            make_whole(list(self.names))
        for p in [p for p in self.names if isinstance(p, Managed) and stage_of(p) is self]:
            whole = None if unit_of(p) else p.whole_copy()
            del p.stage
            if whole is not None:
                place({p: whole}, nn.Parameter)

    def detach_all(self) -> None:
        """Remove every hook, and give the optimizer back."""
        self.parked.bring()
        self.passes.settle()
        self.catch_up()
        self.gradients.drop()
        for handle in self.handles:
            handle.remove()
        self.handles.clear()
        self.gradients.remove()
        if self.update.slices.optimizer is not None:
            let_go(self.update.slices.optimizer)
            self.update.slices.restore(self.group_of)
