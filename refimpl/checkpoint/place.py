"""Which elements of a parameter lie in which rank's file.

A parameter begins at element `at` of a flat buffer of `of` elements, and of N ranks each has 1/N of that buffer:

    rank r's file holds elements [r S - at, (r + 1) S - at) of the parameter, flat, as far as it has them;  S = of / N

That is all a reader must know. Any number of ranks with any other buffers find their elements by the same line, so a
checkpoint belongs to no world size: resharding N to M is reading (`pieces`). Padding is nobody's and is not saved.

Where ranks share the layers too, the N are those that have the same ones (`ranks`). A parameter that tensor ranks have
split has `parts`, each a place with its own N ranks and with the `spans` of the whole, along `dim`, that it is. Read
whole and cut anew, it fits any number of tensor ranks.
DeepSpeed writes whole parameters anew for this, by a command of its own (deepspeed/checkpoint/ds_to_universal.py;
arXiv:2406.18820); torch's distributed checkpoint keeps a list of pieces a parameter.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor


def dtype_named(name: str) -> torch.dtype:
    """torch's dtype of this name, and nothing else of torch's. ValueError."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"torch.{name} is no dtype")
    return dtype


@dataclass(frozen=True)
class Place:
    """One parameter of a checkpoint that N ranks wrote. `dtype`: the model's; the saved weight may be wider."""

    shape: tuple[int, ...]
    dtype: str
    at: int
    of: int
    group: int | None  # of the optimizer; None for what it does not have
    trained: bool  # or frozen
    ranks: tuple[int, ...] = ()  # whose files, in order; (): all ranks'
    dim: int | None = None  # of a part: along which it was cut, and what of the whole it is; None if nobody knows
    spans: tuple[tuple[int, int], ...] = ()
    parts: tuple["Place", ...] = ()

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def is_floating(self) -> bool:
        return dtype_named(self.dtype).is_floating_point

    def held(self, rank: int, ranks: int) -> tuple[int, int]:
        """The elements [begin, end) that a rank's file holds; begin = end when that is none."""
        size = self.of // ranks
        begin, end = rank * size - self.at, (rank + 1) * size - self.at
        return min(max(begin, 0), self.numel), min(max(end, 0), self.numel)

    def first(self, ranks: int) -> int:
        """The rank whose file holds element 0, and what is not cut: the optimizer's count of steps."""
        return min(self.at // max(1, self.of // ranks), ranks - 1)  # nothing but empty parameters: rank 0's

    def pieces(self, begin: int, end: int, ranks: int) -> Iterator[tuple[int, int, int]]:
        """Elements [begin, end) as they lie in the files: (rank, begin, end) with what that rank's file has of them."""
        size = self.of // ranks
        while begin < end:
            rank = (self.at + begin) // size
            until = min(end, self.held(rank, ranks)[1])
            yield rank, begin, until
            begin = until

    def as_json(self) -> dict[str, Any]:
        said = {key: value for key, value in vars(self).items() if value != () and key not in ("dim", "parts")}
        said |= {"shape": list(self.shape)}
        if self.parts:
            said["parts"] = [part.as_json() for part in self.parts]
        return said | ({"dim": self.dim} if self.spans else {})

    @staticmethod
    def of_json(about: dict[str, Any]) -> "Place":
        parts = tuple(Place.of_json(part) for part in about.get("parts", ()))
        spans = tuple((begin, end) for begin, end in about.get("spans", ()))
        lists = {"shape": tuple(about["shape"]), "ranks": tuple(about.get("ranks", ())), "spans": spans, "parts": parts}
        return Place(**(about | lists))

    def refuse_odd(self, ranks: int) -> None:
        """ValueError for what no save by so many ranks could have said."""
        for part in self.parts:
            part.refuse_odd(ranks)
            lengths = [0 <= begin < end <= self.shape[part.dim or 0] and end - begin for begin, end in part.spans]
            if part.dim is not None and (not all(lengths) or part.shape[part.dim] != sum(lengths)):
                raise ValueError(f"{part.shape} is no part of {self.shape}, {part.spans} along {part.dim}")
        numbers = (*self.shape, self.at, self.of, *self.ranks)
        if any(type(n) is not int or n < 0 for n in numbers):
            raise ValueError(f"one of its numbers is none: {numbers}")
        dtype_named(self.dtype)
        if max(self.ranks, default=0) >= ranks:
            raise ValueError(f"it lies with ranks {self.ranks} of {ranks}")
        if not self.parts and (self.at + self.numel > self.of or self.of % (len(self.ranks) or ranks)):
            raise ValueError(f"{self.numel} elements at {self.at} are not in a buffer of {self.of} on so many ranks")


@dataclass(frozen=True)
class Portion:
    """The part of a parameter that a tensor rank has: these spans of the whole along `dim`."""

    dim: int | None
    spans: tuple[tuple[int, int], ...]

    def is_of(self, place: Place) -> bool:
        return (place.dim, place.spans) == (self.dim, self.spans)

    def of(self, whole: Tensor) -> Tensor:
        """whole -> the part, a copy."""
        assert self.dim is not None
        return torch.cat([whole.narrow(self.dim, start, end - start) for start, end in self.spans], self.dim)
