"""Ranks beyond the data-parallel ones: those that hold other parts of the same model, as the stages of a pipeline do.

The norm of the gradient is the whole model's: every part is clipped by one factor, and a value that is not finite in
any part skips the update of all. A parameter of which several parts have a copy, such as tied weights, counts once.
Traffic: one number more a step. DeepSpeed: deepspeed/runtime/utils.py, `get_global_norm_of_tensors` with an `mpu`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from refimpl.comm.group import Group
from refimpl.zero.flat import Bucket

Spans = tuple[tuple[int, int], ...]  # of a parameter's elements, laid out flat


@dataclass(frozen=True)
class Beyond:
    """The other parts of this rank's replica of the model, and what of its parameters another part counts."""

    group: Group
    counted_elsewhere: Mapping[nn.Parameter, Spans | None]  # None: all of it

    def counts_none_of(self, p: nn.Parameter) -> bool:
        return p in self.counted_elsewhere and self.counted_elsewhere[p] in (None, ((0, p.numel()),))

    def copies(self, bucket: Bucket, flat: Tensor) -> Iterator[Tensor]:
        """Of flat, [P] or this rank's [S], what another part counts."""
        for p in bucket.params:
            for begin, end in (self.counted_elsewhere[p] or ((0, p.numel()),)) if p in self.counted_elsewhere else ():
                yield bucket.part(flat, p, begin, end)

    def add_up(self, squares: Tensor) -> None:
        """This part's sum of squares [1], fp64 -> that of all parts, the same on every rank. A collective."""
        self.group.all_reduce(squares, "sum", tag="norm")
