"""A transformer's shape, and how many parameters its parts have: of a GPT, or of a public configuration.

a block   attention: queries and output w x w, keys and values w x w K/H   MLP: 2 matrices w x h, 3 if it is gated
          two norms: w, and w more with a bias                             biases where the family has them
around    embedding V w, learned positions C w, a last norm, and a head V w unless it shares the embedding
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from refimpl.model.gpt import GPTConfig


@dataclass(frozen=True)
class Shape:
    """`matrices`: of the MLP, 3 if gated. `biases`: "all" (GPT-2), "qkv" (Qwen2), or "none" (Llama)."""

    layers: int
    width: int
    heads: int
    vocab: int
    context: int
    hidden: int  # of the MLP
    kv_heads: int
    matrices: int = 2
    biases: str = "all"
    positions: bool = True  # learned
    tied: bool = True

    @property
    def attention_matrix(self) -> int:
        """Elements of queries, keys, values and output."""
        return 2 * self.width**2 + 2 * self.width * self.width * self.kv_heads // self.heads

    @property
    def mlp_matrix(self) -> int:
        return self.matrices * self.width * self.hidden

    def keys(self, tp: int = 1) -> int:
        """Features of keys on a rank: of its heads, or of one that it shares with others where there are fewer."""
        return max(1, self.kv_heads // tp) * self.width // self.heads

    def block(self, tp: int = 1) -> int:
        """Parameters of one block on a rank, its matrices split over `tp`; norms and the biases of sums are whole."""
        w = self.width
        split = 2 * w * w + self.mlp_matrix
        whole = 2 * w + 2 * self.keys(tp) * (w if self.biases == "none" else w + 1)
        if self.biases != "none":
            split += w
        if self.biases == "all":
            split += (self.matrices - 1) * self.hidden
            whole += 4 * w  # the norms', the output's, the MLP's
        return split // tp + whole

    @property
    def embedding(self) -> int:
        return self.vocab * self.width

    @property
    def last_norm(self) -> int:
        return self.width * (2 if self.biases == "all" else 1)

    @property
    def parameters(self) -> int:
        around = self.embedding * (1 if self.tied else 2) + self.positions * self.context * self.width + self.last_norm
        return around + self.layers * self.block()

    def flops(self, sequences: int, recompute: bool = False) -> int:
        """Floating-point operations of a step over `sequences`: forward once, backward twice; `recompute`: once more.

        Scores of masked pairs are counted, as published figures do. See `refimpl.plan.transformer`.
        """
        a_token = 2 * (self.attention_matrix + self.mlp_matrix) + 4 * self.width * self.context
        blocks = (4 if recompute else 3) * self.layers * a_token
        return sequences * self.context * (blocks + 3 * 2 * self.embedding)


def of_gpt(config: GPTConfig) -> Shape:
    """The shape of `refimpl.model.gpt`'s GPT."""
    c = config
    return Shape(c.layers, c.width, c.heads, c.vocab, c.context, hidden=4 * c.width, kv_heads=c.heads)


def of_size(parameters: float, vocab: int = 51_200, context: int = 2048) -> Shape:
    """A GPT of about so many parameters, heads of 128, width / layers between GPT-3's small (64) and Megatron's 1T."""
    large = parameters >= 5e9
    step, ratio, divisor = (
        (1024, 160, 16 if parameters >= 1e11 else 8) if large else (128, 80, 2)
    )  # of layers: that pipelines divide them
    width = min(range(step, 65_536, step), key=lambda w: abs(12 * w**3 / ratio + vocab * w - parameters))
    layers = (parameters - vocab * width) / (12 * width**2)
    layers = max(1, round(layers / divisor)) * divisor
    return Shape(layers, width, width // 128, vocab, context, hidden=4 * width, kv_heads=width // 128)


def gpt2(c: Mapping[str, Any]) -> Shape:
    inner = c.get("n_inner") or 4 * c["n_embd"]
    return Shape(c["n_layer"], c["n_embd"], c["n_head"], c["vocab_size"], c["n_positions"], inner, c["n_head"])


def llama(c: Mapping[str, Any], biases: str = "none") -> Shape:
    heads = c["num_attention_heads"]
    if c.get("head_dim") not in (None, c["hidden_size"] // heads):
        raise ValueError(f"head_dim {c['head_dim']}: only hidden_size / num_attention_heads is known here")
    biases = "qkv" if c.get("attention_bias") else biases
    return Shape(
        c["num_hidden_layers"], c["hidden_size"], heads, c["vocab_size"], c["max_position_embeddings"],
        c["intermediate_size"], c.get("num_key_value_heads") or heads, matrices=3, biases=biases, positions=False,
        tied=c.get("tie_word_embeddings", False),
    )  # fmt: skip


FAMILIES: dict[str, Callable[[Mapping[str, Any]], Shape]] = {
    "gpt2": gpt2,
    "llama": llama,
    "mistral": llama,
    "qwen2": lambda c: llama(c, biases="qkv"),
}


def of_config(config: Mapping[str, Any]) -> Shape:
    """The shape of a transformers `config.json`. ValueError for a family that is not known here, or a missing key."""
    family = config.get("model_type")
    if family not in FAMILIES:
        raise ValueError(f"model_type {family!r}: known here are {', '.join(FAMILIES)}")
    try:
        return FAMILIES[family](config)
    except KeyError as error:
        raise ValueError(f"a {family} configuration without {error}") from None
