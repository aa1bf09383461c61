"""The update of what rests elsewhere: part by part it is brought, updated, rounded into the weights, and put back.

Masters are copies, fp32 ones too: 4 bytes a parameter more than without a home, but not where the model is. A step over
a `Disk` reads and writes every part once (AdamW: 12 bytes a parameter each way, divided by N) and keeps in memory no
more than the home's buffers. The arithmetic is that of `Update`, on the same elements: same bits.

Who else has changed a disk's file, or cut it, is seen by its date and length before a step changes anything: every part
is read then, and if one is lost each rank hears of it and has the weights of before the step. A block that the disk
itself does not give back is found when its part comes, and the parts before it are a step ahead then, on other ranks
all of them. What is intact: what was saved. What is lost: that block, and that all others are of one step. Every rank
hears of it at once, and nothing of half a step is computed with, shown or saved; a checkpoint that is loaded ends it. A
second slot for each part, so that the old ones stay until the step is over, would take the disk's space twice and bring
back all but the block; to read every block before every step would cost half as much again, and do no more. So there is
one copy, and the way back is a checkpoint.
DeepSpeed: deepspeed/runtime/zero/stage3.py, `_optimizer_step` over sub-groups.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from refimpl.checkpoint.errors import together
from refimpl.offload.blocks import OffloadError
from refimpl.offload.homes import Disk, away
from refimpl.zero.flat import ALIGN, Bucket, round_up
from refimpl.zero.offload.brought import Brought
from refimpl.zero.offload.parts import Part, size_of
from refimpl.zero.optimizer.by_part import Given
from refimpl.zero.optimizer.kind import Kind
from refimpl.zero.optimizer.masters import master_of
from refimpl.zero.reduction.resting import Resting, RestingOnDisk

HALF = (
    "A step was interrupted in the middle of its update: of the weights and states here some are of before it, some of "
    "after it, and none is used any more. Checkpoints are as they were. Load a checkpoint with its optimizer state; if "
    "the disk fails, start again on another and load it there"
)
BEFORE = (
    "Nothing was updated: the weights are those of before this step. What was lost of their masters and states comes "
    "back with a checkpoint: load one with its optimizer state. Who else changes the files of this process?"
)
NO_PLACE = "What was to be trained has no place to rest: start again, from a checkpoint if there is one"
Handed = tuple[Tensor, float, set[nn.Parameter]]  # mean gradient, its factor, the parameters to leave alone


class OffloadedUpdate(Brought):
    """As `Update`, with masters and optimizer state in the home that the configuration names."""

    def add(self, owned: dict[Bucket, Tensor]) -> None:
        """Bucket by bucket: no more than one has its masters in two places.

        OffloadError on every rank if one's disk has no room; a collective if there is a disk.
        """
        if self.slices.optimizer is not None:
            self.refuse(self.slices.kind)
        if any(bucket.dtype == torch.float64 for bucket in owned) and self.slices.optimizer is not None:
            raise TypeError("fp64 parameters: offloaded masters are fp32; leave optimizer_home (offload_optimizer) out")
        self.owned |= owned
        if self.resting is None and (home := self.config.gradient_home) is not None:
            self.resting = (
                RestingOnDisk(home, self.gone, self.most) if isinstance(home, Disk) else Resting(home, self.gone)
            )
        self.together(lambda: self._deal_out(owned), NO_PLACE)

    @property
    def most(self) -> int:
        """Elements of a part."""
        return round_up(self.config.sub_group_size, ALIGN)

    def refuse(self, kind: Kind) -> None:
        """TypeError if the optimizer cannot be updated from here."""
        if not kind.elementwise:
            raise TypeError(
                f"{kind.name} is not known to be element-wise{kind.fails and f' (tried, {kind.fails})'}: it cannot be "
                "updated part by part; leave optimizer_home (offload_optimizer) out, or take one of refimpl's own "
                "(Lion, Lamb, Muon: by their names in the JSON, or refimpl.optim.muon.Muon)"
            )

    def _deal_out(self, owned: dict[Bucket, Tensor]) -> None:
        gone = self._offloaded(owned)
        for bucket, mine in owned.items():  # in order: a saved state goes by it, whatever rests where
            if bucket in gone:
                self._send_away(bucket, mine)
            else:
                super().add({bucket: mine})

    def _send_away(self, bucket: Bucket, mine: Tensor) -> None:
        """The master of what is owned of a bucket, in parts of `most` elements, to its home."""
        optimizer, most = self.slices.optimizer, self.most
        assert optimizer is not None
        master = self.home.place(master_of(bucket, bucket.now() if mine is bucket.mine else mine))
        self.slices.add({bucket: master}, most)
        widths = [torch.float32, *self.slices.kind.widths(optimizer, bucket.group_index)]
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
        self.look()
        settings = self.slices.settings()  # before the optimizer counts this step in its groups, as some do
        if self.masters.keys() - self.gone:
            with self.all_or_torn():
                super().apply()
        self.on_every_rank(lambda: self.update_parts(self.handed, settings))
        self.slices.keep_settings()
        self.handed = {}

    @torch.no_grad()
    def rewrite(self, write: Callable[[Any], object]) -> None:
        """As in `Update`, part by part."""
        self.check(None)
        self.look()
        self.on_every_rank(lambda: self._rewrite_parts(write, self.slices.settings()))
        self.slices.keep_settings()

    def _rewrite_parts(self, write: Callable[[Any], object], settings: Given) -> None:
        with self.all_or_torn():
            for bucket in [b for b in self.masters if b not in self.gone]:
                self.adopt(bucket)
                self.slices.do_inside(bucket, 0, self.slices.length[bucket], settings, write)
                self.publish(bucket)
            for part in self.home.rounds(self.parts):
                self.follow(part)
                self.slices.do_inside(part.bucket, part.start, part.end, settings, write)
                self.round(part)

    @contextmanager
    def all_or_torn(self) -> Iterator[None]:
        """Unless all inside is done, and is where it rests, what is here is of no one step."""
        try:
            yield
            if self.config.parameter_home is not None:
                self.config.parameter_home.arrived()
        except BaseException:
            self.torn = OffloadError(HALF)
            raise

    def on_every_rank(self, update: Callable[[], object]) -> None:
        """update(); half of it may be done where `together` raises."""
        try:
            self.together(update, HALF)
        except OffloadError:
            self.torn = OffloadError(HALF)
            raise

    def look(self) -> None:
        """OffloadError on every rank if somebody has changed one's file, and some of what rests there is lost."""
        if isinstance(self.home, Disk):
            self.together(self._look, BEFORE)

    def together(self, do: Callable[[], object], then: str) -> None:
        """do(); where a disk fails one rank, every rank raises an OffloadError, which says what then is.

        A collective if there is a disk.
        """
        if not isinstance(self.home, Disk):
            do()
            return
        try:
            together(self.group, do, OffloadError)
        except OffloadError as error:
            raise OffloadError(f"{error}. {then}") from error

    def _look(self) -> None:
        homes = {self.home, self.config.gradient_home}
        touched = [home.file for home in homes if isinstance(home, Disk) and home.file.was_touched()]
        if touched:
            for _ in self._rounds(self.parts, back=False):
                pass
        for file in touched:
            file.trust()

    def check(self, closure: Callable[[], Any] | None) -> None:
        """Whether a step can be taken."""
        if closure is not None:
            raise RuntimeError("an optimizer that asks for the loss itself cannot rest elsewhere: no optimizer_home")
        self.refuse_torn()

    @torch.no_grad()
    def update_parts(self, handed: dict[Bucket, Handed], settings: Given) -> None:
        """Each part in turn: its gradient, the optimizer's step with these settings of its groups, the weights."""
        parts = [part for part in self.parts if part.bucket in handed]
        with self.all_or_torn():
            for part in self._rounds(parts):
                self.follow(part)
                grad, factor, left_alone = handed[part.bucket]
                mine = grad[part.start : part.end] if part.gradient is None else part.gradient
                self.slices.hand_out(part.bucket, mine, factor, left_alone, part.start, part.end)
                self.slices.step_inside(part.bucket, part.start, part.end, settings)
                self.slices.release_gradients(part.bucket)
                self.round(part)

    def _rounds(self, parts: list[Part], back: bool = True) -> Iterator[Part]:
        """As the home's, of each part with its gradient, if that rests on the disk too."""
        for part in parts:
            part.beside = self.resting.run(part.bucket, part.start) if self.resting else None
        try:
            yield from self.home.rounds(parts, back)
        finally:
            for part in parts:
                part.beside = None
