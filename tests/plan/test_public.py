"""Shapes of public models: their parameters are transformers', their sizes those that are published."""

import importlib.util
from typing import Any

import pytest
import torch
from worlds import run

from refimpl.comm.group import Group
from refimpl.parallel.autotp import autotp
from refimpl.plan.judge import Machine, judge
from refimpl.plan.mesh import Mesh
from refimpl.plan.public import FAMILIES, of_config
from refimpl.plan.published import PUBLIC_MIXTURES
from refimpl.plan.search import search
from refimpl.plan.stages import experts_of, parameters_of

PUBLIC: dict[str, dict[str, Any]] = {
    "gpt2": {"model_type": "gpt2", "n_layer": 3, "n_embd": 48, "n_head": 4, "vocab_size": 101, "n_positions": 32},
    "llama": {
        "model_type": "llama", "num_hidden_layers": 3, "hidden_size": 48, "num_attention_heads": 4, "vocab_size": 101,
        "num_key_value_heads": 2, "intermediate_size": 80, "max_position_embeddings": 32,
    },
}  # fmt: skip
PUBLIC["mistral"] = PUBLIC["llama"] | {"model_type": "mistral"}
PUBLIC["qwen2"] = PUBLIC["llama"] | {"model_type": "qwen2", "tie_word_embeddings": True}
PUBLIC["biased"] = PUBLIC["llama"] | {"attention_bias": True, "mlp_bias": True, "head_dim": 8}
HEADS_APART = ("gemma", "gemma2", "gemma3_text", "qwen3", "glm", "glm4")
for like in (*HEADS_APART, "phi3", "granite", "smollm3", "olmo2", "starcoder2", "gpt_neox", "phi"):
    more = {"pad_token_id": 0} | ({"head_dim": 8} if like in HEADS_APART else {})
    PUBLIC[like] = PUBLIC["llama"] | {"model_type": like} | more
PUBLIC["gpt_neox"].pop("num_key_value_heads")
PUBLIC["glm without biases"] = PUBLIC["glm"] | {"attention_bias": False}
PUBLIC["gptj"] = PUBLIC["gpt2"] | {"model_type": "gptj", "rotary_dim": 4}
PUBLIC["gpt_bigcode"] = PUBLIC["gpt2"] | {"model_type": "gpt_bigcode"}
PUBLIC["opt"] = PUBLIC["llama"] | {"model_type": "opt", "ffn_dim": 80, "word_embed_proj_dim": 48}
PUBLIC["bloom"] = {"model_type": "bloom", "hidden_size": 48, "n_layer": 3, "n_head": 4, "vocab_size": 101}
FALCON = PUBLIC["llama"] | {"model_type": "falcon"}
PUBLIC["falcon"] = FALCON | {"alibi": False}
PUBLIC["falcon groups"] = FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2}
PUBLIC["falcon biased"] = FALCON | {"multi_query": False, "parallel_attn": False, "bias": True}


SMALL = PUBLIC["llama"] | {"num_hidden_layers": 4, "pad_token_id": 0, "num_experts_per_tok": 2, "eos_token_id": 1}
ROUTED = SMALL | {"moe_intermediate_size": 24, "num_experts": 6}
LATENT = SMALL | {
    "moe_intermediate_size": 24, "n_routed_experts": 8, "n_shared_experts": 2, "q_lora_rank": 20, "kv_lora_rank": 12,
    "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 6, "n_group": 2, "topk_group": 1,
}  # fmt: skip
for like in ("mixtral", "granitemoe", "gpt_oss"):
    PUBLIC[like] = SMALL | {"model_type": like, "num_local_experts": 6}
