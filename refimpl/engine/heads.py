"""Muon by heads: which matrices of attention lie in blocks of rows, one a head. `optimizer.params.per_head_muon`.

A projection to H heads is H matrices below each other, [H D, C]. Made orthogonal as one, all heads share its singular
values, and a head with a large momentum leaves little of the step to the others; made by heads, [H, D, C], each has a
step of its own. Traffic and memory are those of Muon.

    q_proj, query, wq            heads of D rows; in latent attention without a `q_lora_rank` of nope + rope rows
    k_proj, v_proj, key, ...     heads of keys, with as many rows
    q_b_proj, kv_b_proj          of latent attention (DeepSeek-V2): nope + rope rows, nope + value rows a head

A name proposes, the model's `config` has the numbers (of Kimi's linear attention its module), and the shape confirms:
rows = heads * rows of a head. Fused projections, ways down and the output's (whose heads are columns) stay whole.
DeepSpeed: deepspeed/__init__.py, `set_optimizer_flags`, since 0.19.8.
"""

from collections.abc import Iterator
from typing import Any

from torch import nn

from refimpl.comm.group import Group
from refimpl.engine.configuration.keys import ConfigError
from refimpl.zero.gather.saved import every_name

BY_HEADS, MARK = "per_head_muon", "muon_num_heads"  # of the section, and of a parameter, as in DeepSpeed
OURS = "muon_heads_found"  # what `mark_heads` has written into a mark, and not the script
QUERIES, KEYS = ("q_proj", "query", "wq"), ("k_proj", "key", "wk", "v_proj", "value", "wv")
LATENT_QUERIES, LATENT_KEYS = ("q_b_proj",), ("kv_b_proj",)
WHOLE = ("qkv_proj", "query_key_value", "c_attn", "in_proj_qkv", "wqkv", "q_a_proj", "kv_a_proj")
LINEAR = ("KimiDeltaAttention",)  # has heads of its own, beside those of the config
HEADS, KEY_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads"), ("num_key_value_heads", "num_kv_heads")


def mark_heads(model: nn.Module, pipeline: Group) -> None:
    """Tell Muon, by `parameter.muon_num_heads`, which matrices have heads. What has that mark keeps it.

    ConfigError if there is none, on no stage of `pipeline`. A collective of it.
    """
    for name, heads in heads_found(model).items():
        if not hasattr(p := model.get_parameter(name), MARK):
            setattr(p, MARK, heads)
            setattr(p, OURS, heads)
    if not any(pipeline.all_gather_object(any(hasattr(p, MARK) for p in model.parameters()))):
        raise ConfigError(
            f"optimizer.params.{BY_HEADS} = true: no matrix of {type(model).__name__} is known to have heads: its "
            f"`config` must say num_attention_heads, and projections be named q_proj, k_proj, ...; else mark them "
            f"yourself, parameter.{MARK} = 8"
        )


def forget_heads(model: nn.Module) -> None:
    """Take away what an earlier engine's `mark_heads` has found, which this one may not want."""
    for p in model.parameters():
        if hasattr(p, OURS):
            if getattr(p, MARK, None) == getattr(p, OURS):
                delattr(p, MARK)
            delattr(p, OURS)


def heads_found(model: nn.Module) -> dict[str, int]:
    """How many heads each matrix has that is found to have some, by its name."""
    config = getattr(model, "config", None)
    config = getattr(config, "text_config", None) or config
    found = {}
    for name, p in every_name(model):
        if p.ndim == 2 and name.endswith(".weight"):
            owner, _, leaf = name.removesuffix(".weight").rpartition(".")
            told = proposed(leaf.lower(), config, model.get_submodule(owner))
            heads = next((heads for heads, width in told if p.shape[0] == heads * width), None)
            if heads is not None:
                found[name] = heads
    return found


def proposed(leaf: str, config: Any, owner: Any = None) -> Iterator[tuple[int, int]]:
    """(heads, rows of each) that a layer of this name may have, in the module `owner`."""
    heads = first_of(config, HEADS)
    if heads is None or leaf.startswith(WHOLE):
        return
    if type(owner).__name__ in LINEAR and leaf.startswith(QUERIES + KEYS):
        yield owner.num_heads, owner.head_dim
        return
    nope, rope, value = (getattr(config, f"{part}_head_dim", None) for part in ("qk_nope", "qk_rope", "v"))
    hidden = getattr(config, "hidden_size", None) or 0
    width = getattr(config, "head_dim", None) or (hidden // heads if hidden % heads == 0 else 0)
    if leaf.startswith(LATENT_QUERIES + QUERIES) and nope and rope:
        yield heads, nope + rope
    if leaf.startswith(LATENT_KEYS) and nope and value:
        yield heads, nope + value
    if leaf.startswith(QUERIES) and width:
        yield heads, width
    if leaf.startswith(KEYS) and width:
        yield first_of(config, KEY_HEADS) or heads, width


def first_of(config: Any, names: tuple[str, ...]) -> int | None:
    """The first of these numbers that a configuration has."""
    return next((value for name in names if isinstance(value := getattr(config, name, None), int)), None)
