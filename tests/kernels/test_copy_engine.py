"""Attention that Hopper's copy engine (TMA) reads: what its descriptors name, interpreted, beside float64.

On such a GPU all 16-bit attention goes this way; elsewhere none does, and so no other test here.
"""

from unittest.mock import MagicMock

import pytest
import torch
from agreement import assert_agrees
from torch import Tensor

from refimpl.kernels import flash_shapes
from refimpl.kernels.block_sparse_attention import block_sparse_attention
from refimpl.kernels.block_sparse_attention import reference as sparse_reference
from refimpl.kernels.flash_attention import flash_attention, flash_attention_varlen, reference, reference_varlen
from refimpl.kernels.language import INTERPRETED

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="a GPU takes this way by itself, where it has it")
WIDTH = 24  # of a head: a multiple of 16 bytes, and no tile's width


@pytest.fixture(autouse=True)
def engine(monkeypatch: pytest.MonkeyPatch) -> MagicMock:
    always = MagicMock(return_value=True)
    monkeypatch.setattr(flash_shapes, "copy_engine", always)
    return always


def drawn(device: torch.device, *shape: int) -> Tensor:
    return torch.randn(*shape, device=device).half().requires_grad_()


def as_a_model_cuts(device: torch.device, batch: int, heads: int, tokens: int) -> Tensor:
    """[B, H, T, D], a head's rows H D elements apart: a descriptor's strides do not fall."""
    return drawn(device, batch, tokens, heads, WIDTH).transpose(1, 2).detach().requires_grad_()


def test_heads_that_share_keys_in_a_window(device: torch.device, engine: MagicMock) -> None:
    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash_attention(q, k, v, window=(20, 5), scale=0.3)

    def theirs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return reference(q, k, v, 20, 5, 0.3)

    q, k, v = (as_a_model_cuts(device, 2, heads, tokens) for heads, tokens in ((4, 70), (2, 75), (2, 75)))
    assert_agrees(ours, theirs, (q, k, v))
    assert engine.called


def test_sequences_of_unlike_lengths(device: torch.device, engine: MagicMock) -> None:
    """Behind the end of one sequence lies the next one, and not zeros; one has nothing."""
    starts = torch.tensor([0, 40, 40, 57], dtype=torch.int32, device=device)

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash_attention_varlen(q, k, v, starts, starts, causal=True, scale=0.3)

    def theirs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return reference_varlen(q, k, v, starts, starts, -1, 0, 0.3)

    assert_agrees(ours, theirs, tuple(drawn(device, 57, heads, WIDTH) for heads in (2, 1, 1)))
    assert engine.called


def test_blocks_of_a_layout(device: torch.device, engine: MagicMock) -> None:
    layout = torch.tensor([[1, 0, 0], [1, 1, 0], [0, 1, 1]], device=device).bool()

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return block_sparse_attention(q, k, v, layout, 32, causal=True, scale=0.3)

    def theirs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sparse_reference(q, k, v, layout, 32, causal=True, scale=0.3)

    assert_agrees(ours, theirs, tuple(as_a_model_cuts(device, 1, 2, 96) for _ in "qkv"))
    assert engine.called
