"""The shape of a public model, from its transformers `config.json`: families of dense decoders, by `model_type`.

What a configuration leaves out has transformers' default. Mixtures of experts are refused: where experts go is a choice
of its own, see `mixture.py` and `expert.py`. So are models with another attention, such as latent or linear.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from refimpl.plan.shape import Shape

Config = Mapping[str, Any]
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


def llama(c: Config, biases: str = "none", tied: bool = False, norms: int = 2, head_norms: int = 0) -> Shape:
    """Gated, rotated, norms without a bias. norms: of a block; head_norms: over the features of a head."""
    heads, width = c["num_attention_heads"], c["hidden_size"]
    kv_heads, head = c.get("num_key_value_heads") or heads, c.get("head_dim") or width // heads
    asked = bool(c.get("attention_bias"))
    each = width * (norms - 2) + head * head_norms + (width if asked else 0)  # the output's bias
    each += 2 * c["intermediate_size"] + width if c.get("mlp_bias") else 0
    return Shape(
        c["num_hidden_layers"], width, heads, c["vocab_size"], c["max_position_embeddings"], c["intermediate_size"],
        kv_heads, matrices=3, biases="qkv" if asked else biases, positions=False,
        tied=c.get("tie_word_embeddings", tied), head=head, each=each,
    )  # fmt: skip


def gpt2(c: Config, kv_heads: int = 0) -> Shape:
    inner = c.get("n_inner") or 4 * c["n_embd"]
    heads = c["n_head"]
    return Shape(c["n_layer"], c["n_embd"], heads, c["vocab_size"], c["n_positions"], inner, kv_heads or heads)


def gptj(c: Config) -> Shape:
    """One norm with a bias; biases of the MLP and of the head alone."""
    width, inner, vocab = c["n_embd"], c.get("n_inner") or 4 * c["n_embd"], c["vocab_size"]
    return Shape(
        c["n_layer"], width, c["n_head"], vocab, c["n_positions"], inner, c["n_head"], biases="none", positions=False,
        tied=c.get("tie_word_embeddings", False), each=inner + width, rest=width + vocab,
    )  # fmt: skip


def falcon(c: Config) -> Shape:
    """Norms with a bias, one where attention and MLP stand side by side, two in the newer blocks."""
    width, heads, new = c["hidden_size"], c["num_attention_heads"], c.get("new_decoder_architecture", False)
    few = (c.get("num_kv_heads") or heads) if new else 1 if c.get("multi_query", True) else heads
    two = (c.get("num_ln_in_parallel_attn") or 2) == 2 if new else not c.get("parallel_attn", True)
    biased = c.get("bias", False)
    return Shape(
        c["num_hidden_layers"], width, heads, c["vocab_size"], c.get("max_position_embeddings", 2048),
        c.get("ffn_hidden_size") or 4 * width, few, biases="all" if biased else "none", positions=False,
        tied=c.get("tie_word_embeddings", True), each=(2 * width if two else 0) - (2 * width if biased else 0),
        rest=0 if biased else width,
    )  # fmt: skip


def neox(c: Config, tied: bool = False, **more: Any) -> Shape:
    """All biases, positions by rotation."""
    heads = c["num_attention_heads"]
    return Shape(
        c["num_hidden_layers"], c["hidden_size"], heads, c["vocab_size"], c["max_position_embeddings"],
        c["intermediate_size"], c.get("num_key_value_heads") or heads, positions=False,
        tied=c.get("tie_word_embeddings", tied), **more,
    )  # fmt: skip


def opt(c: Config) -> Shape:
    """Two positions more than it says."""
    width, heads = c["hidden_size"], c["num_attention_heads"]
    if c.get("word_embed_proj_dim", width) != width:
        raise ValueError(f"word_embed_proj_dim {c['word_embed_proj_dim']}: only that of hidden_size is known here")
    inner, context = c["ffn_dim"], c["max_position_embeddings"]
    return Shape(c["num_hidden_layers"], width, heads, c["vocab_size"], context, inner, heads, rest=2 * width)


def bloom(c: Config) -> Shape:
    """A norm behind the embedding, slopes for positions."""
    width, heads = c.get("hidden_size") or c["n_embed"], c.get("n_head") or c["num_attention_heads"]
    context = c.get("seq_length", 2048)
    return Shape(
        c["n_layer"], width, heads, c["vocab_size"], context, 4 * width, heads, positions=False, rest=2 * width
    )


FAMILIES: dict[str, Callable[[Config], Shape]] = {
    "gpt2": gpt2,
    "llama": llama,
    "mistral": llama,
    "qwen2": partial(llama, biases="qkv"),
    "qwen3": partial(llama, head_norms=2),
    "phi3": llama,
    "gemma": partial(llama, tied=True),
    "gemma2": partial(llama, tied=True, norms=4),
    "granite": llama,
    "falcon": falcon,
    "gptj": gptj,
    "gpt_neox": neox,
    "phi": lambda c: neox(c, each=-2 * c["hidden_size"], rest=c["vocab_size"]),
    "starcoder2": partial(neox, tied=True),
    "gpt_bigcode": lambda c: gpt2(c, kv_heads=1 if c.get("multi_query", True) else 0),
    "opt": opt,
    "bloom": bloom,
}


def of_config(config: Config) -> Shape:
    """The shape of a transformers `config.json`. ValueError for a family that is not known here, or a missing key."""
    family = config.get("model_type")
    if mixed := [key for key in EXPERTS if (config.get(key) or 0) > 1]:
        raise ValueError(
            f"model_type {family!r} has {mixed[0]} {config[mixed[0]]}: mixtures of experts are not laid out here; "
            "refimpl.plan.mixture counts their parameters, refimpl.plan.expert their tokens"
        )
    if family not in FAMILIES:
        raise ValueError(f"model_type {family!r}: known here are {', '.join(FAMILIES)}")
    try:
        return FAMILIES[family](config)
    except KeyError as error:
        raise ValueError(f"a {family} configuration without {error}") from None
