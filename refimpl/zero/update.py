"""The update: a torch optimizer over the slices that this rank owns, in fp32.

Masters and the optimizer's state are divided by N from ZeRO-1 on: an element-wise optimizer does not notice that its
parameters were cut out of longer ones, which is why any of them may be sharded.

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
from refimpl.zero.agreement.beyond import Beyond
from refimpl.zero.agreement.missed import FROZEN, is_parted, summed, without
from refimpl.zero.agreement.settings import WORDS, are_equal, checksum
from refimpl.zero.config import ZeroConfig
from refimpl.zero.flat import Bucket
from refimpl.zero.optimizer.masters import Masters
from refimpl.zero.optimizer.slices import Slices
from refimpl.zero.optimizer.whole_matrices import WholeMatrices
from refimpl.zero.optimizer.whole_squares import WholeSquares
from refimpl.zero.reduction.owing import Owing

if TYPE_CHECKING:
    from refimpl.zero.agreement.alike import Alike
    from refimpl.zero.reduction.resting import Resting

NORM_BLOCK = 1 << 16  # elements widened to fp64 at a time, so that the copy stays in cache


class Update(Masters):
    """Check, unscale, clip and apply gradients to what this rank owns."""

    resting: "Resting | None" = None  # where gradients wait for the step, if not in memory
    owing: Owing | None = None  # what compression has not sent yet, of what an optimizer averages by itself
    alike: "Alike"  # what ranks must agree on; the stage's

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
        self.beyond: Beyond | None = None  # the ranks with other parts of the model, if there are
        self.across: Group | None = None  # the ranks that own the same and read other data, if there are
        self.gone: set[Bucket] = set()  # what rests elsewhere gets its gradients later, see `OffloadedUpdate`
        self.handed: dict[Bucket, tuple[Tensor, float, set[nn.Parameter]]] = {}
        self.left_alone: set[nn.Parameter] = set()  # what the last step has not changed, as no rank has used it
        self.grad_norm: float | None = None
        self.shown_norm: float | None = None
        self.steps = self.skipped_steps = 0
        super().__init__(Slices(optimizer, config.allow_untested_optimizer))
        for hook, make in {"whole_squares": WholeSquares, "whole_matrices": WholeMatrices}.items():
            if self.slices.kind.layerwise and hasattr(optimizer, hook):
                vars(optimizer)[hook] = make(self.slices)
        self.add(owned)

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
        self.shown_norm = self.grad_norm if finite or not self.scaler else self.shown_norm or 0.0
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

    @torch.no_grad()
    def rewrite(self, write: Callable[[Any], object]) -> None:
        """write(optimizer), which writes to its parameters outside of a step."""
        self.refuse_torn()
        for bucket in self.masters:
            self.adopt(bucket)
        write(self.slices.optimizer)
        for bucket in self.masters:
            self.publish(bucket)

    def note(self, error: Exception) -> None:
        """The optimizer, or a hook of its step, has raised this here: for all ranks to hear of, see `Alike`."""
        self.raised[self.steps] = f"{type(error).__name__}: {error}"

    def catch_up(self) -> bool:
        """Finish an update that is one step late; whether there was one: see `DelayedUpdate`."""
        return False

    def release(self) -> None:
        """A step is over, or was skipped: its gradients are used up."""
        self.slices.release_gradients()

    def waiting(self) -> list[Tensor]:
        """Gradients and weights of an update that is one step late."""
        return []

    def _agree(
        self, gradients: dict[Bucket, Tensor], used: set[nn.Parameter], exact: bool
    ) -> tuple[float, set[nn.Parameter]]:
        """What all ranks must know of the step, in one message: the sum of squares, and what no rank has used.

        And whether they are alike (see `Alike`), ValueError if not. `exact`: see `_squares`.
        """
        members: dict[Group, list[nn.Parameter]] = {self.group: []}
        for bucket in self.owned:
            members.setdefault(bucket.group, []).extend(bucket.params)
        given, frozen = self.alike.words(), self.alike.frozen
        missing = {g: [0 if p in used else FROZEN if p in frozen else 1 for p in has] for g, has in members.items()}
        message = told([0.0, *checksum(given), *missing.pop(self.group)], torch.float64, self.group.device)
        message[0] += self._squares(gradients, exact)
        self.group.all_reduce(message, "sum", tag="norm")
        ranks = self.group.size
        if self.across is not None:  # which has the same gradients, and may have used other parameters
            self.across.all_reduce(message[1:], "sum", tag="norm")
            ranks *= self.across.size
        if self.beyond:
            self.beyond.add_up(message[:1])
        of_experts = [summed(group, words) for group, words in missing.items()]
        found = torch.cat([message, *of_experts])
        self.group.settle()
        squares, *counts = found.tolist()  # the one time that the host waits
        if not are_equal(counts[:WORDS], ranks):
            self.alike.refuse_parted(given)
        self.alike.agreed(given)
        totals, left_alone = iter(counts[WORDS:]), set[nn.Parameter]()
        for group, has in members.items():
            sums, size = {p: next(totals) for p in has}, ranks if group is self.group else group.size
            if clash := {p for p, total in sums.items() if is_parted(total, size)}:
                self.alike.refuse_frozen(clash, group)
            left_alone |= {p for p, total in sums.items() if total and without(total) == size}
        return squares, left_alone

    def _squares(self, gradients: dict[Bucket, Tensor], exact: bool) -> Tensor:
        """This rank's share of the gradients' sum of squares, fp64.

        `exact`: squared in fp64, three times the time. Then nothing overflows, and the norm rounds to the same fp32
        number however the parameters are cut: clipping keeps the stages equal bit for bit.
        """
        total = torch.zeros((), dtype=torch.float64, device=self.group.device)
        known = self.resting.squares if self.resting else {}
        for bucket, gradient in gradients.items():
            everywhere = self.averaged and gradient.numel() == bucket.padded  # then each rank counts a part
            mine = bucket.shard(gradient) if everywhere else gradient
            total += known[bucket] if bucket in known else sum_of_squares(mine, exact)
            if self.beyond and not self.beyond.counted_elsewhere.keys().isdisjoint(bucket.params):
                seen = self.resting.whole(bucket) if self.resting and bucket in known else mine
                total -= sum(sum_of_squares(copy, exact) for copy in self.beyond.copies(bucket, seen))
        return total if self.averaged else total / self.group.size

    def _warn(self, was_finite: bool) -> None:
        """Say that a step is skipped, at the 1st, 2nd, 4th, 8th, ... time. A scale on its way down skips by design."""
        n = self.skipped_steps
        if n & (n - 1) or (self.scaler is not None and self.scaler.can_shrink):
            return
        fine = self.group.all_gather_object(was_finite)
        bad = [rank for rank, is_fine in zip(self.group.ranks, fine, strict=True) if not is_fine]
        begun = "the loss, or what a pipeline's stage gets in its place," if self.beyond else "the loss"
        whose = f"{begun} of rank {', '.join(map(str, bad))} is not finite" if bad else "a gradient is not finite"
        if self.group.rank == 0:
            warnings.warn(
                f"{self.stage}, step {self.steps}: {whose}; the update is skipped on every rank ({n} skipped so far)",
                stacklevel=6,
            )

    def state_dict(self) -> dict[str, Any]:
        scaler = self.scaler.state_dict() if self.scaler else None
        return {**super().state_dict(), "scaler": scaler, "skipped_steps": self.skipped_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.skipped_steps = state["skipped_steps"]
        if self.scaler:
            self.scaler.load_state_dict(state["scaler"])


def sum_of_squares(x: Tensor, exact: bool) -> Tensor:
    """x [n] -> its sum of squares, fp64; squared in fp32 unless `exact`."""
    if x.device.type != "cpu":
        (norm,) = torch._foreach_norm([x], dtype=torch.float64)  # vector_norm would widen all of x before the kernel
        return norm.square()
    total = torch.zeros((), dtype=torch.float64)
    for block in torch.split(x, NORM_BLOCK):
        wide = block.to(torch.float64 if exact else torch.float32)
        total += torch.dot(wide, wide)
    return total
