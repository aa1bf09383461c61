"""The update: a torch optimizer over the slices that this rank owns, in fp32.

Owned slices in low precision get an fp32 master copy (Micikevicius et al. 2018, arXiv:1710.03740): 4 bytes a parameter,
plus the optimizer's own state (AdamW: 8), all divided by N from ZeRO-1 on. An element-wise optimizer does not notice
that its parameters were cut out of longer ones, which is why any of them may be sharded.

What torch does by the way is done here too: a parameter that no rank has used is left alone (no decay, no moments, no
count of steps), and a weight that was written from outside since the last step is what the update starts from.
DeepSpeed: deepspeed/runtime/zero/stage_1_and_2.py, `step` and `unscale_and_clip_grads`.
"""

import math
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn, optim

from refimpl.comm.group import Group
from refimpl.comm.streams import told
from refimpl.optim.loss_scale import LossScaler
from refimpl.zero.beyond import Beyond
from refimpl.zero.config import ZeroConfig
from refimpl.zero.flat import Bucket
from refimpl.zero.missed import FROZEN, parted, without
from refimpl.zero.owing import Owing
from refimpl.zero.settings import WORDS, are_equal, checksum
from refimpl.zero.slices import Slices
from refimpl.zero.whole_squares import WholeSquares

if TYPE_CHECKING:
    from refimpl.checkpoint.tensors import Later
    from refimpl.zero.alike import Alike
    from refimpl.zero.resting import Resting

NORM_BLOCK = 1 << 16  # elements widened to fp64 at a time, so that the copy stays in cache


