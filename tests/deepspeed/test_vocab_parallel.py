"""DeepSpeed's losses of parted vocabularies and sequences, beside torch's cross entropy of the whole."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from worlds import run

import refimpl.deepspeed as deepspeed
from refimpl.deepspeed.sequence import (
    VocabParallelCausalLMLoss,
    VocabParallelCrossEntropyLoss,
    vocab_parallel_cross_entropy,
    vocab_sequence_parallel_cross_entropy,
)
from refimpl.ranks.errors import RankError

T, B, V = 8, 2, 11  # of 11 tokens 3 ranks have 4, 4 and 3


def whole() -> tuple[Tensor, Tensor]:
    """Logits [T, B, V] and targets [T, B], of which two do not count."""
    generator = torch.Generator().manual_seed(0)
    targets = torch.randint(V, (T, B), generator=generator)
    targets[1, 0] = targets[5, 1] = -100
    return torch.randn(T, B, V, generator=generator), targets


def expected(reduction: str) -> tuple[Tensor, Tensor]:
    """torch's loss, weighted by its place so that each token's gradient differs, and the gradient [T, B, V]."""
    logits, targets = whole()
    logits.requires_grad_()
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction=reduction)
    loss = loss.view(T, B) if reduction == "none" else loss
    (loss * torch.linspace(1, 2, loss.numel()).view_as(loss)).sum().backward()
    assert logits.grad is not None
    return loss.detach(), logits.grad


def of_parts(reduction: Any, told: bool) -> tuple[Tensor, Tensor]:
    """Runs on every rank: the loss, and the gradient of this rank's logits."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    logits, targets = whole()
    parts = logits.tensor_split(ranks, -1)
    mine = parts[rank].clone().requires_grad_()
    start = sum(p.shape[-1] for p in parts[:rank])
    bounds = {"vocab_start_index": start, "vocab_end_index": start + mine.shape[-1]} if told else {}
    loss_fn = VocabParallelCrossEntropyLoss(dist.group.WORLD, reduction=reduction, **bounds)
    loss = loss_fn(mine, targets)
    (loss * torch.linspace(1, 2, loss.numel()).view_as(loss)).sum().backward()
    assert mine.grad is not None
    return loss.detach(), mine.grad


@pytest.mark.parametrize(("reduction", "ranks", "told"), [("mean", 2, False), ("sum", 3, True), ("none", 3, False)])
def test_of_a_part_of_the_vocabulary_a_rank_has(reduction: str, ranks: int, told: bool) -> None:
    loss, gradient = expected(reduction)
    found = run(of_parts, reduction, told, ranks=ranks)
    for there, _ in found:
        torch.testing.assert_close(there, loss)
    torch.testing.assert_close(torch.cat([part for _, part in found], -1), gradient)


