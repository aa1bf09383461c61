"""DeepSpeed's sparse attention by its names: masks and modes, BERT's layer, the functions around a pretrained model."""

import importlib
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from refimpl.deepspeed.ops import sparse_attention
from refimpl.deepspeed.ops.sparse_attention import (
    BertSparseSelfAttention,
    BigBirdSparsityConfig,
    FixedSparsityConfig,
    LocalSlidingWindowSparsityConfig,
    SparseAttentionUtils,
    SparseSelfAttention,
)

PATTERN = FixedSparsityConfig(num_heads=2, block=8, num_local_blocks=2)


def oracle(q: Tensor, k: Tensor, v: Tensor, added: Tensor) -> Tensor:
    layout = PATTERN.make_layout(q.shape[2]).bool().repeat_interleave(8, 1).repeat_interleave(8, 2)
    scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[3]) + added
    return torch.softmax(scores.masked_fill(~layout, -torch.inf), -1) @ v


def test_all_of_deepspeeds_names_are_there() -> None:
    by_path = importlib.import_module("refimpl.deepspeed.ops.sparse_attention.sparsity_config")
    for name in sparse_attention.__all__:
        there = getattr(sparse_attention, name)
        assert getattr(by_path, name, there) is there


@pytest.mark.parametrize("mode", ["add", "mul"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_masks_and_modes(mode: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(3, 2, 32, 4, dtype=dtype) for _ in range(3))
    rpe = torch.randn(3, 2, 32, 32, dtype=dtype)
    keys, pairs = torch.rand(3, 32) < 0.8, torch.rand(32, 32) < 0.8
    keys[:, 0] = pairs[:, :16] = True  # every row may read something
    pairs[16:, 16:24] = True
    keys[:, 16] = True

    def mask(may: Tensor) -> Tensor:
        return may.to(dtype) if mode == "mul" else torch.zeros(may.shape, dtype=dtype).masked_fill(~may, -torch.inf)

    layer = SparseSelfAttention(PATTERN, key_padding_mask_mode=mode, attn_mask_mode=mode)
    ours = layer(q, k, v, rpe=rpe, key_padding_mask=mask(keys), attn_mask=mask(pairs))
    may = keys[:, None, None] & pairs
    right = oracle(q.double(), k.double(), v.double(), rpe.double().masked_fill(~may, -torch.inf))
    assert ours.dtype == dtype
    torch.testing.assert_close(ours.double(), right, rtol=0, atol=1e-6 if dtype == torch.float32 else 2e-3)
    turned = layer(q, k.transpose(2, 3), v, rpe=rpe, key_padding_mask=keys[:, None, None], attn_mask=pairs[None, None])
    assert torch.equal(turned, ours)


def test_modules_of_one_length_keep_their_own_layouts() -> None:
    """DeepSpeed's class-wide cache knows the length alone, so the second module got the first one's layout."""
    q = torch.randn(1, 2, 32, 4)
    fixed, local = SparseSelfAttention(PATTERN), SparseSelfAttention(LocalSlidingWindowSparsityConfig(2, 8, 1))
    first = fixed(q, q, q)
    assert not torch.allclose(local(q, q, q), first)
    torch.testing.assert_close(fixed(q, q, q), oracle(q, q, q, torch.zeros(())))


def test_a_loaded_layout_is_the_one_that_is_used() -> None:
    """Drawn blocks are part of what was trained: also in a module that has attended by others before."""
    x = torch.randn(1, 2, 64, 4)
    ours, theirs = (
        SparseSelfAttention(BigBirdSparsityConfig(2, 8, num_global_blocks=0, seed=seed), max_seq_length=128)
        for seed in (0, 1)
    )
    assert not torch.equal(ours(x, x, x), theirs(x, x, x))
    ours.load_state_dict(theirs.state_dict())
    assert torch.equal(ours(x, x, x), theirs(x, x, x))


def test_a_row_that_may_read_nothing_gives_zeros() -> None:
    q = torch.randn(1, 2, 32, 4, requires_grad=True)
    out = SparseSelfAttention(PATTERN)(q, q, q, key_padding_mask=torch.full((1, 32), -torch.inf))
    assert not bool(out.any())
    assert not bool(torch.autograd.grad(out.sum(), q)[0].any())


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda s: s(torch.ones(1, 2, 30, 4), *[torch.ones(1, 2, 30, 4)] * 2), ValueError, "pad it to 32"),
        (lambda s: s(torch.ones(1, 2, 128, 4), *[torch.ones(1, 2, 128, 4)] * 2), ValueError, "max_seq_length = 64"),
        (lambda s: s(torch.ones(1, 2, 32, 4), *[torch.ones(1, 2, 24, 4)] * 2), NotImplementedError, "self-attention"),
        (lambda s: s(torch.ones(1, 3, 32, 4), *[torch.ones(1, 3, 32, 4)] * 2), ValueError, "made for 2"),
        (lambda s: SparseSelfAttention(PATTERN, attn_mask_mode="or"), ValueError, "attn_mask_mode is 'or'"),
    ],
)
def test_what_does_not_fit_is_refused(call: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        call(SparseSelfAttention(PATTERN, max_seq_length=64))


def test_berts_layer() -> None:
    config = SimpleNamespace(hidden_size=8, num_attention_heads=2)
    layer = BertSparseSelfAttention(config, PATTERN)
    x, mask = torch.randn(2, 32, 8), torch.zeros(2, 1, 1, 32)
    mask[1, ..., 28:] = -10000.0
    q, k, v = (f(x).view(2, 32, 2, 4).transpose(1, 2) for f in (layer.query, layer.key, layer.value))
    torch.testing.assert_close(layer(x, mask), oracle(q, k, v, mask).transpose(1, 2).reshape(2, 32, 8))
    with pytest.raises(ValueError, match="not a multiple"):
        BertSparseSelfAttention(SimpleNamespace(hidden_size=9, num_attention_heads=2))


def test_a_decoder_of_bert_is_refused() -> None:
    """Its mask is causal, or there is none, and the pattern would show it the future."""
    config = SimpleNamespace(hidden_size=8, num_attention_heads=2, is_decoder=True)
    replace = SparseAttentionUtils.replace_self_attention_layer_with_sparse_self_attention_layer
    with pytest.raises(ValueError, match="is_decoder"):
        replace(config, [], PATTERN)
    config.is_decoder = False
    layer = nn.Module()
    layer.attention = nn.Module()
    layer.attention.self = BertSparseSelfAttention(config, PATTERN)
    (sparse,) = replace(config, [layer], PATTERN)
    causal = torch.zeros(2, 1, 16, 16).masked_fill(~torch.ones(16, 16, dtype=torch.bool).tril(), -torch.inf)
    with pytest.raises(ValueError, match="queries see unlike tokens"):
        sparse.attention.self(torch.randn(2, 16, 8), causal)  # type: ignore[operator, union-attr]


def named(kind: str, positions: int, reserved: int) -> Any:
    """As little of transformers' BERT or RoBERTa as the utilities touch."""
    model = nn.Module()
    inner = nn.Module()
    inner.embeddings = nn.Module()
    inner.embeddings.position_embeddings = nn.Embedding(positions + reserved, 4)
    setattr(model, kind, inner)
    model.config = SimpleNamespace(max_position_embeddings=positions + reserved)  # type: ignore[assignment]
    return model


@pytest.mark.parametrize(("kind", "reserved"), [("bert", 0), ("roberta", 2)])
def test_positions_are_repeated(kind: str, reserved: int) -> None:
    model = named(kind, 6, reserved)
    table = getattr(model, kind).embeddings.position_embeddings
    before = table.weight.detach().clone()
    assert SparseAttentionUtils.extend_position_embedding(model, 15) is model
    assert table.weight.shape == (15 + reserved, 4)
    assert model.config.max_position_embeddings == table.num_embeddings == 15 + reserved
    assert torch.equal(table.weight[:reserved], before[:reserved])
    for position in range(15):
        assert torch.equal(table.weight[reserved + position], before[reserved + position % 6])
    with pytest.raises(ValueError, match="15 positions already"):
        SparseAttentionUtils.extend_position_embedding(model, 15)
    with pytest.raises(ValueError, match=r"neither \.bert nor \.roberta"):
        SparseAttentionUtils.extend_position_embedding(nn.Linear(1, 1), 8)


def test_tokens_are_padded_to_a_block_and_back() -> None:
    ids, mask, embed = torch.ones(2, 21, dtype=torch.long), torch.ones(2, 21), nn.Embedding(5, 3)
    pad, *padded = SparseAttentionUtils.pad_to_block_size(8, ids, mask, ids, ids, embed(ids), 4, embed)
    assert pad == 3
    given, seen, kinds, positions, vectors = padded
    assert all(x is not None and x.shape[1] == 24 for x in padded)
    assert [x[0, -1].item() for x in (given, seen, kinds, positions)] == [4, 0, 0, 4]  # type: ignore[index]
    assert torch.equal(vectors[:, 21:], embed(torch.full((2, 3), 4)))  # type: ignore[index]
    assert SparseAttentionUtils.unpad_sequence_output(pad, vectors).shape == (2, 21, 3)  # type: ignore[arg-type]
    unchanged = SparseAttentionUtils.pad_to_block_size(7, ids, None, None, None, None, 4, None)
    assert unchanged == (0, ids, None, None, None, None)
    with pytest.raises(ValueError, match="input_ids or inputs_embeds"):
        SparseAttentionUtils.pad_to_block_size(8, None, mask, None, None, None, 4, embed)
    tokenizer = SimpleNamespace(model_max_length=1, init_kwargs={})
    assert SparseAttentionUtils.update_tokenizer_model_max_length(tokenizer, 9).init_kwargs == {"model_max_length": 9}
