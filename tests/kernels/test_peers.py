"""What others wrote, on the same inputs: FlashAttention's cases and measure, torch's attention and grouped_mm, Mixtral.

FlashAttention's tests (tests/test_flash_attn.py, test_flash_attn_output) allow twice the error of torch's attention in
the same 16 bits, against attention in full precision; the lengths and widths are theirs, one head of each.
"""

import pytest
import torch
import torch.nn.functional as F
from agreement import error_of
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from refimpl.kernels.block_sparse_attention import block_sparse_attention
from refimpl.kernels.flash_attention import flash_attention, flash_attention_varlen, visible
from refimpl.kernels.grouped_matmul import grouped_matmul
from refimpl.kernels.permute import permute, sort_by_expert, unpermute
from refimpl.kernels.topk_gate import topk_gate

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


def spelt_out(q: Tensor, k: Tensor, v: Tensor, sees: Tensor) -> Tensor:
    """attention_ref of FlashAttention's tests: the formula, in the inputs' dtype; zeros where nothing is seen."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = (q * q.shape[-1] ** -0.5 @ k.transpose(2, 3)).masked_fill(~sees, -torch.inf)
    return scores.softmax(3).masked_fill(~sees.any(1, keepdim=True), 0) @ v


@pytest.mark.parametrize(
    ("queries", "keys", "width", "causal", "window"),
    [
        (113, 203, 59, True, None),
        (128, 217, 40, False, (87, 31)),
        (108, 256, 111, True, (54, 0)),
        (203, 113, 32, True, None),
    ],
)
def test_flash_attentions_own_measure(
    device: torch.device, queries: int, keys: int, width: int, causal: bool, window: tuple[int, int] | None
) -> None:
    inputs = [torch.randn(1, 1, n, width, device=device).half().requires_grad_() for n in (queries, keys, keys)]
    left, right = window or (-1, -1)
    sees = visible(queries, keys, left, 0 if causal else right, device)
    wide = [x.detach().double().requires_grad_() for x in inputs]
    exact, plain = spelt_out(*wide, sees), spelt_out(*inputs, sees)
    found = flash_attention(*inputs, causal=causal, window=window)
    g = torch.randn_like(found)
    for name, ours, torchs, truth in zip(
        ("out", "dq", "dk", "dv"),
        (found, *torch.autograd.grad(found, inputs, g)),
        (plain, *torch.autograd.grad(plain, inputs, g)),
        (exact, *torch.autograd.grad(exact, wide, g.double())),
        strict=True,
    ):
        ours_off, torchs_off = ((x.double() - truth).abs().max() for x in (ours, torchs))
        assert ours_off <= 2 * torchs_off + 1e-5, name


def test_torchs_mask_for_decoding(device: torch.device) -> None:
    q, k, v = (torch.randn(1, 2, n, 24, device=device) for n in (5, 40, 40))
    torch.testing.assert_close(
        flash_attention(q, k, v, causal=True), F.scaled_dot_product_attention(q, k, v, causal_lower_right(5, 40))
    )


def test_flex_attention_with_a_sliding_window_and_documents(device: torch.device) -> None:
    lengths, window = (30, 1, 65), 20
    document = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths)).to(device)
    starts = torch.tensor([0, *lengths]).cumsum(0).int().to(device)
    q, k, v = (torch.randn(96, h, 16, device=device) for h in (4, 2, 2))

    def mask(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (document[i] == document[j]) & (i >= j) & (i - j <= window)

    blocks = create_block_mask(mask, None, None, 96, 96, device=device.type, BLOCK_SIZE=16)
    q4, k4, v4 = (x.transpose(0, 1)[None] for x in (q, k, v))
    theirs = flex_attention(q4, k4, v4, block_mask=blocks, enable_gqa=True)
    assert isinstance(theirs, Tensor)
    ours = flash_attention_varlen(q, k, v, starts, starts, causal=True, window=(window, 0))
    assert error_of(ours, theirs[0].transpose(0, 1).double()) < 1e-6


def test_flex_attention_over_a_block_layout(device: torch.device) -> None:
    layout = torch.rand(2, 6, 6, generator=torch.Generator().manual_seed(1)).lt(0.4).to(device)
    layout[:, range(6), range(6)] = True
    q, k, v = (torch.randn(1, 2, 96, 16, device=device) for _ in "qkv")

    def mask(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return layout[h, i // 16, j // 16] & (i >= j)

    blocks = create_block_mask(mask, 1, 2, 96, 96, device=device.type, BLOCK_SIZE=16)
    theirs = flex_attention(q, k, v, block_mask=blocks)
    assert isinstance(theirs, Tensor)
    assert error_of(block_sparse_attention(q, k, v, layout, 16, causal=True), theirs.double()) < 1e-6


@pytest.mark.parametrize("counts", [(4, 0, 6), (0, 10, 0)])
def test_torchs_grouped_mm(device: torch.device, counts: tuple[int, ...]) -> None:
    sizes = torch.tensor(counts, dtype=torch.int32, device=device)
    x = torch.randn(10, 32, device=device).bfloat16().requires_grad_()
    w = torch.randn(3, 32, 16, device=device).bfloat16().requires_grad_()
    g = torch.randn(10, 16, device=device).bfloat16()
    theirs, ours = F.grouped_mm(x, w, offs=sizes.cumsum(0, dtype=torch.int32)), grouped_matmul(x, w, sizes)
    pairs = zip(
        (ours, *torch.autograd.grad(ours, (x, w), g)), (theirs, *torch.autograd.grad(theirs, (x, w), g)), strict=True
    )
    assert all(error_of(a, b.double()) < 1e-2 for a, b in pairs)


def test_mixtrals_block_of_transformers(device: torch.device) -> None:
    """Gate, permute, two grouped matmuls and unpermute are its layer, with its weights; outputs and all gradients."""
    mixtral = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    config = mixtral.MixtralConfig(hidden_size=32, intermediate_size=48, num_local_experts=6, num_experts_per_tok=2)
    config._experts_implementation = "eager"
    block = mixtral.MixtralSparseMoeBlock(config).to(device)
    for weight in block.parameters():
        torch.nn.init.normal_(weight, std=0.2)
    x = torch.randn(2, 21, 32, device=device, requires_grad=True)
    up, down = block.experts.gate_up_proj, block.experts.down_proj
    theirs = block(x)
    theirs = theirs[0] if isinstance(theirs, tuple) else theirs
    weights, experts = topk_gate(x.flatten(0, 1) @ block.gate.weight.T, 2, normalise=True)
    order = sort_by_expert(experts, 6)
    gate, value = grouped_matmul(permute(x.flatten(0, 1), order), up.transpose(1, 2), order.counts).chunk(2, 1)
    rows = grouped_matmul(F.silu(gate) * value, down.transpose(1, 2), order.counts)
    ours = unpermute(rows, order, weights).view_as(x)
    g = torch.randn_like(x)
    leaves = (x, up, down, block.gate.weight)
    for a, b in zip(
        (ours, *torch.autograd.grad(ours, leaves, g)), (theirs, *torch.autograd.grad(theirs, leaves, g)), strict=True
    ):
        assert error_of(a, b.double()) < 1e-5
