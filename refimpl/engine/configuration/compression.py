"""The section `gradient_compression` of a configuration: gradients that travel compressed, in stages 0 and 1.

    "gradient_compression": {"type": "topk", "ratio": 0.01}

DeepSpeed has no key for it: there only the 1-bit optimizers compressed, until 0.19.6. See `refimpl.compress`.
"""

from collections.abc import Callable
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from refimpl.compress.blocks import Blocks
from refimpl.compress.compression import Compression
from refimpl.compress.compressor import Compressor
from refimpl.compress.powersgd import PowerSGD
from refimpl.compress.randomk import RandomK
from refimpl.compress.sign import Sign
from refimpl.compress.topk import TopK
from refimpl.engine.configuration.values import Count, Number, Positive, Section, Share, lower

# The operators that a key is of; the others are of all.
OF = {
    "ratio": ("topk", "randomk"),
    "block_size": ("int8", "int4"),
    "stochastic": ("int8", "int4"),
    "rank": ("powersgd",),
    "least_ratio": ("powersgd",),
    "warm_start": ("powersgd",),
    "seed": ("randomk", "int8", "int4", "powersgd"),
}


class GradientCompression(Section):
    """Gradients that travel compressed, in stages 0 and 1: `refimpl.compress`. DeepSpeed has no such key."""

    type: Annotated[Literal["topk", "randomk", "int8", "int4", "sign", "powersgd"], BeforeValidator(lower)] = Field(
        description="the operator"
    )
    ratio: Share = Field(default=0.01, description="topk, randomk: the share of the numbers that travels")
    block_size: Positive = Field(default=256, description="int8, int4: numbers that share a scale")
    stochastic: bool = Field(default=False, description="int8, int4: round at random, unbiased, rather than to nearest")
    rank: Positive = Field(default=4, description="powersgd: columns of both factors")
    least_ratio: Number = Field(
        default=2.0, description="powersgd: a matrix that would not become that many times smaller travels whole"
    )
    warm_start: bool = Field(default=True, description="powersgd: begin with the last step's Q")
    seed: Count = Field(default=0, description="of what is drawn at random, the same on all ranks")
    error_feedback: bool = Field(
        default=True, description="what was not sent is added to the next gradient; false: of unbiased operators"
    )
    exchange: Literal["gathered", "served"] | None = Field(
        default=None, description="who sends what to whom; unset: as suits the operator"
    )
    start_step: Count = Field(default=0, description="steps before this one are sent whole")

    def compression(self) -> Compression:
        """ValueError where the keys do not go together."""
        unbiased = not self.error_feedback
        makers: dict[str, Callable[[], Compressor]] = {
            "topk": lambda: TopK(self.ratio),
            "randomk": lambda: RandomK(self.ratio, self.seed, rescaled=unbiased),
            "int8": lambda: Blocks(8, self.block_size, self.stochastic or unbiased, self.seed),
            "int4": lambda: Blocks(4, self.block_size, self.stochastic or unbiased, self.seed),
            "sign": Sign,
            "powersgd": lambda: PowerSGD(self.rank, self.least_ratio, self.warm_start, self.seed),
        }
        return Compression(makers[self.type](), self.exchange, self.error_feedback, self.start_step)

    @model_validator(mode="after")
    def check_together(self) -> Self:
        """What belongs to another operator would have no effect; what cannot go together is refused."""
        for key in self.model_fields_set & OF.keys():
            if self.type not in OF[key]:
                raise ValueError(f"{key} is a key of {', '.join(OF[key])}; with {self.type} it has no effect")
        self.compression()
        return self