PUBLIC["gpt_oss without biases"] = PUBLIC["gpt_oss"] | {"attention_bias": False, "head_dim": 16}
PUBLIC["olmoe"] = SMALL | {"model_type": "olmoe", "num_experts": 6}
QWEN = ROUTED | {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 36}
PUBLIC["qwen2_moe"] = QWEN | {"decoder_sparse_step": 2}
PUBLIC["qwen2_moe without biases"] = QWEN | {"mlp_only_layers": [0], "qkv_bias": False}
PUBLIC["qwen3_moe"] = ROUTED | {"model_type": "qwen3_moe", "head_dim": 16, "mlp_only_layers": [1]}
GLM = ROUTED | {"model_type": "glm4_moe", "n_routed_experts": 6, "n_shared_experts": 1, "head_dim": 16}
PUBLIC["glm4_moe"] = GLM
PUBLIC["glm4_moe norms"] = GLM | {"use_qk_norm": True, "attention_bias": True, "first_k_dense_replace": 2}
PUBLIC["deepseek_v2"] = LATENT | {"model_type": "deepseek_v2", "first_k_dense_replace": 1}
PUBLIC["deepseek_v2 full queries"] = PUBLIC["deepseek_v2"] | {"q_lora_rank": None}
PUBLIC["deepseek_v3"] = LATENT | {"model_type": "deepseek_v3"}
PUBLIC["deepseek_v3 biased"] = PUBLIC["deepseek_v3"] | {"attention_bias": True, "tie_word_embeddings": True}
SAME_CLASSES = {"kimi_k2": "deepseek_v3"}  # whose configurations name a class of another family
hf = pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers (the hf extra)")


