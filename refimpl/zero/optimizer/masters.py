"""What a rank keeps of its own between two steps: fp32 weights, the masters, and the optimizer's state.

    the owned slice is in    its master                                   bytes a parameter that it owns
    fp32, fp64               the slice itself                             0
    bf16, fp16               a copy, with what was rounded off            4 (Micikevicius et al. 2018, arXiv:1710.03740)

The optimizer's own state comes on top (AdamW: 8). Whoever asks between two steps finds what the next one starts from: a
weight that was written from outside is in its master too.
"""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from refimpl.zero.flat import Bucket
from refimpl.zero.optimizer.slices import Slices

if TYPE_CHECKING:
    from refimpl.checkpoint.tensors import Later

BLOCK = 1 << 16  # elements that a CPU looks at in one go, so that the copy stays in cache
MOVED = 1 << 22  # elements that come from a device, or are looked at there, at a time: each time is a wait, or launches


class Masters:
    """Of some buckets. Nothing of it is a collective."""

    torn: RuntimeError | None = None  # why what is here is of no one step: half a load, or half an update

    def __init__(self, slices: Slices) -> None:
        self.slices = slices
        self.raised: dict[int, str] = {}  # the steps in which the optimizer, or a hook of its step, raised here
        self.owned: dict[Bucket, Tensor] = {}  # of the model's weights: [S], or [P] where every rank has all
        self.masters: dict[Bucket, Tensor] = {}

    def add(self, owned: dict[Bucket, Tensor]) -> None:
        """Update these too."""
        self.owned |= owned
        fresh = {bucket: master_of(bucket, mine) for bucket, mine in owned.items()} if self.slices.optimizer else {}
        self.masters |= fresh
        self.slices.add(fresh)

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
        """The state of elements low to high of what is owned: what has one for each of them, flat, and the rest."""
        slices, optimizer = self.slices, self.slices.optimizer
        s = next((s for s in slices.of.get(bucket, []) if s.start <= low and high <= s.end), None)
        if s is None or optimizer is None:
            return {}, {}
        cut = {k: v.reshape(-1)[low - s.start : high - s.start] for k, v in slices.tensors(s).items() if k}
        return dict(cut), {k: v for k, v in optimizer.state.get(s.param, {}).items() if k not in cut}

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
        self.torn, self.raised = None, {}

    def is_away(self) -> bool:
        """Whether nothing of it is in memory between steps."""
        return False

    def state(self) -> list[Tensor]:
        """The optimizer's own tensors (AdamW: two [S] a bucket, and a step count)."""
        return self.slices.state()

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """References, not copies."""
        for bucket in self.masters:
            self.adopt(bucket)
        return {"optimizer": self.slices.state_dict(), "masters": list(self.masters.values())}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of `state_dict`, over the same buckets. ValueError for others, before anything is changed."""
        self.refuse_others(state["masters"])
        self.slices.load_state_dict(state["optimizer"])
        self.take(state["masters"])

    def refuse_others(self, saved: Sequence[Tensor]) -> None:
        """ValueError for masters that were saved from other buckets."""
        there, here = ([m.numel() for m in those] for those in (saved, self.masters.values()))
        if there != here:
            raise ValueError(
                f"this state was saved from other buckets ({len(there)} of {sum(there)} elements, here {len(here)} "
                f"of {sum(here)}): the model, reduce_bucket_size or unit_size differ; a checkpoint of the engine goes "
                "from any to any"
            )

    def take(self, saved: Sequence[Tensor] | None) -> None:
        """The optimizer was given a whole new state; it goes where it rests, and these masters, if there are any."""
        for i, bucket in enumerate(self.masters):
            self.keep_state(bucket)
            if saved is not None:
                self.restore(bucket, saved[i])
        self.replaced()

    def restore(self, bucket: Bucket, saved: Tensor) -> None:
        """Take over masters that were saved."""
        self.masters[bucket].copy_(saved)
        self.publish(bucket)

    def rounds(self) -> bool:
        """Whether a weight is narrower than what it is rounded from, and says less."""
        return any(master.dtype != self.owned[bucket].dtype for bucket, master in self.masters.items())


def follow(weights: Tensor, master: Tensor) -> None:
    """A weight that no longer is its rounded master was written from outside: the master follows, where it is."""
    on_cpu = master.device.type == "cpu"
    for there, mine in zip(torch.split(weights, MOVED), torch.split(master, MOVED), strict=True):
        cut = partial(torch.split, split_size_or_sections=BLOCK if on_cpu else MOVED)
        for weight, wide in zip(cut(there.to(mine.device)), cut(mine), strict=True):
            rounded = wide.to(weight.dtype)
            # Eight bytes at a time, four times as fast: slices are multiples of 64 elements.
            if not on_cpu or not torch.equal(rounded.view(torch.int64), weight.view(torch.int64)):
                torch.where(rounded == weight, wide, weight, out=wide)  # one pass: on a GPU this is each step's


def master_of(bucket: Bucket, mine: Tensor) -> Tensor:
    """The fp32 master of an owned slice: the slice itself if it is as exact, or a copy, with what was rounded off."""
    if mine.dtype in (torch.float32, torch.float64):
        return mine
    unrounded, bucket.unrounded = bucket.unrounded, None
    if unrounded is None:
        return mine.float()
    return (unrounded if unrounded.numel() == mine.numel() else bucket.shard(unrounded)).float().clone()
