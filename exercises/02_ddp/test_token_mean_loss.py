"""Grades chapter 02's loss over ranks with different numbers of tokens: every token weighs the same."""

import torch
from torch import Tensor

from refimpl.grading.compare import equal, require
from refimpl.grading.grade import on_ranks
from refimpl.grading.memory import untouched
from refimpl.grading.rank import Answer, case
from refimpl.grading.traffic import WatchedGroup, same_traffic


@on_ranks(2, 3, 4)
def test_token_mean_loss(answer: Answer, group: WatchedGroup) -> None:
    for counts in ([1, 3, 2, 7], [5, 0, 1, 2], [300, 1, 2, 8], [5001, 1, 2, 8], [2, 0, 0, 0], [0, 0, 0, 0]):
        counts = counts[: group.size]
        case(f"{counts} tokens on the ranks")
        # One row more on every rank, which is masked.
        rows = [torch.randn(n + 1, 4, generator=torch.Generator().manual_seed(r)) for r, n in enumerate(counts)]
        data = [r[:-1] for r in rows]
        weight = torch.ones(4, requires_grad=True)
        watched = group.fresh()
        mask = torch.tensor([1.0] * counts[group.rank] + [0.0])
        own = ((rows[group.rank] @ weight).pow(2) * mask).sum()
        with untouched(loss_sum=own):
            found = answer.token_mean_loss(watched, own, counts[group.rank])
        require(
            isinstance(found, Tensor) and found.requires_grad, "the result is no loss that backward can be called on"
        )
        (mean,) = torch.autograd.grad(found, weight, allow_unused=True)
        require(
            mean is not None,
            f"with {counts[group.rank]} tokens of its own this rank returns a constant: no gradient comes from it, and "
            "the others wait for this rank's; return loss_sum times a number",
        )
        if not sum(counts):
            masked = "no rank has any token, and the gradient is NaN: 0/0; it must be 0, or the step spoils all weights"
            require(bool(mean.isfinite().all()), masked)
        group.oracle().all_reduce(mean, "mean")
        squares = [2 * (d @ torch.ones(4)) @ d for d in data]  # each rank's gradient of its sum
        total = torch.stack(squares).sum(0)
        rounded = max(1.0, float(torch.tensor(float(sum(counts))).bfloat16()))
        each = torch.stack([s / max(1, n) for s, n in zip(squares, counts, strict=True)])
        known = {
            "it is the mean of the ranks' means: a token on a rank with few weighs more": each.mean(0),
            "it is the sum over tokens: nothing divides by their number": total,
            "each loss is divided by this rank's own number of tokens, and summed": each.sum(0),
            "the number of tokens is rounded: 16 bits count to 256 only": total / rounded,
            "fewer tokens than ranks count as one a rank: ask only if there is any": total
            / max(sum(counts), len(counts)),
            "a rank without tokens counts as one token": total / sum(max(1, n) for n in counts),
        }
        equal(mean, total / max(1, sum(counts)), "the averaged gradient", ranks=group.size, known=known)
        most = group.oracle()
        most.all_reduce(torch.zeros(1))
        if watched.ledger.calls() != {"all_reduce": 1}:
            same_traffic(watched, most, "token_mean_loss")
        most.ledger.reset()
        most.all_reduce(torch.zeros(1, dtype=torch.float64))
        sent, room = (sum(g.ledger.sent_bytes().values()) for g in (watched, most))
        require(
            sent <= room,
            f"{sent} bytes, one number takes {room}: only the sum of the tokens is needed, of nothing else",
        )
    case("a loss in fp16, and 70000 tokens on rank 0")
    counted = "the tokens are counted in the loss's dtype: fp16 ends at 65504, and the loss is multiplied by 0"
    found = answer.token_mean_loss(group.fresh(), torch.full((), 6e4).half(), 70000 * (group.rank == 0))
    require(float(found) > 0, counted)
    large = "the loss times N is Inf: fp16 ends at 65504; divide N by the tokens first, then multiply the loss"
    require(bool(found.isfinite()), large)
