"""What autograd keeps for backward, counted as it comes and goes: the storages of floating-point tensors, each once."""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from refimpl.activation import checkpoint


class Kept:
    """Bytes now, and at most so far. `owned`: tensors that are counted elsewhere, as parameters, at the moment."""

    def __init__(self, owned: Callable[[], Iterable[Tensor]]) -> None:
        self.owned = owned
        self.holders: Counter[int] = Counter()
        self.now = self.peak = 0

    def hold(self, tensor: Tensor, holder: object) -> None:
        """Until `holder` is no more."""
        storage = tensor.untyped_storage()
        elsewhere = {t.untyped_storage().data_ptr() for t in self.owned()}
        if tensor.is_floating_point() and tensor.numel() > 1 and storage.data_ptr() not in elsewhere:
            weakref.finalize(holder, self.release, storage.data_ptr(), storage.nbytes()).atexit = False
            self.now += storage.nbytes() if not self.holders[storage.data_ptr()] else 0
            self.holders[storage.data_ptr()] += 1
            self.peak = max(self.peak, self.now)

    def release(self, place: int, size: int) -> None:
        self.holders[place] -= 1
        self.now -= size if not self.holders[place] else 0

    def pack(self, tensor: Tensor) -> "Holder":
        return Holder(self, tensor)


class Holder:
    def __init__(self, kept: Kept, tensor: Tensor) -> None:
        self.tensor = tensor
        kept.hold(tensor, self)


@contextmanager
def counted(owned: Callable[[], Iterable[Tensor]]) -> Iterator[Kept]:
    """Also what a checkpoint computes again, from then until it is given away."""
    kept = Kept(owned)

    class Slot(checkpoint.Slot):
        def __setattr__(self, name: str, value: Any) -> None:
            held = None if name != "value" or value is None else Holder(kept, value)
            super().__setattr__(name, value)
            super().__setattr__("held", held) if name == "value" else None

    with pytest.MonkeyPatch.context() as patch, saved_tensors_hooks(kept.pack, lambda holder: holder.tensor):
        patch.setattr(checkpoint, "Slot", Slot)
        yield kept
