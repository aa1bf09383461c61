"""Mixtures of experts in numbers: how many parameters there are, how many a token meets, and what its tokens send.

    total  = rest + layers E expert        active = rest + layers k expert        expert: its 2 or 3 matrices M h

k of E experts work for a token, so E / k times an MLP's weights cost no FLOP more. They cost memory, wherever a token
may go, and the way there and back: `refimpl/plan/expert.py`.

`PUBLISHED` are models whose papers or files give both sizes: what the formula says stands beside them.
Switch: Fedus et al. 2021, arXiv:2101.03961, table 9. GShard: Lepikhin et al. 2020, arXiv:2006.16668, table 1.
Mixtral: Jiang et al. 2024, arXiv:2401.04088. DeepSeek-V3: arXiv:2412.19437, section 4.2.
"""

from dataclasses import dataclass

from refimpl.plan.public import of_config
from refimpl.plan.published import PUBLIC_MIXTURES


@dataclass(frozen=True)
class Mixture:
    """`layers`: those that have experts. `rest`: parameters that every token meets, gates and shared experts too."""

    layers: int
    experts: int
    k: int
    width: int
    hidden: int  # of one expert
    rest: int
    matrices: int = 2  # of an expert, 3 if it is gated

    @property
    def expert(self) -> int:
        """Parameters of one."""
        return self.matrices * self.width * self.hidden

    @property
    def total(self) -> int:
        return self.rest + self.layers * self.experts * self.expert

    @property
    def active(self) -> int:
        """Parameters that one token meets."""
        return self.rest + self.layers * self.k * self.expert


def attention(width: int, heads: int, head: int, kv_heads: int = 0) -> int:
    """Parameters of queries, keys, values and output, without biases. head: its width."""
    return 2 * width * heads * head + 2 * width * (kv_heads or heads) * head


def t5(width: int, heads: int, layers: int, vocab: int, experts: int, dense: int, tied: bool) -> int:
    """The rest of an encoder and a decoder of `layers` blocks each: a decoder's have two attentions."""
    gates = (2 * layers - dense_layers(layers, dense)) * width * experts
    return 3 * layers * attention(width, heads, 64) + dense + gates + (1 if tied else 2) * vocab * width


def dense_layers(layers: int, dense: int) -> int:
    """Of an encoder and a decoder of so many blocks: every other one is dense, or none."""
    return layers if dense else 0


def public(name: str) -> Mixture:
    """One of `PUBLIC_MIXTURES`."""
    shape = of_config(PUBLIC_MIXTURES[name][0])
    layers, e = shape.mixtures(), shape.experts
    assert e is not None
    rest = shape.parameters - layers * e.count * shape.expert
    return Mixture(layers, e.count, e.k, shape.width, e.hidden, rest, shape.matrices)


SWITCH_C = Mixture(30, 2048, 1, 2080, 6144, t5(2080, 32, 15, 32_128, 2048, 0, tied=True))
SWITCH_XXL = Mixture(
    24, 128, 1, 4096, 10_240, t5(4096, 64, 24, 32_128, 128, 24 * 3 * 4096 * 10_240, tied=False), matrices=3
)
MIXTRAL, DEEPSEEK_V3 = public("Mixtral 8x7B"), public("DeepSeek-V3")

# name -> (the model, billions in all and active as published; None where they are not).
PUBLISHED: dict[str, tuple[Mixture, float, float | None]] = {
    "Switch-XXL": (SWITCH_XXL, 395, None),
    "Switch-C": (SWITCH_C, 1571, None),
    "Mixtral 8x7B": (MIXTRAL, 46.7, 12.9),
    "DeepSeek-V3": (DEEPSEEK_V3, 671, 37),
}
# GShard, billions: (experts, blocks) -> published. Every other block has experts, M = 1024, hidden 8192.
GSHARD = {(2048, 36): 600, (2048, 12): 200, (512, 36): 150, (512, 12): 50, (128, 36): 37, (128, 12): 12.5}


def gshard(experts: int, blocks: int) -> Mixture:
    """Top-2. Its rest without embeddings, whose vocabulary the paper's table leaves out: small beside the experts."""
    dense = blocks // 2 * 2 * 1024 * 8192
    rest = blocks * attention(1024, 16, 128) + dense + blocks // 2 * 1024 * experts
    return Mixture(blocks // 2, experts, 2, 1024, 8192, rest)
