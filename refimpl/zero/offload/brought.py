"""What rests elsewhere, looked at and changed: part by part it is brought, copied or replaced, and put back.

Between two steps nothing of it need be in memory. Whoever asks for a weight, a state or all of a rank's shard gets a
copy, and reads each part once. A part that is here first follows its weights: `follow` of
refimpl/zero/optimizer/masters.py.
DeepSpeed: deepspeed/runtime/zero/stage3.py, `get_local_fp32_param`, `set_local_hp_param`.
"""

import math
from collections.abc import Collection, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from refimpl.checkpoint.tensors import Later
from refimpl.offload.homes import Host
from refimpl.zero.flat import Bucket
from refimpl.zero.offload.parts import WEIGHTS, Part
from refimpl.zero.optimizer.masters import follow
from refimpl.zero.parameter import DATA
from refimpl.zero.update import Update


class Brought(Update):
    """A part of `OffloadedUpdate`: what is asked for between two steps."""

    def __init__(self, *args: Any) -> None:
        self.parts: list[Part] = []
        super().__init__(*args)

    @property
    def home(self) -> Host:
        """Where it rests."""
        assert self.config.optimizer_home is not None
        return self.config.optimizer_home

    def follow(self, part: Part) -> None:
        """As `adopt`, of a part that is here. What rests on a shelf is only looked at if it was written."""
        if part.bucket.shelf is None:
            follow(self.owned[part.bucket][part.start : part.end], part.weights)
        elif part.bucket.shelf.was_written:
            follow(part.bucket.now()[part.start : part.end], part.weights)

    def round(self, part: Part) -> None:
        """The weights, rounded, to where the model has them.

        A disk's buffer is filled anew behind this, and is not pinned: the host waits for the copy. Where it
        does not, torch would send fp32 and round on the device, from a buffer there (`copy_kernel_cuda`): round here.
        """
        shelf = part.bucket.shelf
        if shelf is not None:
            shelf.write(part.start, part.weights)
            shelf.was_written &= part.end < self.owned[part.bucket].numel()  # the last part of it
        else:
            there, weights = self.owned[part.bucket][part.start : part.end], part.weights
            if part.record is None and not there.is_cpu and there.dtype != weights.dtype:
                weights = torch.empty_like(weights, dtype=there.dtype, pin_memory=there.is_cuda).copy_(weights)
            there.copy_(weights, non_blocking=part.record is None)

    def is_away(self) -> bool:
        """Whether nothing of it is in memory between steps."""
        return any(part.record is not None for part in self.parts)

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
        if self.is_away():
            return self._copies(bucket, 0, self.masters[bucket].numel(), {WEIGHTS}).get(WEIGHTS, self.masters[bucket])
        for part in self._parts(bucket):
            self.follow(part)
        return self.masters[bucket]

    def state_part(self, bucket: Bucket, p: nn.Parameter, key: str) -> Tensor | None:
        """As in `Update`; of what rests elsewhere a copy."""
        found = self._copies(bucket, *self.slices.span(bucket, p), {key})
        return found[key] if key in found else super().state_part(bucket, p, key)

    def put_state(self, bucket: Bucket, p: nn.Parameter, key: str, value: Tensor) -> None:
        if bucket not in self.gone:
            super().put_state(bucket, p, key, value)
            return
        start, end = self.slices.span(bucket, p)
        for part in self.home.rounds(self._parts(bucket, start, end)):
            for _, here, where in self._inside(part, start, end, {key}):
                here.copy_(value[where])
            if key == WEIGHTS:
                self.round(part)

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
        # The state that torch has put there, before its place in a buffer is taken up.
        given = {
            s.param: {key: DATA.__get__(t) for key, t in self.slices.tensors(s).items() if key != WEIGHTS}
            for part in parts
            for s in part.members()
        }
        for part in self.home.rounds(parts):
            for s in part.members():
                for key, values in given[s.param].items():
                    DATA.__get__(self.slices.tensors(s)[key]).copy_(values)

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
                read.update(self._copies(bucket, low, high, known))
            return read.pop(key)

        later = {key: Later(dtype, (high - low,), partial(bring, key)) for key, dtype in known.items()}
        return dict(later), super().state_at(bucket, max(low, s.start), min(high, s.end))[1]

    @torch.no_grad()
    def _copies(self, bucket: Bucket, low: int, high: int, keys: Collection[str]) -> dict[str, Tensor]:
        """The states `keys` ("": the weights) of elements low to high, of what rests elsewhere."""
        found: dict[str, Tensor] = {}
        for part in self.home.rounds(self._parts(bucket, low, high), back=False):
            for key, here, where in self._inside(part, low, high, keys):
                if key not in found:
                    found[key] = here.new_empty(high - low)
                found[key][where] = here
        return found

    def _inside(self, part: Part, low: int, high: int, keys: Collection[str]) -> Iterator[tuple[str, Tensor, slice]]:
        """Of a part that is here: key, a flat view, and where in low to high it lies."""
        self.follow(part)
        for s in part.members():
            first, last = max(low, s.start), min(high, s.end)
            for key, value in self.slices.tensors(s).items() if first < last else ():
                if key in keys:
                    flat = DATA.__get__(value).view(-1)
                    yield key, flat[first - s.start : last - s.start], slice(first - low, last - low)

    def _parts(self, bucket: Bucket, start: float = 0, end: float = math.inf) -> list[Part]:
        """A bucket's parts that have some of the elements start to end, by default all."""
        return [part for part in self.parts if part.bucket is bucket and part.start < end and start < part.end]
