"""The shape of a public model, from its transformers `config.json`: families of decoders, by `model_type`.

What a configuration leaves out has transformers' default. Other families are refused by name: those with linear
attention, encoders, or parts that see. Layers that predict further tokens (DeepSeek-V3's) are not counted, as in the
sizes that are published.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from refimpl.plan.shape import Experts, Latent, Shape

Config = Mapping[str, Any]
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
SIZES = (
    "hidden_size", "n_embd", "n_embed", "num_hidden_layers", "n_layer", "num_attention_heads", "n_head", "head_dim",
    "num_key_value_heads", "num_kv_heads", "intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "vocab_size",
    "max_position_embeddings", "n_positions", "seq_length", "moe_intermediate_size", "num_experts_per_tok",
    "decoder_sparse_step",
)  # fmt: skip


COUNTS = (*EXPERTS, "first_k_dense_replace", "n_shared_experts", "q_lora_rank", "kv_lora_rank", "qk_rope_head_dim",
          "qk_nope_head_dim", "v_head_dim", "shared_expert_intermediate_size",
          "word_embed_proj_dim", "num_ln_in_parallel_attn")  # fmt: skip
FLAGS = ("tie_word_embeddings", "attention_bias", "mlp_bias", "qkv_bias", "bias", "multi_query", "parallel_attn",
         "new_decoder_architecture", "use_qk_norm")  # fmt: skip
NULLS = (*FLAGS, "q_lora_rank", "first_k_dense_replace")  # where null says something; elsewhere it is as if left out


def llama(
    c: Config,
    biases: str = "none",
    tied: bool = False,
    norms: int = 2,
    head_norms: int = 0,
    output: bool = True,
    head: int = 0,
) -> Shape:
    """Gated, rotated, norms without a bias. norms: of a block; head_norms: over the features of a head; output: whether
    `attention_bias` is the output's too; head: the family's `head_dim`, 0 for width / heads.
    """
    heads, width = c["num_attention_heads"], c["hidden_size"]
    kv_heads, head = c.get("num_key_value_heads") or heads, c.get("head_dim") or head or width // heads
    asked = bool(c.get("attention_bias"))
    each = width * (norms - 2) + head * head_norms + (width if asked and output else 0)
    each += 2 * c["intermediate_size"] + width if c.get("mlp_bias") else 0
    return Shape(
        c["num_hidden_layers"], width, heads, c["vocab_size"], c["max_position_embeddings"], c["intermediate_size"],
        kv_heads, matrices=3, biases="qkv" if asked else biases, positions=False,
        tied=c.get("tie_word_embeddings", tied), head=head, each=each,
    )  # fmt: skip


def gemma(c: Config, **more: Any) -> Shape:
    """Its embedding multiplies by the root of the width."""
    return replace(llama(c, tied=True, head=256, **more), scaled=True)


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


def mixture(shape: Shape, c: Config, hidden: str = "intermediate_size", **more: Any) -> Shape:
    """The same with mixtures. hidden: the key of an expert's features; more: of `Experts`."""
    count = next((c[key] for key in EXPERTS if c.get(key)), 0)
    if not 1 <= c["num_experts_per_tok"] <= count:
        raise ValueError(f"num_experts_per_tok {c['num_experts_per_tok']} of {count} experts ({', '.join(EXPERTS)})")
    return replace(shape, experts=Experts(count, c["num_experts_per_tok"], c[hidden], **more))


def every_other(c: Config) -> frozenset[int]:
    """Qwen's layers that have an MLP: those named, and of `decoder_sparse_step` all but the last."""
    step, named = c.get("decoder_sparse_step", 1), c.get("mlp_only_layers") or []
    if not isinstance(named, list) or any(type(i) is not int for i in named):
        raise ValueError(f"mlp_only_layers {named!r}: a list of layers' numbers")
    return frozenset(i for i in range(c["num_hidden_layers"]) if i in named or (i + 1) % step)


def qwen2_moe(c: Config) -> Shape:
    """A shared MLP with a gate of its own."""
    shape = llama(c, biases="qkv" if c.get("qkv_bias", True) else "none")
    shared = c["shared_expert_intermediate_size"]
    return mixture(shape, c, "moe_intermediate_size", shared=shared, beside=shape.width, dense=every_other(c))


def olmo2(c: Config) -> Shape:
    """Norms over all queries and all keys."""
    shape = llama(c)
    return replace(shape, each=shape.each + shape.queries() + shape.keys(), joined=True)


def gpt_oss(c: Config) -> Shape:
    """A learned number a head beside its scores; biases of attention, gates and experts."""
    shape = llama({"attention_bias": True, "head_dim": 64, **c})
    biases = 2 * c["intermediate_size"] + shape.width
    return mixture(
        replace(shape, each=shape.each + shape.heads, joined=True), c, beside=c["num_local_experts"], biases=biases
    )


