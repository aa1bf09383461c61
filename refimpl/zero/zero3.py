"""ZeRO-3: each rank keeps the parameters of its own shard only.

Memory per rank, bytes per parameter with AdamW: fp32 4/N params + 4/N grads + 8/N optimizer;
bf16 2/N params + 2/N grads + 12/N optimizer (4/N of them fp32 master weights). The units gathered at the moment come
on top, and buckets in flight.
Traffic per step: 3 Psi (N-1)/N: an all-gather for forward, again for backward, a reduce-scatter of the gradients;
A times that with A micro-batches.
Rajbhandari et al. 2020, arXiv:1910.02054, section 5.3. DeepSpeed: deepspeed/runtime/zero/stage3.py.

A parameter's way: shard -> `Fetch.before_forward` -> `Unit.wait` -> views compute -> `Fetch.after_forward` -> freed
-> `Fetch.need` before backward -> `Zero3.reduce` of its gradient, freed -> `Update.apply` to the shard.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from refimpl.zero.experts import apart
from refimpl.zero.flat import Bucket, lay_out
from refimpl.zero.gather.fetch import Fetch
from refimpl.zero.gather.owners import joined, leaves, owners
from refimpl.zero.gather.path import Path
from refimpl.zero.gather.plus import Plus
from refimpl.zero.gather.saved import StateDicts, copied, named_tensors
from refimpl.zero.gather.unit import Unit, unit_of, whole
from refimpl.zero.gather.units import make_units, resident
from refimpl.zero.loop.start import share
from refimpl.zero.parameter import DATA
from refimpl.zero.reduction.flights import Reduction
from refimpl.zero.reduction.owing import Owing
from refimpl.zero.stage import Stage


class Zero3(Stage):
    reduces_always = True  # there is no memory in which a whole gradient could wait
    manages_all = True
    in_order = False

    def lay_out(self, params: list[nn.Parameter]) -> list[Bucket]:
        """Units, by the module that needs them; small parameters stay whole on every rank, as in ZeRO-2."""
        small = resident(list(self.names), self.config)
        large = [p for p in self.names if p not in small]
        trained = {p: self.group_of[p] for p in params}
        dtype = self.config.dtype
        for unit in {u for p in large if (u := unit_of(p)) is not None and u.state_dicts is not None}:
            unit.state_dicts.remove()  # from now on the stage's own
        whole_modules = leaves(self.model, self.config, on_gpu=self.group.device.type == "cuda")
        whole_modules |= {path for path, _, _ in apart(self.model, self.experts)}
        owner = owners(self.model, whole_modules)
        first = joined(self.model, {p: owner[p] for p in large}, self.config.unit_size)
        units_of = make_units(large, owner, first, self.group_of, trained, self.group, self.config, self.experts)
        kept = lay_out(
            [p for p in params if p in small], trained, self.group, self.config.reduce_bucket_size, dtype,
            self.experts,
        )  # fmt: skip
        share(self.model, {*large, *(p for b in kept for p in b.params)}, self.group, dtype, self.experts)
        self.units = list(dict.fromkeys(u for units in units_of.values() for u in units))
        self.plus = Plus(self.group, self.config, self.parted, scale=self.loss_scale, units=self.units_by_name)
        for unit in self.units:
            self.plus.outfit(unit)
        self.path = Path(self.group, self.config.check_order)
        self.fetch = Fetch(self.model, units_of, self.config, self.path, self.passes.sign, self.complete)
        self.state_dicts = StateDicts(self.model.modules(), self.model)
        self.handles += [self.path, self.fetch, self.state_dicts]
        return [*kept, *(u for u in self.units if u.group_index >= 0)]

    def owned(self, bucket: Bucket) -> Tensor:
        """This rank's shard. -> [S]"""
        return bucket.mine

    def reduce(self, bucket: Bucket, local: Tensor) -> Reduction:
        """Runs inside backward, the moment a bucket is full. local [P] -> mean over ranks [S]; frees the parameters."""
        self.path.visit(bucket, "reduction")
        mine = self.gradients.results.take(bucket.shard_numel, local)  # [S]
        work = bucket.reduce_scatter(mine, local, self.gradients.op)
        if not self.fetch.keeps:
            bucket.free()
        return Reduction(work, mine, memory=mine)

    def complete(self, unit: Unit) -> None:
        self.gradients.complete(unit)

    def before_state_dict(self, model: nn.Module, prefix: str, keep_vars: bool) -> None:
        """It gathers, so all ranks must call it: one that does alone is told, and the others with it."""
        super().before_state_dict(model, prefix, keep_vars)
        if not (keep_vars or self.state_dicts.names_alone) and not all(unit.held for unit in self.units):
            self.path.begin("a state_dict of the model")
            self.state_dicts.is_told = True

    def free_gathered(self) -> None:
        self.fetch.end()

    def collect(self) -> dict[Bucket, Tensor]:
        gradients = super().collect()
        self.path.begin("step")
        return gradients

    def after_update(self, done: bool) -> None:
        super().after_update(done)
        self.plus.after_step(done)

    def rewrite(self, write: Callable[[Any], object]) -> None:
        super().rewrite(write)
        self.plus.forget()

    def units_by_name(self) -> dict[str, Bucket]:
        """By the name of its first parameter."""
        return {self.names[unit.params[0]]: unit for unit in self.units}

    @property
    def owing(self) -> Owing | None:
        return self.plus.errors

    def lay_out_more(self, params: list[nn.Parameter]) -> list[Bucket]:
        """A unit of which anything is trained is reduced and updated as one; the rest of it has no gradient."""
        members = {p: u for p in params if (u := unit_of(p)) is not None}
        units = list(dict.fromkeys(u for u in members.values() if u.group_index < 0))
        if apart := self.apart({p: self.group_of[p] for p in members}):
            raise ValueError(apart)
        for p, unit in members.items():
            unit.group_index = self.group_of[p]
        for unit in units:
            self.plus.thaw(unit)
        return [*super().lay_out_more([p for p in params if unit_of(p) is None]), *units]

    def home(self, p: nn.Parameter) -> Bucket | None:
        return super().home(p) or unit_of(p)

    def weights(self, bucket: Bucket) -> Tensor:
        return super().weights(bucket) if bucket in self.update.masters else bucket.now()

    def put_weights(self, bucket: Bucket, flat: Tensor) -> None:
        super().put_weights(bucket, flat)
        self.plus.forget()

    def full_state_dict(self) -> dict[str, Any] | None:
        """The model's weights by name in rank 0's host memory, None elsewhere. A collective, unit by unit.

        Each tensor has memory of its own: accelerate takes weights that share some for tied, and saves one of them.
        All parameters are there, as in DeepSpeed, also those that a `state_dict` of the model's own leaves out.
        What a module's `get_extra_state` gives may be no tensor, and is a copy too.
        """
        self.catch_up()
        self.update.refuse_torn()
        self.parked.refuse("lp_params")
        copies: dict[Tensor, Tensor] = {}
        for unit in self.units:
            with whole(unit.params):
                if self.speaks():
                    copies |= {p: p.detach().to("cpu", copy=True) for p in unit.params}
        if not self.speaks():
            return None
        with self.state_dicts.pause():  # nothing may be gathered by this rank alone
            return copied(named_tensors(self.model), copies)

    def tensors(self) -> dict[str, list[Tensor]]:
        return super().tensors() | {
            "parameters": [t for u in self.units for t in ([u.mine] if u.shelf is None else u.shelf.tensors())]
            + [DATA.__get__(p) for p in self.names if unit_of(p) is None],
            "gathered": [u.full for u in self.units if not u.is_free],
            **self.plus.tensors(self.units),
        }
