"""Frozen weights at rest in int8 (`zero_quantized_nontrainable_weights`): half of bf16's bytes, kept and sent.

A shard that nobody updates needs no more than what is computed with. Its wire is what rests, so a gather rounds nothing
anew: the way is exact, of weights that were rounded once. Writing (a checkpoint, `GatheredParameters`) rounds again;
what was rounded before comes out as it went in.
Bytes a parameter: (1 + 4/256) / N. DeepSpeed does the same to frozen weights of more than 500,000 elements:
deepspeed/runtime/zero/stage3.py, `quantize_nontrainable_params`.
"""

from collections.abc import Sequence

from torch import Tensor

from refimpl.comm.collectives import Scratch
from refimpl.comm.work import Work
from refimpl.compress.compressor import Compressor, Wire
from refimpl.offload.shelf import Shelf
from refimpl.zero.gather.ways import Quantised, Way


class Rounded(Shelf):
    """A shelf in memory: `flat` [S] as its wire."""

    is_begun = True  # there is nothing to read ahead

    def __init__(self, flat: Tensor, compressor: Compressor) -> None:
        self.compressor, self.numel, self.dtype = compressor, flat.numel(), flat.dtype
        self.was_written = False
        self.wire: Wire = compressor.compress(flat)

    def begin(self) -> None:
        """Nothing: it is here."""

    def read(self, out: Tensor) -> Tensor:
        return out.copy_(self.compressor.decompress(self.wire, self.numel))

    def drop(self) -> None:
        """Nothing: see `begin`."""

    def write(self, start: int, values: Tensor) -> None:
        """All of it anew: blocks are rounded together."""
        assert (start, values.numel()) == (0, self.numel)
        self.wire = self.compressor.compress(values)

    def tensors(self) -> Sequence[Tensor]:
        """Its memory."""
        return self.wire


class AtRest(Quantised):
    """Gathers a shard that is there as its wire already."""

    is_exact = True

    def __init__(self, rounded: Rounded, carrier: Way, scratch: Scratch) -> None:
        super().__init__(rounded.compressor, carrier, scratch)
        self.rounded = rounded

    def gather(self, full: Tensor, mine: Tensor) -> Work:
        return self.carry(full, self.rounded.wire, mine.numel())
