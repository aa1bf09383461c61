"""Models made sparse from outside: our GPT, and transformers' by name, beside themselves with a dense mask."""

import copy
import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from refimpl.model.gpt import GPT, GPTConfig
from refimpl.model.patterns.base import SparsityConfig
from refimpl.model.patterns.fixed import FixedSparsityConfig
from refimpl.model.patterns.plain import DenseSparsityConfig
from refimpl.model.patterns.sliding import BigBirdSparsityConfig, LocalSlidingWindowSparsityConfig
from refimpl.model.sparse_swap import make_sparse

hf = pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers (the hf extra)")
SIZES = {"vocab_size": 99, "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2}
UNDROPPED = {"attention_probs_dropout_prob": 0.0, "attn_pdrop": 0.0}


def test_our_gpt_with_every_block_is_itself_and_with_few_is_not() -> None:
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab=50, context=40, width=16, layers=2, heads=2))
    tokens = torch.randint(0, 50, (2, 37))
    before, names = model(tokens), list(model.state_dict())
    sparse = copy.deepcopy(model)
    assert make_sparse(sparse, lambda heads: DenseSparsityConfig(heads, 8)) == 2
    assert list(sparse.state_dict()) == names
    torch.testing.assert_close(sparse(tokens), before)
    make_sparse(model, lambda heads: LocalSlidingWindowSparsityConfig(heads, 8, 1))
    after = model(tokens)
    torch.testing.assert_close(after[:, :8], before[:, :8])  # the first block sees what it saw
    assert not torch.allclose(after[:, 8:], before[:, 8:])


def test_a_stranger_is_refused() -> None:
    with pytest.raises(ValueError, match="Linear is neither made of refimpl's GPT blocks nor a model of transformers"):
        make_sparse(nn.Linear(2, 2), lambda heads: DenseSparsityConfig(heads))


def build(name: str) -> tuple[Any, bool]:
    """A small model of transformers, and whether it is causal."""
    transformers: Any = importlib.import_module("transformers")
    transformers.logging.set_verbosity_error()
    torch.manual_seed(1)
    if name == "GPT2LMHeadModel":
        config = transformers.GPT2Config(
            vocab_size=99,
            n_embd=32,
            n_head=4,
            n_layer=2,
            n_positions=40,
            attn_pdrop=0.0,
            bos_token_id=1,
            eos_token_id=2,
        )
        return transformers.GPT2LMHeadModel(config).eval(), True
    if name == "DeepseekV3ForCausalLM":  # its values are narrower than its keys
        config = transformers.DeepseekV3Config(
            **SIZES, num_key_value_heads=4, intermediate_size=48, first_k_dense_replace=2, max_position_embeddings=40,
            q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8,
        )  # fmt: skip
        return transformers.DeepseekV3ForCausalLM(config).eval(), True
    if name == "LlamaForCausalLM":
        config = transformers.LlamaConfig(
            **SIZES, num_key_value_heads=2, intermediate_size=64, max_position_embeddings=40
        )
        return transformers.LlamaForCausalLM(config).eval(), True
    config = transformers.BertConfig(
        **SIZES, intermediate_size=64, max_position_embeddings=40, attention_probs_dropout_prob=0.0
    )
    return transformers.BertForMaskedLM(config).eval(), False


PATTERNS: dict[str, Callable[[int], SparsityConfig]] = {
    "bigbird": lambda heads: BigBirdSparsityConfig(heads, 4, different_layout_per_head=True, seed=3),
    "fixed": lambda heads: FixedSparsityConfig(heads, 4, num_local_blocks=2),
}


@hf
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("name", ["BertForMaskedLM", "GPT2LMHeadModel", "LlamaForCausalLM", "DeepseekV3ForCausalLM"])
def test_models_of_transformers_are_themselves_with_a_mask(name: str, pattern: str) -> None:
    """22 tokens in blocks of 4, some of them padding; logits and gradients."""
    model, causal = build(name)
    dense = copy.deepcopy(model)
    dense.set_attn_implementation("eager")
    assert make_sparse(model, PATTERNS[pattern]) == 2
    tokens, seen = torch.randint(3, 99, (2, 22)), torch.ones(2, 22, dtype=torch.long)
    seen[1, 15:] = 0
    layout = PATTERNS[pattern](4).make_layout(40).bool().repeat_interleave(4, 1).repeat_interleave(4, 2)[:, :22, :22]
    mask = (layout.tril() if causal else layout) & seen.bool()[:, None, None]
    ours = model(tokens, attention_mask=seen).logits
    right = dense(tokens, attention_mask=torch.zeros(mask.shape).masked_fill(~mask, -1e30)).logits
    torch.testing.assert_close(ours[seen.bool()], right[seen.bool()], rtol=0, atol=1e-5)

    def gradients(of: Any, logits: Tensor) -> list[Tensor]:
        loss = logits[seen.bool()].square().mean()
        return list(torch.autograd.grad(loss, [p for p in of.parameters() if p.requires_grad], allow_unused=True))

    for mine, theirs in zip(gradients(model, ours), gradients(dense, right), strict=True):
        if theirs is not None:
            torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-6)


