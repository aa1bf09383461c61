"""The update of what rests elsewhere: part by part it is brought, updated, rounded into the weights, and put back.

Masters are copies, fp32 ones too: 4 bytes a parameter more than without a home, but not where the model is. A step over
a `Disk` reads and writes every part once (AdamW: 12 bytes a parameter each way, divided by N) and keeps in memory no
more than the home's buffers. The arithmetic is that of `Update`, on the same elements: same bits.
DeepSpeed: deepspeed/runtime/zero/stage3.py, `_optimizer_step` over sub-groups.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from refimpl.checkpoint.tensors import Later
from refimpl.offload.blocks import OffloadError
from refimpl.offload.homes import Disk, Host, away
from refimpl.zero.flat import ALIGN, Bucket, round_up
from refimpl.zero.parameter import DATA
from refimpl.zero.parts import WEIGHTS, Part, size_of
from refimpl.zero.resting import resting
from refimpl.zero.slices import Slice
from refimpl.zero.update import Update, follow, master_of

Handed = tuple[Tensor, float, set[nn.Parameter]]  # mean gradient, its factor, the parameters to leave alone


class OffloadedUpdate(Update):
    """As `Update`, with masters and optimizer state in the home that the configuration names."""

    home: Host

    def __init__(self, *args: Any) -> None:
        self.parts: list[Part] = []
        self.torn = False  # whether a step was interrupted in its middle
        super().__init__(*args)

    def add(self, owned: dict[Bucket, Tensor]) -> None:
        """Bucket by bucket: no more than one has its masters in two places."""
        if self.slices.optimizer is not None and not self.slices.elementwise:
            raise TypeError(
                f"{self.slices.kind.__name__} is not known to be element-wise: it cannot be updated part by part; "
                "leave optimizer_home (offload_optimizer) out"
            )
        if any(bucket.dtype == torch.float64 for bucket in owned) and self.slices.optimizer is not None:
            raise TypeError("fp64 parameters: offloaded masters are fp32; leave optimizer_home (offload_optimizer) out")
        self.owned |= owned
        most = round_up(self.config.sub_group_size, ALIGN)
        if self.config.gradient_home is not None and self.resting is None:
            self.resting = resting(self.config.gradient_home, self.gone, most)
        gone = self._offloaded(owned)
        for bucket, mine in owned.items():  # in order: a saved state goes by it, whatever rests where
            if bucket in gone:
                self._send_away(bucket, mine, most)
            else:
                super().add({bucket: mine})

    def _send_away(self, bucket: Bucket, mine: Tensor, most: int) -> None:
        """The master of what is owned of a bucket, in parts of `most` elements, to its home."""
        master = self.home.place(master_of(bucket, bucket.now() if mine is bucket.mine else mine))
        self.slices.add({bucket: master}, most)
        widths = [torch.float32, *self.slices.widths(bucket.group_index)]
        gradient = self.config.grad_accum_dtype or bucket.dtype
        read_with_it = gradient if isinstance(self.config.gradient_home, Disk) else None
        parts = []
        for start in range(0, master.numel(), most):
            weights = master[start : start + most]
            parts.append(Part(self.slices, bucket, start, weights, size_of(widths, weights.numel()), read_with_it))
            self.home.admit(parts[-1])
        self.parts += parts
        self.gone.add(bucket)
        self.masters[bucket] = master if all(part.record is None for part in parts) else away(master)

    def _offloaded(self, owned: dict[Bucket, Tensor]) -> set[Bucket]:
        """The buckets to offload: from the first on, until `offload_ratio` of the elements are."""
        limit = self.config.offload_ratio * sum(mine.numel() for mine in owned.values())
        gone, before = set(), 0
        for bucket, mine in owned.items() if self.slices.optimizer else ():
            if before < limit or bucket.shelf is not None:
                gone.add(bucket)
            before += mine.numel()
        return gone

    def prepare(
        self, gradients: dict[Bucket, Tensor], used: set[nn.Parameter], first_finite: Tensor | None = None
    ) -> bool:
        """As in `Update`; nothing is left of a step that was skipped."""
        self.handed = {}
        return super().prepare(gradients, used, first_finite)

    @torch.no_grad()
    def apply(self, closure: Callable[[], Any] | None = None) -> Any:
        self.check(closure)
        if self.masters.keys() - self.gone:
            super().apply()
        self.update_parts(self.handed, self.slices.settings())
        self.handed = {}

    def check(self, closure: Callable[[], Any] | None) -> None:
        """Whether a step can be taken."""
        if closure is not None:
            raise RuntimeError("an optimizer that asks for the loss itself cannot rest elsewhere: no optimizer_home")
        self.refuse_torn()

    def refuse_torn(self) -> None:
        """OffloadError if half of the parts have taken a step that the others have not."""
        if self.torn:
            raise OffloadError(
                "an earlier step was interrupted in the middle of its update: load a checkpoint with its optimizer "
                "state"
            )

    @torch.no_grad()
    def update_parts(self, handed: dict[Bucket, Handed], settings: list[dict[str, Any]]) -> None:
        """Each part in turn: its gradient, the optimizer's step with these settings of its groups, the weights."""
        self.torn = True
        parts = [part for part in self.parts if part.bucket in handed]
        for part in parts:
            part.beside = self.resting.run(part.bucket, part.start) if self.resting else None
        for part in self.home.rounds(parts):
            self.follow(part)
            grad, factor, left_alone = handed[part.bucket]
            mine = grad[part.start : part.end] if part.gradient is None else part.gradient
            self.slices.hand_out(part.bucket, mine, factor, left_alone, part.start, part.end)
            self.slices.step_inside(part.bucket, part.start, part.end, settings)
            self.slices.release_gradients(part.bucket)
            self.round(part)
            part.beside = None
        if self.config.parameter_home is not None:
            self.config.parameter_home.arrived()
        self.torn = False

    def follow(self, part: Part) -> None:
        """As `adopt`, of a part that is here. What rests on a shelf is only looked at if it was written."""
        if part.bucket.shelf is None:
            follow(self.owned[part.bucket][part.start : part.end], part.weights)
        elif part.bucket.shelf.was_written:
            follow(part.bucket.now()[part.start : part.end], part.weights)

    def round(self, part: Part) -> None:
        """The weights, rounded, to where the model has them."""
        shelf = part.bucket.shelf
        if shelf is not None:
            shelf.write(part.start, part.weights)
            shelf.was_written &= part.end < self.owned[part.bucket].numel()  # the last part of it
        else:
            self.owned[part.bucket][part.start : part.end].copy_(part.weights, non_blocking=True)

    def adopt(self, bucket: Bucket) -> None:
        """What is offloaded follows whenever a part of it is looked at."""
        if bucket not in self.gone:
            super().adopt(bucket)

    def publish(self, bucket: Bucket) -> None:
        if bucket not in self.gone:
            super().publish(bucket)

    def weights(self, bucket: Bucket) -> Tensor:
        """As in `Update`; a copy, where they rest on a disk."""
        if bucket not in self.gone:
            return super().weights(bucket)
        found = torch.empty(self.masters[bucket].shape) if self.is_away() else self.masters[bucket]
        for part in self.home.rounds(self._parts(bucket), back=False):
            self.follow(part)
            if self.is_away():
                found[part.start : part.end] = part.weights
        return found

    def is_away(self) -> bool:
        """Whether nothing of it is in memory between steps."""
        return any(part.record is not None for part in self.parts)

    def pieces(self, bucket: Bucket, p: nn.Parameter, key: str, back: bool) -> Iterator[tuple[Tensor, slice]]:
        """What this rank has of p's state `key` ("": its weight), a flat view at a time, and where in its part of p."""
        start, end = self.slices.span(bucket, p)
        for part in self.home.rounds(self._parts(bucket, start, end), back):
            self.follow(part)
            for s in part.members():
                first, last = max(start, s.start), min(end, s.end)
                tensor = self.slices.tensors(s).get(key)
                if first < last and tensor is not None:
                    flat = DATA.__get__(tensor).view(-1)
                    yield flat[first - s.start : last - s.start], slice(first - start, last - start)
            if back and key == WEIGHTS:
                self.round(part)

    def _parts(self, bucket: Bucket, start: float = 0, end: float = math.inf) -> list[Part]:
        """A bucket's parts that have some of the elements start to end, by default all."""
        return [part for part in self.parts if part.bucket is bucket and part.start < end and start < part.end]

    def state_part(self, bucket: Bucket, p: nn.Parameter, key: str) -> Tensor | None:
        """As in `Update`, a copy."""
        start, end = self.slices.span(bucket, p)
        found: Tensor | None = None
        for here, where in self.pieces(bucket, p, key, back=False):
            found = here.new_empty(end - start) if found is None else found
            found[where] = here
        return self.slices.state_part(bucket, p, key) if found is None else found

    def put_state(self, bucket: Bucket, p: nn.Parameter, key: str, value: Tensor) -> None:
        for here, where in self.pieces(bucket, p, key, back=True):
            here.copy_(value[where])

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """As in `Update`. Copies: this rank's whole shard is in memory while they are kept."""
        self.refuse_under_way()
        self.refuse_torn()
        whole = {b: self.weights(b) for b in self.masters}
        state = super().state_dict()
        return state | {"optimizer": self.brought(state["optimizer"]), "masters": list(whole.values())}

    @torch.no_grad()
    def brought(self, state: dict[str, Any]) -> dict[str, Any]:
        self.refuse_under_way()
        self.refuse_torn()
        copies: dict[int, Tensor] = {}
        for part in self.home.rounds(self.parts, back=False) if self.is_away() else ():
            state_of = [self.slices.tensors(s) for s in part.members()]
            copies |= {id(t): t.clone() for tensors in state_of for key, t in tensors.items() if key != WEIGHTS}
        return tree_map_only(Tensor, lambda t: copies.get(id(t), t), state)  # type: ignore[no-any-return]

    @torch.no_grad()
    def restore(self, bucket: Bucket, saved: Tensor) -> None:
        if bucket not in self.gone:
            super().restore(bucket, saved)
        for part in self.home.rounds(self._parts(bucket)):
            part.weights.copy_(saved[part.start : part.end])
            self.round(part)

    @torch.no_grad()
    def keep_state(self, bucket: Bucket) -> None:
        parts = self._parts(bucket)
        given = {s.param: dict(self._given(s)) for part in parts for s in part.members()}
        for part in self.home.rounds(parts):
            for s in part.members():
                for key, values in given[s.param].items():
                    DATA.__get__(self.slices.tensors(s)[key]).copy_(values)

    def replaced(self) -> None:
        self.torn = False

    @torch.no_grad()
    def state_at(self, bucket: Bucket, low: int, high: int) -> tuple[dict[str, Tensor | Later], dict[str, Any]]:
        """As in `Update`, with the weights ("") too; all of it is read when the first of it is asked for."""
        if bucket not in self.gone:
            return super().state_at(bucket, low, high)
        s = next(s for s in self.slices.of[bucket] if low < s.end)
        known = {key: tensor.dtype for key, tensor in self.slices.tensors(s).items()}
        read: dict[str, Tensor] = {}

        def bring(key: str) -> Tensor:
            if key not in read:
                read.update(self._read(bucket, low, high))
            return read.pop(key)

        later = {key: Later(dtype, (high - low,), partial(bring, key)) for key, dtype in known.items()}
        return dict(later), self.slices.state_at(bucket, max(low, s.start), min(high, s.end))[1]

    @torch.no_grad()
    def _read(self, bucket: Bucket, low: int, high: int) -> dict[str, Tensor]:
        """Copies of the weights ("") and states of elements low to high."""
        found: dict[str, Tensor] = {}
        for part in self.home.rounds(self._parts(bucket, low, high), back=False):
            self.follow(part)
            for s in part.members():
                first, last = max(low, s.start), min(high, s.end)
                for key, value in self.slices.tensors(s).items() if first < last else ():
                    flat = DATA.__get__(value).view(-1)[first - s.start : last - s.start]
                    if key not in found:
                        found[key] = flat.new_empty(high - low)
                    found[key][first - low : last - low] = flat
        return found

    def _given(self, s: Slice) -> Iterator[tuple[str, Tensor]]:
        """The state that torch has put there, before its place in a buffer is taken up."""
        return ((key, DATA.__get__(t)) for key, t in self.slices.tensors(s).items() if key != WEIGHTS)
