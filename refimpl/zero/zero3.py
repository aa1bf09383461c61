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

from torch import Tensor, nn, optim

from refimpl.comm.group import Group, Work
from refimpl.optim.loss_scale import LossScaler
from refimpl.zero.config import ZeroConfig
from refimpl.zero.fetch import Fetch
from refimpl.zero.flat import Bucket, gather_all, lay_out, trained
from refimpl.zero.gradients import Gradients
from refimpl.zero.order import RollCall
from refimpl.zero.stage import Stage, share_start
from refimpl.zero.unit import Unit, leaves, make_units, owners, resident, whole
from refimpl.zero.update import Update


class Zero3(Stage):
    def __init__(
        self,
        model: nn.Module,
        optimizer: optim.Optimizer,
        group: Group,
        config: ZeroConfig | None = None,
        scaler: LossScaler | None = None,
    ) -> None:
        super().__init__(model, group, config or ZeroConfig())
        group_of, params = trained(optimizer, model), list(model.parameters())
        small = resident(params, self.config)  # whole on every rank, handled as ZeRO-2 does
        large = [p for p in params if p not in small]
        units_of = make_units(large, owners(model, leaves(model, self.config)), group_of, group)
        kept = lay_out(model, group_of, group, self.config.reduce_bucket_size, small.__contains__)
        share_start(model, kept, group, skip=set(large))
        self.units = [u for units in units_of.values() for u in units]
        self.buckets = [*kept, *(u for u in self.units if u.group_index >= 0)]
        self.kept = kept
        self.roll_call = RollCall(group, self.config.check_order)
        self.fetch = Fetch(model, units_of, self.config, self.roll_call)
        self.gradients = Gradients(self.buckets, self.reduce, group, self.config, self.names, in_order=False)
        owned = {b: b.mine if isinstance(b, Unit) else b.shard(b.full) for b in self.buckets}  # [S]
        self.update = Update(optimizer, owned, group, self.config, scaler)

    def backward(self, loss: Tensor, sync: bool = True) -> None:
        """As `Stage.backward`, but always reduces: there is no memory in which a whole gradient could wait."""
        self.fetch.in_backward = True
        super().backward(loss, sync=True)
        self.fetch.end()

    def reduce(self, bucket: Bucket, local: Tensor) -> tuple[Work, Tensor]:
        """Runs inside backward, the moment a bucket is full. local [P] -> mean over ranks [S]; frees the parameters."""
        mine = self.gradients.take(bucket.padded // self.group.size, local)  # [S]
        work = self.group.reduce_scatter(mine, local, self.gradients.op, async_op=True, tag="gradients")
        if isinstance(bucket, Unit):
            bucket.free()
        return self.roll_call.note(f"reduces {bucket.name}", work), mine

    def gather(self) -> None:
        """Only what stays whole: the units are gathered when a module needs them, see `Fetch.need`."""
        gather_all(self.kept, self.config.allgather_bucket_size)

    def step(self) -> bool:
        """Update this rank's shard."""
        self.roll_call("step").wait()
        self.fetch.end()
        done = self.update.apply(self.gradients.finish())
        self.gradients.clear()
        if done:
            self.gather()
        return done

    @property
    def gathering_modules(self) -> int:
        return sum(bool(units) for units in self.fetch.units_of.values())

    def full_state_dict(self) -> dict[str, Tensor] | None:
        """The model's weights by name in rank 0's host memory, None elsewhere. A collective, unit by unit."""
        copies: dict[Tensor, Tensor] = {}
        for unit in self.units:
            with whole(unit.params):
                if self.group.rank == 0:
                    copies |= {p: p.detach().to("cpu", copy=True) for p in unit.params}
        if self.group.rank != 0:
            return None
        state = self.model.state_dict(keep_vars=True)
        return {name: copies[t] if t in copies else t.detach().cpu() for name, t in state.items()}

    def tensors(self) -> dict[str, list[Tensor]]:
        held = {p for u in self.units for p in u.params}
        return super().tensors() | {
            "parameters": [u.mine for u in self.units] + [p.data for p in self.model.parameters() if p not in held],
            "gathered": [u.full for u in self.units if not u.is_free],
        }
