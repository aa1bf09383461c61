"""Grades chapter 11, the vocabulary: a table of which each rank has some rows, and a loss without a row of logits."""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from refimpl.grading.compare import equal, require
from refimpl.grading.exchange import DTYPES, attached, numbers, sends, silent
from refimpl.grading.grade import on_ranks
from refimpl.grading.memory import Kept, Largest, untouched
from refimpl.grading.rank import Answer, case
from refimpl.grading.traffic import WatchedGroup, same_traffic

BIG = 3e4  # as a logit: exp of it overflows


def runs(vocab: int, ranks: int) -> list[tuple[int, int]]:
    """Rows [first, stop) of each rank, the first ranks having one more."""
    each, more = divmod(vocab, ranks)
    starts = [rank * each + min(rank, more) for rank in range(ranks + 1)]
    return list(pairwise(starts))


@on_ranks(2, 3, 4)
def test_vocab_embedding(answer: Answer, group: WatchedGroup) -> None:
    for dtype, bad in [*((dtype, False) for dtype in DTYPES), (torch.float32, True)]:
        V, C = 11, 6
        case(f"a table [{V}, {C}] of {dtype}" + ", of which one row, looked up by nobody, is Inf" * bad)
        first, stop = runs(V, group.size)[group.rank]
        table = (numbers(V, C, seed=1) * 4 + 1).to(dtype)  # no zeros
        ids = torch.tensor([[0, 10, 5, 5, 3], [1, 9, 4, 6, 5]])
        if bad:
            last = runs(V, group.size)[-1][0]
            table[last], ids[ids == last] = torch.inf, 10
            ids = ids.flatten()  # of any shape
        grad, whole = numbers(*ids.shape, C, seed=2, dtype=dtype), table.clone().requires_grad_()
        expected = F.embedding(ids, whole)
        expected.backward(grad)
        part, fresh = table[first:stop].clone().requires_grad_(), group.fresh()
        with untouched(ids=ids, part=part):
            found = attached(answer.vocab_embedding(ids, part, first, fresh), "the result")
        if bad:
            why = "the result: it holds NaN: 0 times Inf is one. Zeros are filled in (masked_fill), not multiplied by"
            require(not bool(found.isnan().any()), why)
        equal(found.detach(), expected.detach(), "the result", known=mistaken(ids, table, group, first, stop))
        sends(fresh, "forward", expected.detach(), "all_reduce")
        found.backward(grad)
        silent(fresh, "backward", "the gradient that arrives is whole, and a rank's rows are its own")
        truth = whole.grad
        assert truth is not None
        known = {f"{group.size}x the expected: the gradient is whole already": truth[first:stop] * group.size}
        once = torch.zeros_like(table)
        once[ids] = grad  # of equal tokens the last
        said = "a token that stands there several times has one gradient: they add up, and grad[ids] = does not"
        known[said] = once[first:stop]
        equal(part.grad, truth[first:stop], "the gradient of this rank's rows", known=known)


def mistaken(ids: Tensor, table: Tensor, group: WatchedGroup, first: int, stop: int) -> dict[str, Tensor]:
    """Results that are wrong for a token of another rank's."""
    sums: dict[str, Tensor] = {}
    for a, b in runs(len(table), group.size):
        here = (ids >= a) & (ids < b)
        for name, place in {"zeroth": (ids - a) * here, "nearest": (ids - a).clamp(0, b - a - 1)}.items():
            sums[name] = sums.get(name, torch.zeros(())) + F.embedding(place, table[a:b])
    sentence = "a token of another rank's looks up a row of this one: its result must be zeros here"
    over = torch.zeros(())  # a row too many, which F.embedding would refuse, looks up the last one
    for a, b in runs(len(table), group.size):
        here = (ids >= a) & (ids <= b)
        over = over + F.embedding((ids - a).clamp(0, b - a - 1), table[a:b]).masked_fill(~here[..., None], 0)
    mine = (ids >= first) & (ids < stop)
    alone = F.embedding((ids - first) * mine, table[first:stop]).masked_fill(~mine[..., None], 0)
    equal_parts = torch.zeros(())
    for rank, (a, b) in enumerate(runs(len(table), group.size)):
        place = ids - rank * (b - a)
        here = (place >= 0) & (place < b - a)
        equal_parts = equal_parts + F.embedding(place * here, table[a:b]).masked_fill(~here[..., None], 0)
    return {
        sentence: sums["zeroth"],
        sentence + ".": sums["nearest"],
        "token first + v is the next rank's: the last of this one's is first + v - 1": over,
        "rows do not begin at rank * v, since v is not the same on all ranks: they begin at `first`": equal_parts,
        "this rank's rows alone: the others' are missing, is it summed by `leave`?": alone,
    }


