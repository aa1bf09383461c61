"""Every operation, of tensors laid out in every way that torch has, gives what it gives for their contiguous copies."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from refimpl.kernels.adamw import adamw
from refimpl.kernels.block_sparse_attention import block_sparse_attention
from refimpl.kernels.case import wave
from refimpl.kernels.cross_entropy import cross_entropy
from refimpl.kernels.dropout import dropout
from refimpl.kernels.flash_attention import flash_attention, flash_attention_varlen
from refimpl.kernels.glu import geglu, swiglu
from refimpl.kernels.grouped_matmul import grouped_matmul
from refimpl.kernels.layer_norm import layer_norm
from refimpl.kernels.linear_cross_entropy import linear_cross_entropy
from refimpl.kernels.multi_norm import multi_norm
from refimpl.kernels.paged_attention import paged_attention
from refimpl.kernels.permute import permute, sort_by_expert, unpermute
from refimpl.kernels.quantize import dequantize, quantize
from refimpl.kernels.rms_norm import rms_norm
from refimpl.kernels.rotary import rotary
from refimpl.kernels.softmax import softmax
from refimpl.kernels.topk_gate import topk_gate

View = Callable[[Tensor], Tensor]
LAYOUTS: dict[str, View] = {
    "transposed": lambda x: x.mT.contiguous().mT,
    "every second element": lambda x: torch.stack((x, x + 1), -1)[..., 0],
    "every second row": lambda x: torch.stack((x, x + 1), -2)[..., 0, :],
    "an odd offset": lambda x: torch.cat((x.flatten()[:1], x.flatten()))[1:].view(x.shape),
    "expanded rows": lambda x: x[..., :1, :].expand_as(x),
    "expanded elements": lambda x: x[..., :1].expand_as(x),
    "a minus sign that is not in memory": lambda x: torch.complex(torch.zeros_like(x), -x).conj().imag,
}
AIMS = torch.tensor([3, 0, 5, 1, 2, 4])
EXPERTS = torch.tensor([[0, 2], [1, 0], [2, 1], [0, 1], [2, 0], [1, 2]])
STARTS = torch.tensor([0, 2, 6], dtype=torch.int32)
COUNTS = torch.tensor([4, 2])
PAGES, LENGTHS = torch.tensor([[1, 0], [0, 2]]), torch.tensor([5, 3])
BLOCKS = torch.tensor([[[True, False], [True, True]]])
CALLS: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]]]] = {
    "rms_norm": (lambda x, w: rms_norm(x, w[0]), [(6, 8), (2, 8)]),
    "layer_norm": (lambda x, w: layer_norm(x, w[0], w[1]), [(6, 8), (2, 8)]),
    "softmax": (softmax, [(6, 8)]),
    "softmax of columns": (lambda x: softmax(x, 0), [(6, 8)]),
    "cross_entropy": (lambda x: cross_entropy(x, AIMS.to(x.device)), [(6, 8)]),
    "linear_cross_entropy": (
        lambda x, w, b: linear_cross_entropy(x, w, AIMS.to(x.device), b[0]),
        [(6, 8), (9, 8), (1, 9)],
    ),
    "swiglu": (swiglu, [(6, 8), (6, 8)]),
    "geglu": (geglu, [(2, 6, 8), (2, 6, 8)]),
    "rotary": (rotary, [(1, 3, 6, 8), (6, 4), (6, 4)]),
    "rotary of pairs": (lambda x, c, s: rotary(x, c, s, interleaved=True), [(1, 3, 6, 8), (6, 3), (6, 3)]),
    "dropout": (lambda x: dropout(x, 0.3, 7), [(6, 8)]),
    "multi_norm": (lambda *x: multi_norm(x), [(6, 8), (2, 3, 5)]),
    "flash_attention": (
        lambda q, k, v: flash_attention(q, k, v, causal=True),
        [(2, 1, 6, 8), (2, 1, 9, 8), (2, 1, 9, 8)],
    ),
    "flash_attention_varlen": (
        lambda q, k, v: flash_attention_varlen(q, k, v, STARTS.to(q.device), STARTS.to(q.device)),
        [(6, 1, 8), (6, 1, 8), (6, 1, 8)],
    ),
    "block_sparse_attention": (
        lambda q, k, v: block_sparse_attention(q, k, v, BLOCKS.to(q.device), 16),
        [(1, 2, 32, 8), (1, 1, 32, 8), (1, 1, 32, 8)],
    ),
    "paged_attention": (
        lambda q, k, v: paged_attention(q.detach(), k.detach(), v.detach(), PAGES.to(q.device), LENGTHS.to(q.device)),
        [(2, 2, 8), (3, 4, 1, 8), (3, 4, 1, 8)],
    ),
    "permute": (lambda x: permute(x, sort_by_expert(EXPERTS.to(x.device), 3)), [(6, 8)]),
    "unpermute": (lambda x, w: unpermute(x, sort_by_expert(EXPERTS.to(x.device), 3), w), [(12, 8), (6, 2)]),
    "grouped_matmul": (lambda x, w: grouped_matmul(x, w, COUNTS.to(x.device)), [(7, 8), (2, 8, 5)]),
    "topk_gate": (lambda x: topk_gate(x, 3), [(6, 8)]),
    "topk_gate that sums to 1": (lambda x: topk_gate(x, 3, normalise=True), [(6, 8)]),
    "quantize": (lambda x: dequantize(*quantize(x, 16), 16), [(6, 8)]),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_view_gives_what_its_copy_gives(device: torch.device, name: str) -> None:
    call, shapes = CALLS[name]
    values = [torch.randn(shape, device=device).requires_grad_() for shape in shapes]
    plain = results(call, values, lambda x: x)
    for layout, view in LAYOUTS.items():
        laid = [view(x.detach()).requires_grad_() for x in values]
        found, expected = results(call, laid, view), plain
        if "expanded" in layout:  # other values
            copies = [torch.empty(x.shape, device=device).copy_(x.detach()).requires_grad_() for x in laid]
            expected = results(call, copies, lambda x: view(x).contiguous())  # noqa: B023
        assert len(found) == len(expected)
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, msg=lambda text: f"{layout}: {text}")  # noqa: B023


def results(call: Callable[..., Any], inputs: list[Tensor], view: View) -> list[Tensor]:
    """The results, and the gradients of the inputs that have one, for a gradient that is laid out so too."""
    given = call(*inputs)
    made = list(given) if isinstance(given, tuple) else [given]
    learned = [y for y in made if y.requires_grad]
    grads = [view(wave(y)) if y.dim() > 1 else None for y in learned]
    leaves = torch.autograd.grad(learned, inputs, grads, allow_unused=True) if learned else ()
    return [y.detach() for y in made] + [g for g in leaves if g is not None]


def test_adamw_takes_any_offset_and_refuses_what_has_gaps(device: torch.device) -> None:
    one = torch.ones((), device=device)
    whole = [torch.rand(4, 71, device=device) for _ in range(2)]
    whole[1] = whole[0].clone()
    low = torch.zeros(71, device=device, dtype=torch.float16)
    adamw(*(x[3:] for x in whole[0]), one, 0.1, low=low[3:])  # addresses that are no multiple of 16 bytes
    copies = [x[3:].clone() for x in whole[1]]
    adamw(*copies, one, 0.1)
    for ours, before, theirs in zip(whole[0], whole[1], copies, strict=True):
        torch.testing.assert_close(ours[3:], theirs)
        assert torch.equal(ours[:3], before[:3])
    assert torch.equal(low[3:], whole[0][0, 3:].half())
    assert low[:3].count_nonzero() == 0
    gaps = torch.rand(5, 68, 2, device=device)[..., 0]
    names = ("weights", "grad", "first", "second", "low")
    for wrong, name in enumerate(names):
        given = [gaps[i] if i == wrong else gaps[i].clone() for i in range(5)]
        with pytest.raises((TypeError, ValueError), match=f"adamw: {name} must be contiguous"):
            adamw(*given[:4], one, 0.1, low=given[4])