def of_transformers(settings: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """Parameters of the model, built of nothing, and the whole configuration."""
    from transformers import AutoConfig, AutoModelForCausalLM

    family = settings["model_type"]
    config = AutoConfig.for_model(**settings | {"model_type": SAME_CLASSES.get(family, family)})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return sum(p.numel() for p in model.parameters()), config.to_dict()


@hf
@pytest.mark.parametrize("family", PUBLIC)
def test_a_public_configurations_parameters_are_transformers(family: str) -> None:
    settings = PUBLIC[family]
    expected, whole = of_transformers(settings)
    assert of_config(whole).parameters == of_config(settings).parameters == expected
    assert {settings["model_type"] for settings in PUBLIC.values()} | set(SAME_CLASSES) == set(FAMILIES)


@hf
@pytest.mark.parametrize("name", PUBLIC_MIXTURES)
def test_public_mixtures_have_transformers_parameters(name: str) -> None:
    settings = PUBLIC_MIXTURES[name][0]
    assert of_config(settings).parameters == of_transformers(settings | {"n_group": 1, "topk_group": 1})[0]


@pytest.mark.parametrize("name", PUBLIC_MIXTURES)
def test_public_mixtures_have_the_sizes_that_are_published(name: str) -> None:
    settings, total, active = PUBLIC_MIXTURES[name]
    shape = of_config(settings)
    assert shape.parameters / 1e9 == pytest.approx(total, rel=0.015)  # GLM's and Kimi's are rounded up
    with_or_without = (shape.active / 1e9, (shape.active - shape.embedding()) / 1e9)  # a token reads a row of it
    assert any(n == pytest.approx(active, rel=0.03) for n in with_or_without)


def left_by_autotp(settings: dict[str, Any]) -> int:
    """Parameters on this rank."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings))
    autotp(model, Group.world(), {"input_ids": torch.arange(3, 19).view(2, 8)})
    return sum(p.numel() for p in model.parameters())


@hf
@pytest.mark.parametrize("family", ["llama", "uneven", "falcon", "olmo2", "gemma", "mixtral", "qwen2_moe"])
def test_a_tensor_rank_has_what_autotp_leaves_it(family: str) -> None:
    """101 words on 2 ranks; 3 groups of heads; one head of keys; attention that stays whole; an embedding that does;
    experts that do, and one that every token passes and that is cut.
    """
    uneven = PUBLIC["llama"] | {"num_attention_heads": 6, "num_key_value_heads": 3}
    settings = uneven if family == "uneven" else PUBLIC[family]
    shape = of_config(of_transformers(settings)[1])
    found = run(left_by_autotp, settings)[0]
    mesh = Mesh(1, 1, 2, 2, sequence=False)
    assert parameters_of(shape, mesh, 0) + experts_of(shape, mesh, 0) == found


def test_known_models_by_their_published_shapes() -> None:
    llama_2_70b = {
        "model_type": "llama", "num_hidden_layers": 80, "hidden_size": 8192, "num_attention_heads": 64,
        "num_key_value_heads": 8, "intermediate_size": 28672, "vocab_size": 32000, "max_position_embeddings": 4096,
    }  # fmt: skip
    assert of_config(llama_2_70b).parameters == 68_976_648_192  # what its weights are
    assert of_config({**PUBLIC["gpt2"], "n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50257,
                      "n_positions": 1024}).parameters == 124_439_808  # fmt: skip


@pytest.mark.parametrize("family", ["deepseek_v3", "olmoe", "gpt_oss"])
def test_attention_that_is_not_cut(family: str) -> None:
    shape = of_config(PUBLIC[family] | {"vocab_size": 128})
    with pytest.raises(ValueError, match=r"attention on 2 tensor ranks: it (is latent|has a norm over all heads)"):
        judge(shape, Mesh(1, 1, 2, 8), Machine())
    assert {v.mesh.tp for v in search(shape, 8, 8, Machine()).fit} == {1}


def test_what_is_not_known_is_named() -> None:
    with pytest.raises(ValueError, match="'llama' has num_local_experts 8: its mixtures are not known here"):
        of_config(PUBLIC["llama"] | {"num_local_experts": 8})
    with pytest.raises(ValueError, match="num_experts_per_tok 9 of 6 experts"):
        of_config(PUBLIC["mixtral"] | {"num_experts_per_tok": 9})
    with pytest.raises(ValueError, match="model_type 'mamba': known here are gpt2, llama"):
        of_config({"model_type": "mamba"})
    with pytest.raises(ValueError, match="a deepseek_v3 configuration without 'q_lora_rank'"):
        of_config({name: value for name, value in PUBLIC["deepseek_v3"].items() if name != "q_lora_rank"})
    with pytest.raises(ValueError, match="a gpt2 configuration without 'n_embd'"):
        of_config({"model_type": "gpt2"})
    for change, says in (
        ({"hidden_size": "4096"}, "hidden_size '4096': a whole number of at least 1"),
        ({"num_hidden_layers": 0}, "num_hidden_layers 0: a whole number"),
        ({"num_local_experts": "8"}, "num_local_experts '8': a whole number"),
        ({"tie_word_embeddings": []}, r"tie_word_embeddings \[\]: true or false"),
        ({"model_type": ["llama"]}, r"model_type \['llama'\]: known here are"),
        ({"hidden_size": None}, "a llama configuration without 'hidden_size'"),
        ({"num_attention_heads": 8, "num_key_value_heads": 3}, "8 heads over 3 heads of keys and values: does not"),
        ({"num_attention_heads": 7, "num_key_value_heads": 7, "head_dim": None}, "over 7 heads: does not divide; give"),
    ):
        with pytest.raises(ValueError, match=says):
            of_config(PUBLIC["llama"] | change)
    for value, says in (
        ({"decoder_sparse_step": 0}, "decoder_sparse_step 0: a whole number of at least 1"),
        ({"mlp_only_layers": 3}, "mlp_only_layers 3: a list of layers' numbers"),
        ({"mlp_only_layers": "02"}, "mlp_only_layers '02': a list"),
    ):
        with pytest.raises(ValueError, match=says):
            of_config(PUBLIC["qwen2_moe"] | value)
    for family, key in (("qwen2_moe", "shared_expert_intermediate_size"), ("deepseek_v3", "kv_lora_rank")):
        with pytest.raises(ValueError, match=f"a {family} configuration without '{key}'"):
            of_config(PUBLIC[family] | {key: None})
    assert of_config(QWEN | {"decoder_sparse_step": None}) == of_config(QWEN), "null is transformers' default"
    assert of_config(QWEN | {"decoder_sparse_step": 2}).mixtures(0, 1) == 0, "the first layer has an MLP"


def test_a_familys_own_heads_where_the_configuration_says_nothing() -> None:
    for family, head in (("qwen3", 128), ("gemma", 256), ("gemma2", 256), ("llama", 64)):
        c = {"num_hidden_layers": 2, "hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4}
        sizes = {"vocab_size": 100, "max_position_embeddings": 64, "intermediate_size": 1024}
        assert of_config({"model_type": family, **c, **sizes}).head == head
