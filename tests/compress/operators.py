"""The operators that the tests of this folder look at, and numbers that are awkward for them."""

import torch
from hypothesis import strategies as st
from torch import Tensor

from refimpl.compress.blocks import Blocks
from refimpl.compress.compressor import Compressor
from refimpl.compress.powersgd import PowerSGD
from refimpl.compress.randomk import RandomK
from refimpl.compress.sign import Sign
from refimpl.compress.sign_blocks import SignBlocks
from refimpl.compress.topk import TopK

OPERATORS: dict[str, Compressor] = {
    "int8": Blocks(8),
    "int8 in blocks of 16": Blocks(8, block=16),
    "int4": Blocks(4, block=32),
    "int4 stochastic": Blocks(4, block=16, stochastic=True),
    "int8 stochastic": Blocks(8, block=64, stochastic=True),
    "sign": Sign(),
    "sign in blocks of 32": SignBlocks(32),
    "top-k": TopK(0.1),
    "top-k of all": TopK(1.0),
    "random-k": RandomK(0.2, seed=3),
    "random-k rescaled": RandomK(0.2, rescaled=True),
    "PowerSGD": PowerSGD(rank=2),
}
UNBIASED = {name: c for name, c in OPERATORS.items() if c.unbiased}
CONTRACTIONS = {name: c for name, c in OPERATORS.items() if name not in UNBIASED}
ALWAYS = {name: c for name, c in CONTRACTIONS.items() if name not in ("random-k", "PowerSGD")}  # not on average alone


@st.composite
def vectors(draw: st.DrawFn, least: int = 0, most: int = 400) -> Tensor:
    """Normal numbers of any scale, some of them much larger, some zero; or all equal."""
    n = draw(st.integers(least, most))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    kind = draw(st.sampled_from(["normal", "spiky", "sparse", "equal", "half steps"]))
    x = torch.randn(n, generator=generator)
    if kind == "spiky":
        x = x**9
    elif kind == "sparse":
        x = x * (torch.rand(n, generator=generator) < 0.05)
    elif kind == "equal":
        x = torch.ones(n)
    elif kind == "half steps" and n:  # all but one half a step from zero: the worst for blocks
        x = torch.full((n,), 0.5 / draw(st.sampled_from([7, 127])))
        x[draw(st.integers(0, n - 1))] = 1.0
    return x * 10.0 ** draw(st.integers(-6, 6))


def squares(x: Tensor) -> float:
    return float(x.double().square().sum())
