"""What compresses a stage's gradients, as one argument: which operator, which exchange, and from which step on.

    ZeroConfig(compression=Compression(TopK(0.01)))

exchange      who sends what to whom (see exchange.py)              bytes a rank sends, W(n) of n numbers
gathered      every wire to every rank                              (N-1) W(n)
served        DDP: chunks to their rank, compressed again for all   2 (N-1) W(n/N)
              ZeRO-1: chunks to their rank, which needs no other    (N-1) W(n/N), and parameters as without
summed        an all-reduce of the wires: RandomK                   2 W(n) (N-1)/N
low rank      two all-reduces: PowerSGD                             2 r (rows + columns) (N-1)/N values a matrix

By default top-k is gathered, RandomK summed, PowerSGD low rank; blocks and signs, of which a sum has as short a wire
again, are served. Gathered, summed and low rank give DDP and ZeRO-1 the same bits.
"""

from dataclasses import dataclass
from typing import Literal, get_args

import torch

from refimpl.comm.group import Group
from refimpl.compress.compressor import Compressor
from refimpl.compress.exchange import Exchange, Gathered, Scattered, Served, Summed
from refimpl.compress.powersgd import LowRank, PowerSGD
from refimpl.compress.topk import TopK

Way = Literal["gathered", "served", "summed", "low rank"]


@dataclass(frozen=True)
class Compression:
    """`feedback` False drops what is lost: for unbiased operators. Steps before `start_step` are sent whole.

    ValueError where the operator cannot travel that way.
    """

    compressor: Compressor
    exchange: Way | None = None  # None: as the operator is best sent
    feedback: bool = True
    start_step: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.compressor, Compressor):
            raise TypeError(f"Compression: {self.compressor!r} is no Compressor, such as TopK(0.01) or Sign()")
        if self.exchange is not None and self.exchange not in get_args(Way):
            raise ValueError(f"Compression.exchange = {self.exchange!r}: must be one of {', '.join(get_args(Way))}")
        if self.exchange == "summed" and not self.compressor.linear:
            raise ValueError(f"Compression.exchange = 'summed': the wires of {self.compressor} cannot be added")
        if self.exchange == "served" and self.compressor.linear and self.compressor.unbiased:
            raise ValueError(
                f"Compression.exchange = 'served': {self.compressor} would be scaled up twice, by who sends and by who "
                "serves; leave the exchange open: its wires are added on their way"
            )
        if (self.exchange == "low rank") and not isinstance(self.compressor, PowerSGD):
            raise ValueError(f"Compression.exchange = 'low rank': {self.compressor} is not PowerSGD")
        if self.start_step < 0:
            raise ValueError(f"Compression.start_step = {self.start_step}: must not be negative")
        if not self.feedback and not self.compressor.unbiased:
            raise ValueError(
                f"Compression.feedback = False: {self.compressor} is biased, and what it drops would never be sent; "
                "keep the feedback, or use an unbiased operator: Blocks(stochastic=True), RandomK(rescaled=True)"
            )
        if self.feedback and self.way == "summed" and self.compressor.unbiased:
            raise ValueError(
                f"Compression.feedback = True: {self.compressor} may lose more than there is, and feedback would add "
                "that up; set feedback=False, or rescaled=False"
            )

    @property
    def way(self) -> Way:
        """The exchange, chosen if it was left open."""
        if self.exchange is not None:
            return self.exchange
        if isinstance(self.compressor, PowerSGD):
            return "low rank"
        return "summed" if self.compressor.linear else "gathered" if isinstance(self.compressor, TopK) else "served"

    def make(
        self, group: Group, shapes: list[torch.Size], chunks: list[int], dtype: torch.dtype, whole: bool
    ) -> Exchange:
        """The exchange of tensors of these shapes end to end, of which rank i owns chunks[i] numbers.

        `whole`: every rank needs the mean of all. `dtype`: of values on the wire.
        """
        n, operator = sum(chunks), self.compressor
        if self.way == "low rank":
            assert isinstance(operator, PowerSGD)
            return LowRank(group, operator, n, shapes, self.feedback, dtype)
        if self.way == "gathered":
            return Gathered(group, operator, n, self.feedback, chunks, dtype)
        if self.way == "summed":
            return Summed(group, operator, n, self.feedback, chunks, dtype)
        return (Served if whole else Scattered)(group, operator, n, self.feedback, chunks, dtype)