def logits_of(V: int, n: int, group: WatchedGroup, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """All logits, some of them too large for exp on one rank and not on another; targets on every rank."""
    chance = torch.Generator().manual_seed(3)
    logits, targets = 3 * torch.randn(n, V, generator=chance), torch.randint(V, (n,), generator=chance)
    first = runs(V, group.size)[-1][0]
    logits[0] += BIG
    logits[1, first:] += BIG  # the last rank's part alone
    logits[2] -= 2 * BIG
    logits[3, first - 1] += BIG
    targets[:4] = torch.tensor([0, V - 1, first, first - 1])
    targets[4:8], targets[8:11] = 2, -100
    return logits.to(dtype), targets


@on_ranks(2, 3, 4)
def test_vocab_cross_entropy(answer: Answer, group: WatchedGroup) -> None:
    V, n = 242, 408  # rows that 2, 3 and 4 ranks share equally: numbers may travel in any messages
    first, stop = runs(V, group.size)[group.rank]
    for dtype in DTYPES:
        for ignore in (-100, 2):
            case(f"logits [{n}, {V}] of {dtype}, targets of {ignore} do not count")
            logits, targets = logits_of(V, n, group, dtype)
            targets = targets.where(targets != -100, ignore)
            judge_loss(answer, group, logits, targets, first, stop, ignore)
    case("a logit is NaN")
    spoilt = torch.zeros(4, stop - first)
    spoilt[0, 0] = torch.nan
    found = answer.vocab_cross_entropy(spoilt.requires_grad_(), torch.zeros(4, dtype=torch.int64), first, group.fresh())
    require(found.isnan(), f"a logit is NaN, and the loss {found.item():g}: what went wrong before passes unnoticed")
    case("backward twice, with retain_graph")
    part = torch.randn(4, stop - first, generator=torch.Generator().manual_seed(4)).requires_grad_()
    found = attached(answer.vocab_cross_entropy(part, torch.arange(4), first, group.fresh()), "the loss")
    once = torch.autograd.grad(found, part, retain_graph=True)[0].clone()
    again = torch.equal(once, torch.autograd.grad(found, part)[0])
    require(again, "the second backward gives another gradient: the first has changed what was kept, not a copy of it")
    case("no row counts")
    part = torch.randn(4, stop - first).requires_grad_()
    found = attached(answer.vocab_cross_entropy(part, torch.full((4,), -100), first, group.fresh()), "the loss")
    found.backward()
    require(found.item() == 0, f"the loss is {found.item()}, expected 0: no row counts, and 0/0 is not a number")
    assert part.grad is not None
    require(not part.grad.any(), "the gradient is not zero, and no row counts")


def judge_loss(
    answer: Answer, group: WatchedGroup, logits: Tensor, targets: Tensor, first: int, stop: int, ignore: int
) -> None:
    whole, part = logits.clone().requires_grad_(), logits[:, first:stop].clone().requires_grad_()
    expected = F.cross_entropy(whole.float(), targets, ignore_index=ignore)
    (expected * 3).backward()
    truth = whole.grad
    assert truth is not None
    truth, counts = truth[:, first:stop], targets != ignore
    kept, fresh, n = Kept(group), group.fresh(), len(logits)
    given = part * 1  # not kept by the caller
    with untouched(logits=given, targets=targets), Largest(floating=True) as largest:
        found = attached(answer.vocab_cross_entropy(given, targets, first, fresh, ignore), "the loss")
    del given
    equal(found.detach(), expected.detach(), "the loss", known=losses(whole, targets, counts, group))
    oracle = group.oracle()
    for times, op in ((1, "max"), (2, "sum")):
        oracle.all_reduce(torch.zeros(times * n), op=op)
    same_traffic(fresh, oracle, "forward", calls=False)
    fresh.ledger.reset()
    del oracle
    one = "one fp32 tensor as large as this rank's logits may stay, such as its probabilities, and a few numbers a row"
    kept.judge(4 * part.numel() + 64 * n, "between forward and backward the loss", one)
    arrived = torch.tensor(3.0)
    with untouched(logits=part, targets=targets, the_gradient_that_arrives=arrived), largest:
        found.backward(arrived)
    silent(fresh, "backward", "a rank knows its own probabilities, and whether it has the target")
    assert part.grad is not None
    gradient, some = part.grad, truth
    atol, scale = (3e-4 if logits.dtype == torch.bfloat16 else 1e-6), n / int(counts.sum())
    strangers, elsewhere = truth.clone(), counts & ((targets < first) | (targets >= stop))
    strangers[elsewhere, 0] -= 3 / counts.sum()
    known = {
        "a rank that has not got the target takes 1 off another logit, where it should take nothing": strangers,
        "it is not multiplied by the gradient that arrives": truth / 3,
        "divided by all rows, not by those that count": truth / scale,
        "rows that do not count have one": some + uncounted(whole, counts, first, stop),
    }
    equal(gradient, truth, "the gradient of the logits", known=known, rtol=1e-2, atol=atol)
    if logits.dtype == torch.float32:  # and nearer, where no logit is so large that lse is rounded far
        few = torch.equal(gradient, gradient.bfloat16().float())
        require(not few, "the gradient of the logits is rounded to 16 bits on the way, and the logits are fp32")
        equal(gradient[4:], truth[4:], "the gradient of the logits", rtol=1e-3, atol=1e-8)
    rows = max(b - a for a, b in runs(logits.shape[1], group.size)) * n
    require(
        largest.numel <= rows,
        f"a tensor of {largest.numel:,} numbers is made: this rank's logits are {part.numel():,}, all are "
        f"{logits.numel():,}, and no row is needed whole",
    )


def uncounted(whole: Tensor, counts: Tensor, first: int, stop: int) -> Tensor:
    """What is added to the gradient if rows that do not count are given their probabilities."""
    p = whole.detach().float().softmax(1)[:, first:stop] * (~counts)[:, None] * 3 / counts.sum()
    return p.to(whole.dtype)


def losses(whole: Tensor, targets: Tensor, counts: Tensor, group: WatchedGroup) -> dict[str, Tensor]:
    """Well-known mistakes of the loss."""
    z, spans = whole.detach().float(), runs(whole.shape[1], group.size)
    first, stop = spans[group.rank]
    rows = F.cross_entropy(z, targets.where(counts, 0), reduction="none") * counts
    # Each part less its own maximum; and the logit that a rank without the target takes for it.
    shifted = torch.cat([z[:, a:b] - z[:, a:b].amax(1, keepdim=True) for a, b in spans], 1)
    own = shifted.exp().sum(1).log() - shifted.gather(1, targets.where(counts, 0)[:, None]).squeeze(1)
    z_shifted, taken, bare = z - z.amax(1, keepdim=True), torch.zeros(len(z)), torch.zeros(len(z))
    wanted = z.gather(1, targets.where(counts, 0)[:, None]).squeeze(1)
    for a, b in spans:
        here = counts & (targets >= a) & (targets < b)
        place = ((targets - a) * here)[:, None]
        taken += z_shifted[:, a:b].gather(1, place).squeeze(1)
        bare += z[:, a:b].gather(1, place).squeeze(1)
    stranger = "a rank that has not got the target adds another logit for it, where it should add 0"
    return {
        "each rank subtracts the maximum of its own part: the sums of the ranks then do not fit together": (
            (own * counts).sum() / counts.sum()
        ),
        stranger: ((z_shifted.exp().sum(1).log() - taken) * counts).sum() / counts.sum(),
        stranger + ".": ((z.logsumexp(1) - bare) * counts).sum() / counts.sum(),
        "each rank subtracts the maximum of its own part, and adds that again: the ranks need one and the same": (
            ((shifted.exp().sum(1).log() + z[:, first:stop].amax(1) - wanted) * counts).sum() / counts.sum()
        ),
        "m is subtracted before exp, and not added to the logarithm again": (
            ((z_shifted.exp().sum(1).log() - wanted) * counts).sum() / counts.sum()
        ),
        "divided by all rows, not by those that count": rows.sum() / len(rows),
        "rows are counted in 16 bits, which know whole numbers up to 256 only": rows.sum() / counts.sum().bfloat16(),
        "the sum over the rows, not their mean": rows.sum(),
        "ignore_index is not looked at: it may be another than -100": F.cross_entropy(z, targets),
        "rows that do not count are counted: an ignored target is none, and the mean is over the others": (
            rows + z.logsumexp(1) * ~counts
        ).mean(),
        "rows that do not count are counted": F.cross_entropy(z, targets.where(counts, 0)),
        "a softmax over this rank's logits alone": (
            (z[:, first:stop].logsumexp(1) - z.gather(1, targets.where(counts, 0)[:, None]).squeeze(1)) * counts
        ).sum()
        / counts.sum(),
    }