@hf
def test_generation_with_kept_keys_says_what_it_says_without() -> None:
    model, _ = build("GPT2LMHeadModel")
    make_sparse(model, PATTERNS["bigbird"])
    start = torch.randint(3, 99, (1, 13))
    said = [
        model.generate(start, max_new_tokens=14, do_sample=False, use_cache=kept, pad_token_id=0)
        for kept in (True, False)
    ]
    assert torch.equal(*said)


@hf
def test_what_a_pattern_would_lose_is_said() -> None:
    transformers: Any = importlib.import_module("transformers")
    config = transformers.BertConfig(**SIZES, intermediate_size=8, max_position_embeddings=16)
    with pytest.warns(UserWarning, match="dropout of attention has no effect"):
        make_sparse(transformers.BertModel(config), PATTERNS["fixed"])
    t5 = transformers.T5Config(d_model=8, d_ff=8, num_layers=1, num_heads=2, vocab_size=9, d_kv=4)
    with pytest.raises(ValueError, match="attends to another sequence"):
        make_sparse(transformers.T5ForConditionalGeneration(t5), PATTERNS["fixed"])


@hf
@pytest.mark.parametrize(
    ("family", "asks", "options"),
    [
        ("Mistral", "sliding_window", {"sliding_window": 8}),
        ("Gemma2", "attn_logit_softcapping", {"head_dim": 8, "layer_types": ["full_attention"] * 2}),
        ("GptOss", "sinks", {"head_dim": 8, "layer_types": ["full_attention"] * 2}),
        ("Llama4Text", "attention_chunk_size", {"head_dim": 8, "num_local_experts": 2, "attention_chunk_size": 8}),
        ("Qwen2", None, {"sliding_window": 8}),  # which its layers do not use
        ("Mistral", None, {"sliding_window": None}),
        ("Qwen2Moe", None, {"sliding_window": 8, "use_sliding_window": False, "num_experts": 4}),
        ("JetMoe", None, {"kv_channels": 8, "num_local_experts": 2}),  # which takes the answer by `view`
    ],
)
def test_what_a_pattern_does_not_have_is_refused_before_anything_is_changed(
    family: str, asks: str | None, options: dict[str, Any]
) -> None:
    transformers: Any = importlib.import_module("transformers")
    config = getattr(transformers, f"{family}Config")(
        **SIZES, num_key_value_heads=2, intermediate_size=48, max_position_embeddings=40, **options
    )
    model = getattr(transformers, f"{family}Model")(config).eval()
    before = model.config._attn_implementation
    if asks is None:
        assert make_sparse(model, PATTERNS["fixed"]) == 2
        model(torch.randint(3, 99, (2, 22)))
        return
    with pytest.raises(ValueError, match=rf"{family}Attention asks for {asks}, which a pattern .* set it to None"):
        make_sparse(model, PATTERNS["fixed"])
    assert model.config._attn_implementation == before
    assert not any(hasattr(module, "block_sparse") for module in model.modules())


@hf
def test_packed_sequences_are_refused() -> None:
    """They would read each other."""
    model, _ = build("LlamaForCausalLM")
    make_sparse(model, PATTERNS["fixed"])
    model.config.use_cache = False
    tokens, places = torch.randint(3, 99, (1, 20)), torch.arange(20)[None]
    torch.testing.assert_close(model(tokens, position_ids=places).logits, model(tokens).logits)
    with pytest.raises(ValueError, match=r"attention_mask \(1, 1, 20, 20\): .*packed sequences"):
        model(tokens, position_ids=places % 10)


@hf
def test_cross_attention_is_never_sparse() -> None:
    """A decoder of Bart's by itself has it, and uses it only where it is given an encoder's states."""
    transformers: Any = importlib.import_module("transformers")
    config = transformers.BartConfig(
        vocab_size=99, d_model=32, decoder_layers=2, decoder_attention_heads=4, decoder_ffn_dim=8, dropout=0.0
    )
    config.is_encoder_decoder = False
    model = transformers.BartForCausalLM(config).eval()
    tokens = torch.randint(3, 99, (2, 22))
    before = model(tokens).logits
    assert make_sparse(model, lambda heads: DenseSparsityConfig(heads, 8)) == 2
    torch.testing.assert_close(model(tokens).logits, before)
    with pytest.raises(ValueError, match="BartAttention was given another sequence to attend to; only self-attention"):
        model(tokens, encoder_hidden_states=torch.randn(2, 22, 32))


@hf
def test_a_model_whose_attention_is_its_own_is_refused() -> None:
    """XGLM's is (GPT-J's until transformers 5.24). BigBird-Pegasus knows the future by a mask alone."""
    transformers: Any = importlib.import_module("transformers")
    config = transformers.XGLMConfig(vocab_size=99, d_model=32, ffn_dim=8, num_layers=1, attention_heads=4)
    by_mask = transformers.BigBirdPegasusConfig(
        vocab_size=99,
        d_model=32,
        decoder_layers=1,
        decoder_attention_heads=4,
        decoder_ffn_dim=8,
        is_encoder_decoder=False,
    )
    for model, says in [
        (transformers.XGLMModel(config), "no attention of XGLMModel is called through transformers'"),
        (transformers.BigBirdPegasusForCausalLM(by_mask), "BigBirdPegasusForCausalLM must be told more than causality"),
    ]:
        with pytest.raises(ValueError, match=says):
            make_sparse(model, PATTERNS["fixed"])
