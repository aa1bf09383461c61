"""DeepSpeed's losses that never have all logits wide, or all logits: values, gradients, and what they keep."""

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from worlds import run

from refimpl.deepspeed.runtime.chunked_cross_entropy import (
    ChunkedCausalLMLoss,
    chunked_cross_entropy,
    install_chunked_causal_lm_loss,
)
from refimpl.deepspeed.sequence.linear_cross_entropy import vocab_parallel_linear_cross_entropy

M, D, V = 10, 5, 11


def drawn(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden [M, D], head [V, D], its bias [V], targets [M] of which two do not count."""
    generator = torch.Generator().manual_seed(0)
    hidden, head, bias = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((M, D), (V, D), (V,)))
    targets = torch.randint(V, (M,), generator=generator)
    targets[3] = targets[8] = -100
    return hidden, head, bias, targets


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_of_rows_change_nothing(reduction: Any, dtype: torch.dtype) -> None:
    hidden, head, _, targets = drawn(dtype)
    mine, plain = ((hidden @ head.T).requires_grad_() for _ in range(2))
    kept: list[torch.dtype] = []
    with saved_tensors_hooks(lambda t: kept.append(t.dtype) or t, lambda t: t):  # type: ignore[func-returns-value]
        loss = chunked_cross_entropy(mine, targets, reduction=reduction, block_rows=3)
    expected = F.cross_entropy(plain.float(), targets, reduction=reduction)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    assert dtype == torch.float32 or torch.float32 not in kept, "no wide logits wait for backward"
    for each in (loss, expected):
        (each * torch.linspace(1, 2, each.numel()).view_as(each)).sum().backward()
    torch.testing.assert_close(mine.grad, plain.grad)


def test_of_no_target_the_mean_is_not_a_number_and_of_no_row_the_sum_is_0() -> None:
    logits = torch.zeros(2, V)
    assert chunked_cross_entropy(logits, torch.full((2,), -100)).isnan()
    assert chunked_cross_entropy(logits[:0], torch.zeros(0, dtype=torch.long), reduction="sum") == 0


def causal(logits: Tensor, labels: Tensor, items: Tensor | None = None) -> Tensor:
    """As transformers' ForCausalLMLoss."""
    reduction = "mean" if items is None else "sum"
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction=reduction) / (items or 1)


def test_what_transformers_calls_loss_function(monkeypatch: pytest.MonkeyPatch) -> None:
    stub = ModuleType("transformers.loss.loss_utils")
    vars(stub)["ForCausalLMLoss"] = causal
    for name in ("transformers", "transformers.loss"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, stub.__name__, stub)
    model = nn.Linear(1, 1)
    with pytest.raises(ValueError, match="not transformers' ForCausalLMLoss"):
        install_chunked_causal_lm_loss(model)
    vars(model)["loss_function"] = causal
    loss_fn = install_chunked_causal_lm_loss(model, block_rows=3)
    assert model.loss_function is loss_fn
    logits, labels, items = torch.randn(2, 6, V), torch.randint(V, (2, 6)), torch.tensor(7)
    torch.testing.assert_close(loss_fn(logits, labels, V), causal(logits, labels))
    torch.testing.assert_close(loss_fn(logits, labels, V, items), causal(logits, labels, items))
    ahead = F.pad(labels, (0, 1), value=-100)[:, 1:]
    torch.testing.assert_close(loss_fn(logits, None, V, shift_labels=ahead), causal(logits, labels))


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"block_rows": 0}, ValueError, "block_rows=0"),
        ({"backend": "cuda"}, ValueError, "one of auto, triton, torch"),
        ({"backend": "triton"}, RuntimeError, "no GPU"),
        ({"reduction": "max"}, ValueError, "none, sum and mean"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        chunked_cross_entropy(torch.zeros(2, V), torch.zeros(2, dtype=torch.long), **options)
    with pytest.raises(ValueError, match=r"\[M, V\]"):
        chunked_cross_entropy(torch.zeros(2, V), torch.zeros(3, dtype=torch.long))
    with pytest.raises(ValueError, match="one of auto"):
        ChunkedCausalLMLoss(backend="cuda")  # type: ignore[arg-type]


def fused(reduction: Any, chunk: int | None, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Runs on every rank: the loss, and the gradients of hidden and of this rank's part of the head."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    hidden, head, bias, targets = drawn(dtype)
    mine = [hidden, *(whole.tensor_split(ranks)[rank] for whole in (head, bias))]
    hidden, head, bias = (x.clone().requires_grad_() for x in mine)
    group = dist.group.WORLD
    loss = vocab_parallel_linear_cross_entropy(
        hidden.view(2, -1, D), head, targets.view(2, -1), bias, group, reduction=reduction, chunk_size=chunk
    )
    (loss * torch.linspace(1, 2, loss.numel()).view_as(loss)).sum().backward()
    assert hidden.grad is not None
    assert head.grad is not None
    assert bias.grad is not None
    return loss.detach(), hidden.grad, head.grad, bias.grad


@pytest.mark.parametrize(
    ("reduction", "ranks", "chunk", "dtype"),
    [
        ("mean", 2, 3, torch.float32),
        ("sum", 3, None, torch.float32),
        ("none", 3, 4, torch.float32),
        ("mean", 2, 1, torch.bfloat16),
    ],
)
def test_of_a_parted_head_the_logits_are_never_all_there(
    reduction: str, ranks: int, chunk: int | None, dtype: torch.dtype
) -> None:
    """In bf16 the chunks' gradients of a weight are added in fp32: they are as near as one product's."""
    hidden, head, bias, targets = (x.clone() for x in drawn(dtype))
    leaves = [x.requires_grad_() for x in (hidden, head, bias)]
    loss = F.cross_entropy(F.linear(*leaves).float(), targets, reduction=reduction)
    (loss * torch.linspace(1, 2, loss.numel()).view_as(loss)).sum().backward()
    close = {"rtol": 1e-2, "atol": 4e-3} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-6}
    found = run(fused, reduction, chunk, dtype, ranks=ranks)
    for there, of_hidden, _, _ in found:
        torch.testing.assert_close(there.flatten(), loss.detach().flatten(), **close)
        torch.testing.assert_close(of_hidden, hidden.grad, **close)
    for leaf, place in ((head, 2), (bias, 3)):
        torch.testing.assert_close(torch.cat([each[place] for each in found]), leaf.grad, **close)