def glm(c: Config, norms: int = 2) -> Shape:
    return llama({"attention_bias": True, **c}, norms=norms, output=False, head=128)


def glm4_moe(c: Config) -> Shape:
    shape = llama(c, head_norms=2 if c.get("use_qk_norm") else 0, output=False)
    return after_dense(shape, c, 1)


def after_dense(shape: Shape, c: Config, dense: int) -> Shape:
    """Mixtures with shared experts, which are one MLP, behind the first few layers."""
    first = c.get("first_k_dense_replace", dense) or 0
    shared = (c.get("n_shared_experts") or 0) * c["moe_intermediate_size"]
    return mixture(shape, c, "moe_intermediate_size", shared=shared, dense=frozenset(range(first)))


def deepseek(c: Config, dense: int = 0) -> Shape:
    """Latent attention. dense: layers that have an MLP, if the configuration does not say."""
    latent = Latent(c["q_lora_rank"] or 0, c["kv_lora_rank"], c["qk_rope_head_dim"], c["v_head_dim"])
    shape = llama({**c, "num_key_value_heads": None, "head_dim": c["qk_nope_head_dim"] + latent.rotated})
    if c.get("attention_bias"):  # of the narrow projections, not of those that heads have
        narrow = latent.queries + latent.keys + latent.rotated
        shape = replace(shape, biases="none", each=shape.each + narrow)
    return after_dense(replace(shape, latent=latent), c, dense)


FAMILIES: dict[str, Callable[[Config], Shape]] = {
    "gpt2": gpt2,
    "llama": llama,
    "mistral": llama,
    "qwen2": partial(llama, biases="qkv"),
    "qwen3": partial(llama, head_norms=2, head=128),
    "phi3": llama,
    "gemma": gemma,
    "gemma2": partial(gemma, norms=4),
    "gemma3_text": partial(gemma, norms=4, head_norms=2),
    "granite": llama,
    "smollm3": partial(llama, tied=True),
    "olmo2": olmo2,
    "glm": glm,
    "glm4": partial(glm, norms=4),
    "falcon": falcon,
    "gptj": gptj,
    "gpt_neox": neox,
    "phi": lambda c: neox(c, each=-2 * c["hidden_size"], rest=c["vocab_size"]),
    "starcoder2": partial(neox, tied=True),
    "gpt_bigcode": lambda c: gpt2(c, kv_heads=1 if c.get("multi_query", True) else 0),
    "opt": opt,
    "bloom": bloom,
    "mixtral": lambda c: mixture(llama(c), c),
    "granitemoe": lambda c: mixture(llama(c), c),
    "olmoe": lambda c: mixture(olmo2(c), c),
    "qwen2_moe": qwen2_moe,
    "qwen3_moe": lambda c: mixture(llama(c, head_norms=2), c, "moe_intermediate_size", dense=every_other(c)),
    "glm4_moe": glm4_moe,
    "gpt_oss": gpt_oss,
    "deepseek_v2": deepseek,
    "deepseek_v3": partial(deepseek, dense=3),
    "kimi_k2": partial(deepseek, dense=3),  # DeepSeek-V3's classes
}


def of_config(config: Config) -> Shape:
    """The shape of a transformers `config.json`. ValueError: an unknown family, a missing key, sizes that cannot be."""
    family = config.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        raise ValueError(f"model_type {family!r}: known here are {', '.join(FAMILIES)}")
    for keys, words, kind, least in (
        (SIZES, "a whole number of at least 1", int, 1), (COUNTS, "a whole number", int, 0),
        (FLAGS, "true or false", bool, False),
    ):  # fmt: skip
        for key in keys:
            if (value := config.get(key)) is not None and (type(value) is not kind or value < least):
                raise ValueError(f"{key} {value!r}: {words}")
    try:
        shape = FAMILIES[family]({key: value for key, value in config.items() if value is not None or key in NULLS})
    except KeyError as error:
        raise ValueError(f"a {family} configuration without {error}") from None
    if (mixed := [key for key in EXPERTS if (config.get(key) or 0) > 1]) and shape.experts is None:
        raise ValueError(f"model_type {family!r} has {mixed[0]} {config[mixed[0]]}: its mixtures are not known here")
    if shape.heads % shape.kv_heads:
        raise ValueError(f"{shape.heads} heads over {shape.kv_heads} heads of keys and values: does not divide")
    if shape.head in (0, shape.width // shape.heads) and shape.width % shape.heads and not config.get("head_dim"):
        raise ValueError(f"hidden_size {shape.width} over {shape.heads} heads: does not divide; give head_dim")
    return shape