def of_both(reduction: Any) -> tuple[Tensor, Tensor]:
    """Runs on each of 2 x 2 ranks: a half of the vocabulary, of a half of the tokens."""
    rank = dist.get_rank()
    tensor, sequence = (
        deepspeed.comm.new_group(ranks) for ranks in (([0, 1], [2, 3])[rank // 2], (rank % 2, rank % 2 + 2))
    )
    logits, targets = whole()
    mine = logits.chunk(2)[rank // 2].tensor_split(2, -1)[rank % 2].clone().requires_grad_()
    words = targets.chunk(2)[rank // 2]
    if reduction == "none":
        loss = vocab_sequence_parallel_cross_entropy(mine, words, sequence, tp_group=tensor)
    else:
        loss = vocab_parallel_cross_entropy(mine, words, tensor, sequence, reduction=reduction)
    (loss * torch.linspace(1, 2, loss.numel()).view_as(loss)).sum().backward()
    assert mine.grad is not None
    return loss.detach(), mine.grad


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_of_a_part_of_the_sequence_too(reduction: str) -> None:
    """Both ranks of a sequence ask for a token's gradient, of which the engine takes the mean."""
    loss, gradient = expected(reduction)
    found = run(of_both, reduction, ranks=4)
    for there, _ in found:
        torch.testing.assert_close(there, loss)
    rows = [torch.cat([part for _, part in found[at : at + 2]], -1) for at in (0, 2)]
    torch.testing.assert_close(torch.cat(rows) / 2, gradient)


def causal() -> list[Tensor]:
    """Runs on every rank: losses of [B, T, V] by transformers' arguments."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    logits, targets = (x.transpose(0, 1) for x in whole())
    parts = logits.tensor_split(ranks, -1)
    loss = VocabParallelCausalLMLoss(dist.group.WORLD)
    mine = parts[rank]
    found = [loss(mine, targets, vocab_size=V), loss(mine, targets, num_items_in_batch=torch.tensor(5))]
    found.append(loss(mine[:, :-1], shift_labels=targets[:, 1:]))
    with pytest.raises(RuntimeError, match="make one for each head"):
        loss(mine[..., 1:], targets)
    with pytest.raises(ValueError, match="give labels, or shift_labels"):
        loss(mine)
    return found


def test_a_models_loss_of_the_next_tokens() -> None:
    logits, targets = (x.transpose(0, 1) for x in whole())
    mean = F.cross_entropy(logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten())
    count = (targets[:, 1:] != -100).sum()
    for by_labels, by_items, by_shifted in run(causal, ranks=2):
        torch.testing.assert_close(by_labels, mean)
        torch.testing.assert_close(by_items, mean * count / 5)
        torch.testing.assert_close(by_shifted, mean)


def test_alone_it_is_torchs() -> None:
    logits, targets = whole()
    torch.testing.assert_close(vocab_parallel_cross_entropy(logits, targets), expected("mean")[0])
    nothing = torch.full_like(targets, -100)
    assert vocab_parallel_cross_entropy(logits, nothing).item() == 0
    with pytest.raises(ValueError, match="a target is beyond the vocabulary, 0 to 10"):
        vocab_parallel_cross_entropy(logits, targets + V)
    for wrong in (
        {"reduction": "max"}, {"gather_sequence_loss": True}, {"vocab_start_index": 0}, {"global_vocab_size": 11},
        {"vocab_start_index": 1, "vocab_end_index": 12}, {"backend": "flash"},
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"reduction|both|join"):
            vocab_parallel_cross_entropy(logits, targets, **wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="all but the last dimension"):
        vocab_parallel_cross_entropy(logits, targets[1:])
    with pytest.warns(UserWarning, match="torch's operations are taken"):
        vocab_parallel_cross_entropy(logits, targets, backend="liger")


def apart() -> None:
    logits, targets = whole()
    vocab_parallel_cross_entropy(logits, targets, dist.group.WORLD, vocab_start_index=0, vocab_end_index=V)


def test_parts_that_are_not_joined_are_told_on_every_rank() -> None:
    with pytest.raises(RankError, match="tensor rank 1 has 11 logits, as tokens 0 to 11: parts must join"):
        run(apart, ranks=2)


def swapped() -> Tensor:
    """Runs on both ranks: what the other one had, by one batch of messages."""
    rank = dist.get_rank()
    mine, theirs = torch.full((3,), rank), torch.empty(3, dtype=torch.int64)
    comm = deepspeed.comm
    batch = [comm.P2POp(comm.isend, mine, 1 - rank), comm.P2POp(comm.irecv, theirs, 1 - rank)]
    for work in comm.batch_isend_irecv(batch):
        work.wait()
    with pytest.raises(ValueError, match=r"neither deepspeed\.comm\.isend nor"):
        comm.P2POp(comm.send, mine, 1 - rank)
    return theirs


def test_a_batch_of_messages() -> None:
    assert [x.tolist() for x in run(swapped, ranks=2)] == [[1] * 3, [0] * 3]


def lonely() -> None:
    """Runs on each of 2 ranks: a call that says only who shares the vocabulary, or nobody at all."""
    logits, targets = whole()
    with pytest.raises(ValueError, match="give sp_group"):
        vocab_sequence_parallel_cross_entropy(logits, targets, None, dist.group.WORLD)
    own = vocab_sequence_parallel_cross_entropy(logits, targets, None, reduction="sum", gather_sequence_loss=False)
    torch.testing.assert_close(own, expected("sum")[0])


def test_without_a_group_of_its_own_no_rank_is_of_the_sequence() -> None:
    run(lonely, ranks=2)


def small() -> Tensor:
    """Runs on every rank: the loss of targets that a loader keeps in a byte each."""
    logits, targets = whole()
    words = targets.masked_fill(targets == -100, 255).to(torch.uint8)
    mine = logits.tensor_split(dist.get_world_size(), -1)[dist.get_rank()]
    return vocab_parallel_cross_entropy(mine, words, dist.group.WORLD, ignore_index=255)


def test_targets_of_any_integers() -> None:
    loss, _ = expected("mean")
    torch.testing.assert_close(run(small, ranks=2), [loss, loss])
    logits, targets = whole()
    torch.testing.assert_close(vocab_parallel_cross_entropy(logits, targets.int()), loss)
