"""Runs that others have published, to stand beside what the formulas say. Nothing here is computed.

Narayanan et al. 2021, arXiv:2104.04473, table 1: GPTs on A100 GPUs with 80 GB, 8 in a node; blocks recomputed,
vocabulary 51,200, sequences of 2,048, micro-batches of one.
Llama team 2024, arXiv:2407.21783, table 4: 405 billion parameters on H100 GPUs. Its TFLOP/s count no recomputation.
Looked up on 2026-11-22 in stored copies, which agree with each other but for a data-parallel size that one has garbled;
that follows from the others.
"""

from dataclasses import dataclass

from refimpl.plan.shape import Shape


@dataclass(frozen=True)
class Run:
    """billions: of parameters. batch: sequences of a step. tflops: that a GPU reached."""

    billions: float
    shape: Shape
    gpus: int
    tp: int
    pp: int
    cp: int
    batch: int
    tflops: float

    @property
    def dp(self) -> int:
        return self.gpus // (self.tp * self.pp * self.cp)


def megatron(
    billions: float, heads: int, width: int, layers: int, tp: int, pp: int, gpus: int, batch: int, tflops: float
) -> Run:
    shape = Shape(layers, width, heads, 51_200, 2048, hidden=4 * width, kv_heads=heads)
    return Run(billions, shape, gpus, tp, pp, 1, batch, tflops)


MEGATRON = (
    megatron(1.7, 24, 2304, 24, 1, 1, 32, 512, 137),
    megatron(3.6, 32, 3072, 30, 2, 1, 64, 512, 138),
    megatron(7.5, 32, 4096, 36, 4, 1, 128, 512, 142),
    megatron(18.4, 48, 6144, 40, 8, 1, 256, 1024, 135),
    megatron(39.1, 64, 8192, 48, 8, 2, 512, 1536, 138),
    megatron(76.1, 80, 10240, 60, 8, 4, 1024, 1792, 140),
    megatron(145.6, 96, 12288, 80, 8, 8, 1536, 2304, 148),
    megatron(310.1, 128, 16384, 96, 8, 16, 1920, 2160, 155),
    megatron(529.6, 128, 20480, 105, 8, 35, 2520, 2520, 163),
    megatron(1008.0, 160, 25600, 128, 8, 64, 3072, 3072, 163),
)


def llama(context: int, gpus: int, cp: int, batch: int, tflops: float) -> Run:
    """126 blocks: with embedding and head as a block each they make 128, which 16 stages divide."""
    shape = Shape(
        126, 16_384, 128, 128_256, context, hidden=53_248, kv_heads=8, matrices=3, biases="none", positions=False,
        tied=False,
    )  # fmt: skip
    return Run(405, shape, gpus, 8, 16, cp, batch, tflops)


TOKENS = 16 * 2**20  # of a step, in each of the three
LLAMA = (
    llama(8192, 8192, 1, TOKENS // 8192, 430),
    llama(8192, 16_384, 1, TOKENS // 8192, 400),
    llama(131_072, 16_384, 16, TOKENS // 131_072, 380),
)