class Update:
    """Check, unscale, clip and apply gradients to what this rank owns."""

    resting: "Resting | None" = None  # where gradients wait for the step, if not in memory
    owing: Owing | None = None  # what compression has not sent yet, of what an optimizer averages by itself
    alike: "Alike"  # what ranks must agree on; the stage's
    torn: RuntimeError | None = None  # why what is here is of no one step: half a load, or half an update

    def __init__(
        self,
        optimizer: optim.Optimizer | None,
        owned: dict[Bucket, Tensor],
        group: Group,
        config: ZeroConfig,
        scaler: LossScaler | None,
        stage: str,
    ) -> None:
        """`owned`: this rank's slice ([S], or [P] where every rank has all) of each bucket's parameters.

        `stage`: the stage's name, for messages. See `Slices` for what it raises about the optimizer.
        """
        self.group, self.config, self.scaler, self.stage = group, config, scaler, stage
        self.home = config.optimizer_home
        self.beyond: Beyond | None = None  # the ranks with other parts of the model, if there are
        self.across: Group | None = None  # the ranks that own the same and read other data, if there are
        self.gone: set[Bucket] = set()  # what rests elsewhere gets its gradients later, see `OffloadedUpdate`
        self.handed: dict[Bucket, tuple[Tensor, float, set[nn.Parameter]]] = {}
        self.owned: dict[Bucket, Tensor] = {}
        self.masters: dict[Bucket, Tensor] = {}  # fp32; the owned slice itself where that is fp32
        self.left_alone: set[nn.Parameter] = set()  # what the last step has not changed, as no rank has used it
        self.grad_norm: float | None = None
        self.steps = self.skipped_steps = 0
        self.slices = Slices(optimizer, config.allow_untested_optimizer)
        if self.slices.layerwise:
            vars(optimizer)["whole_squares"] = WholeSquares(self.slices)
        self.add(owned)

    def add(self, owned: dict[Bucket, Tensor]) -> None:
        """Update these too."""
        self.owned |= owned
        fresh = {bucket: master_of(bucket, mine) for bucket, mine in owned.items()} if self.slices.optimizer else {}
        self.masters |= fresh
        self.slices.add(fresh)

    @property
    def averaged(self) -> bool:
        """Whether gradients are the mean over ranks; if not each rank's are its own."""
        return True

    def replicated(self) -> bool:
        """Whether every rank updates everything, and so sees all gradients."""
        return all(mine.numel() == bucket.padded for bucket, mine in self.owned.items())

    @torch.no_grad()
    def prepare(
        self, gradients: dict[Bucket, Tensor], used: set[nn.Parameter], first_finite: Tensor | None = None
    ) -> bool:
        """Hand the mean gradients, unscaled and clipped, to the optimizer's parameters; False if not all are finite.

        `used`: the parameters that this rank had a gradient of. Clipping is folded into the unscaling. The host waits
        for the device once, in `_agree`. `first_finite`: see `Gradients`; for the warning.
        """
        self.steps += 1
        scale = self.scaler.scale if self.scaler else 1.0
        squares, left_alone = self._agree(gradients, used, exact=self.config.gradient_clipping > 0)
        if not math.isfinite(squares):  # or are the squares too large for fp32?
            squares, _ = self._agree(gradients, used, exact=True)
        finite, self.left_alone = math.isfinite(squares), left_alone
        self.grad_norm = math.sqrt(squares) / scale
        if not finite:
            self.skipped_steps += 1
            self._warn(first_finite is None or bool(first_finite))
        if self.scaler:
            self.scaler.update(overflow=not finite)
        limit = self.config.gradient_clipping
        factor = (min(1.0, limit / (self.grad_norm + 1e-6)) if limit and self.grad_norm else 1.0) / scale
        for bucket, grad in gradients.items():
            if bucket in self.gone:
                self.handed[bucket] = (grad, factor, left_alone)
            else:
                self.slices.hand_out(bucket, grad, factor if finite else 1.0, left_alone, 0, grad.numel())
        return finite

    @torch.no_grad()
    def apply(self, closure: Callable[[], Any] | None = None) -> Any:
        """The optimizer's own step on the gradients that `prepare` handed out; returns what that returns."""
        self.refuse_torn()
        for bucket in self.masters:
            self.adopt(bucket)
        result = self.slices.step(closure)
        self.slices.release_gradients()
        for bucket in self.masters:
            self.publish(bucket)
        return result

    def catch_up(self) -> bool:
        """Finish an update that is one step late; whether there was one: see `DelayedUpdate`."""
        return False

    def release(self) -> None:
        """A step is over, or was skipped: its gradients are used up."""
        self.slices.release_gradients()

    def waiting(self) -> list[Tensor]:
        """Gradients and weights of an update that is one step late."""
        return []

    def weights(self, bucket: Bucket) -> Tensor:
        """The most exact weights that this rank has of a bucket: its masters, or its own slice. -> [P] or [S]"""
        self.adopt(bucket)
        return self.masters.get(bucket, self.owned[bucket])

    def adopt(self, bucket: Bucket) -> None:
        """The masters follow what was written to the weights from outside."""
        wider = bucket in self.masters and self.masters[bucket].dtype != self.owned[bucket].dtype
        if wider and self.owned[bucket].numel():
            follow(self.owned[bucket], self.masters[bucket])

    def publish(self, bucket: Bucket) -> None:
        """Round the fp32 master into the owned slice (nothing to do when they are the same memory)."""
        if self.owned[bucket].dtype != self.masters[bucket].dtype:
            self.owned[bucket].copy_(self.masters[bucket])

    def _agree(
        self, gradients: dict[Bucket, Tensor], used: set[nn.Parameter], exact: bool
    ) -> tuple[float, set[nn.Parameter]]:
        """What all ranks must know of the step, in one message: the sum of squares, and what no rank has used.

        And whether they are alike (see `Alike`), ValueError if not.

        `exact`: squared in fp64, three times the time. Then nothing overflows, and the norm rounds to the same fp32
        number however the parameters are cut: clipping keeps the stages equal bit for bit.
        """
        members: dict[Group, list[nn.Parameter]] = {self.group: []}
        for bucket in self.owned:
            members.setdefault(bucket.group, []).extend(bucket.params)
        params = members.pop(self.group)
        given, frozen = self.alike.words(), self.alike.frozen
        unused = [0 if p in used else FROZEN if p in frozen else 1 for p in params]
        message = told([0.0, *checksum(given), *unused], torch.float64, self.group.device)
        known = self.resting.squares if self.resting else {}
        for bucket, gradient in gradients.items():
            everywhere = self.averaged and gradient.numel() == bucket.padded  # then each rank counts a part
            mine = bucket.shard(gradient) if everywhere else gradient
            message[0] += known[bucket] if bucket in known else sum_of_squares(mine, exact)
            if self.beyond and not self.beyond.counted_elsewhere.keys().isdisjoint(bucket.params):
                seen = self.resting.whole(bucket) if self.resting and bucket in known else mine
                message[0] -= sum(sum_of_squares(copy, exact) for copy in self.beyond.copies(bucket, seen))
        if not self.averaged:
            message[0] /= self.group.size
        self.group.all_reduce(message, "sum", tag="norm")
        self.group.settle()
        ranks = self.group.size
        if self.across is not None:  # which has the same gradients, and may have used other parameters
            self.across.all_reduce(message[1:], "sum", tag="norm")
            self.across.settle()
            ranks *= self.across.size
        squares, *counts = message.tolist()
        sums, missing = counts[:WORDS], counts[WORDS:]
        if not are_equal(sums, ranks):
            self.alike.refuse_parted(given)
        self.alike.agreed()
        if clash := parted(missing, ranks):
            self.alike.refuse_frozen({params[i] for i in clash}, self.group)
        squares = self.beyond.all_squares(squares) if self.beyond else squares
        left_alone = {p for p, total in zip(params, missing, strict=True) if total and without(total) == ranks}
        for group, experts in members.items():
            left_alone |= self._unused_experts(group, experts, used)
        return squares, left_alone

    def _unused_experts(self, group: Group, params: list[nn.Parameter], used: set[nn.Parameter]) -> set[nn.Parameter]:
        """Those of `params` that no rank of `group`, which are those that have them, has used. A collective."""
        frozen = self.alike.frozen
        unused = [0 if p in used else FROZEN if p in frozen else 1 for p in params]
        message = told(unused, torch.float32, group.device)
        group.all_reduce(message, "sum", tag="norm")
        group.settle()
        missing = message.tolist()
        if clash := parted(missing, group.size):
            self.alike.refuse_frozen({params[i] for i in clash}, group)
        return {p for p, total in zip(params, missing, strict=True) if total and without(total) == group.size}

    def _warn(self, was_finite: bool) -> None:
        """Say that a step is skipped, at the 1st, 2nd, 4th, 8th, ... time. A scale on its way down skips by design."""
        n = self.skipped_steps
        if n & (n - 1) or (self.scaler is not None and self.scaler.can_shrink):
            return
        bad = [rank for rank, fine in enumerate(self.group.all_gather_object(was_finite)) if not fine]
        whose = f"the loss of rank {', '.join(map(str, bad))} is not finite" if bad else "a gradient is not finite"
        if self.group.rank == 0:
            warnings.warn(
                f"{self.stage}, step {self.steps}: {whose}; the update is skipped on every rank ({n} skipped so far)",
                stacklevel=6,
            )

    def state_part(self, bucket: Bucket, p: nn.Parameter, key: str) -> Tensor | None:
        """This rank's part of p's state `key`, flat; None if the optimizer has none (yet)."""
        return self.slices.state_part(bucket, p, key)

    def put_state(self, bucket: Bucket, p: nn.Parameter, key: str, value: Tensor) -> None:
        """Replace this rank's part of p's state `key`, or of its weight (key "")."""
        part = bucket.part(self.weights(bucket), p) if not key else self.state_part(bucket, p, key)
        assert part is not None
        part.copy_(value)
        if not key:
            self.publish(bucket)  # or the next step would take the weight for one that was written over the master

    def state_at(self, bucket: Bucket, low: int, high: int) -> tuple[dict[str, "Tensor | Later"], dict[str, Any]]:
        """The state of elements low to high of what is owned: what has an element for each, flat, and the rest."""
        cut, rest = self.slices.state_at(bucket, low, high)
        return dict(cut), rest

    def brought(self, state: dict[str, Any]) -> dict[str, Any]:
        """An optimizer's `state_dict`, with copies of what rests elsewhere."""
        return state

    def refuse_torn(self) -> None:
        """RuntimeError if weights and state are not of one step."""
        if self.torn is not None:
            raise self.torn.with_traceback(None)

    def refuse_under_way(self) -> None:
        """Nothing to refuse: see `DelayedUpdate`."""

    def keep_state(self, bucket: Bucket) -> None:
        """The optimizer was given new state: let it rest where it belongs."""

    def replaced(self) -> None:
        """A whole saved state has taken the place of what was here."""
        self.torn = None

    def is_away(self) -> bool:
        """Whether nothing of it is in memory between steps."""
        return False

    def state(self) -> list[Tensor]:
        """The optimizer's own tensors (AdamW: two [S] a bucket, and a step count)."""
        return self.slices.state()

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        for bucket in self.masters:
            self.adopt(bucket)
        return {
            "optimizer": self.slices.state_dict(),
            "masters": list(self.masters.values()),
            "scaler": self.scaler.state_dict() if self.scaler else None,
            "skipped_steps": self.skipped_steps,
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.slices.load_state_dict(state["optimizer"])
        self.skipped_steps = state["skipped_steps"]
        if self.scaler:
            self.scaler.load_state_dict(state["scaler"])
        for bucket, saved in zip(self.masters, state["masters"], strict=True):
            self.keep_state(bucket)
            self.restore(bucket, saved)
        self.replaced()

    def restore(self, bucket: Bucket, saved: Tensor) -> None:
        """Take over masters that were saved."""
        self.masters[bucket].copy_(saved)
        self.publish(bucket)


def sum_of_squares(x: Tensor, exact: bool) -> Tensor:
    """x [n] -> its sum of squares, fp64; squared in fp32 unless `exact`."""
    if x.device.type != "cpu":
        norm: Tensor = torch.linalg.vector_norm(x, dtype=torch.float64)  # widened in the kernel
        return norm.square()
    total = torch.zeros((), dtype=torch.float64)
    for block in torch.split(x, NORM_BLOCK):
        wide = block.to(torch.float64 if exact else torch.float32)
        total += torch.dot(wide, wide)
    return total


def follow(weights: Tensor, master: Tensor) -> None:
    """A weight that no longer is its rounded master was written from outside: the master follows, where it is."""
    for there, wide in zip(torch.split(weights, NORM_BLOCK), torch.split(master, NORM_BLOCK), strict=True):
        weight, rounded = there.to(wide.device), wide.to(there.dtype)
        # Eight bytes at a time, four times as fast: slices are multiples of 64 elements.
        if wide.device.type != "cpu" or not torch.equal(rounded.view(torch.int64), weight.view(torch.int64)):
            wide.copy_(torch.where(rounded == weight, wide, weight.float()))


def master_of(bucket: Bucket, mine: Tensor) -> Tensor:
    """The fp32 master of an owned slice: the slice itself if it is as exact, or a copy, with what was rounded off."""
    if mine.dtype in (torch.float32, torch.float64):
        return mine
    unrounded, bucket.unrounded = bucket.unrounded, None
    if unrounded is None:
        return mine.float()
    return (unrounded if unrounded.numel() == mine.numel() else bucket.shard(unrounded)).float().clone()
