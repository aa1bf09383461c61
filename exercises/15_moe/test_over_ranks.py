"""Grades chapter 15's agreements: loads and capacities of all ranks, whose gradients are summed, two-level exchange."""

import math
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from refimpl.grading.compare import Wrong, equal, require
from refimpl.grading.exchange import attached, numbers
from refimpl.grading.grade import on_ranks
from refimpl.grading.memory import untouched
from refimpl.grading.rank import Answer, case
from refimpl.grading.traffic import WatchedGroup, same_traffic

BIG = 2**24  # fp32 knows no odd number above it


def sends_numbers(group: WatchedGroup, what: str, number: int, op: str = "sum") -> None:
    """Raise Wrong unless one all-reduce of so many int64 numbers was all."""
    oracle = group.oracle()
    oracle.all_reduce(torch.zeros(number, dtype=torch.int64), op="max" if op == "max" else "sum")
    same_traffic(group, oracle, what)


@on_ranks(2, 3, 4)
def test_rebalance(answer: Answer, group: WatchedGroup) -> None:
    n = group.size
    loads = {
        "one expert has the mean of all ranks": [[5 + r, 1, 3, 3 - r] for r in range(n)],
        "what one rank has too much another has too little": [
            [1, 9, 5, 5] if r else [9 + 8 * n, 1, 5, 5] for r in range(n)
        ],
        "all even": [[2, 2, 2, 2]] * n,
        "one expert gets all": [[0, 0, 7, 0]] * n,
        "rank 0 has no tokens": [[0, 0, 0, 0] if not r else [1, 5, 2, 0] for r in range(n)],
        "one token among 2^26": [[BIG + (r == 0), BIG, BIG, BIG] for r in range(n)],
    }
    for name, counts in loads.items():
        mine, total = torch.tensor(counts[group.rank]), torch.tensor(counts).sum(0)
        case(f"{name}: this rank's counts {mine.tolist()}, of all ranks {total.tolist()}")
        bias, watched = torch.tensor([0.5, 0.0, -0.25, 0.0]), group.fresh()
        memory = bias.data_ptr()
        start, local = bias.clone(), mine.double().mean() - mine
        with untouched(counts=mine):
            answer.rebalance(bias, mine, 0.125, watched)
        less = (total.sum() - 4 * total).sign().float()
        votes = torch.stack([(sum(each) - 4 * torch.tensor(each)).sign() for each in counts]).sum(0)
        known = {
            "fp32 cannot tell the counts apart: compare whole numbers": start
            + 0.125 * (total.float().mean() - total.float()).sign(),
            "by this rank's tokens alone: the ranks' biases drift apart": start + 0.125 * local.sign().float(),
            "each rank compares and has a vote, however few its tokens: add up the counts, then compare": (
                start + 0.125 * votes.sign()
            ),
            "the wrong way: an expert with too much is raised": start - 0.125 * less,
            "the mean is rounded down: compare with E times each": start + 0.125 * (total.sum() // 4 - total).sign(),
            "by the share that is missing: it is `rate`, up or down": (
                start + 0.125 * (0.25 - total.float() / max(1, int(total.sum())))
            ),
            "as much as is missing: it is `rate`, up or down": start + 0.125 * (total.float().mean() - total),
            "as much as is missing, in means: it is `rate`, up or down": (
                start + 0.125 * (1 - 4 * total / max(1, int(total.sum())))
            ),
            "nothing has changed: bias is changed in place": start,
            "the mean of the biases is taken off: each moves by `rate`, or stays": (
                start + 0.125 * less - (start + 0.125 * less).mean()
            ),
            "one that has the mean is moved too": start + 0.125 * torch.where(less == 0, 1.0, less),
            "one that has the mean is moved too.": start + 0.125 * torch.where(less == 0, -1.0, less),
        }
        expected = start + 0.125 * less
        equal(bias, expected, "the bias", known={s: t for s, t in known.items() if not torch.equal(t, expected)})
        require(bias.data_ptr() == memory, "bias lies in other memory now: in place is where the model has it")
        sends_numbers(watched, "rebalance", 4)


@on_ranks(2, 3, 4)
def test_agreed_capacity(answer: Answer, group: WatchedGroup) -> None:
    everyone = {
        "the last batch is shorter": ([64, 64, 64, 40][-group.size :], 8, 1, 1.0),
        "the example": ([6, 10, 8, 6], 4, 2, 1.25),
        "a rank has no tokens": ([0, 9, 5, 0], 2, 1, 2.0),
        "fewer places than one a token": ([3, 2, 1, 3], 8, 1, 1.5),
        "no tokens anywhere": ([0, 0, 0, 0], 4, 2, 1.0),
        "more places than tokens": ([3, 2, 3, 1], 3, 2, 4.0),
        "more than fp32 can count": ([BIG + 1, 5, 3, 2], 1, 1, 1.0),
    }
    for name, (each, experts, k, factor) in everyone.items():
        each, watched = each[: group.size], group.fresh()
        case(f"{name}: tokens {each}, {experts} experts, k = {k}, factor {factor}")
        found = answer.agreed_capacity(each[group.rank], experts, k, factor, watched)
        require(type(found) is int, f"the result is {found!r}, expected an int")
        told, most = group.everyone(found), max(each)
        expected = math.ceil(factor * k * most / experts)
        details = [f"  capacities {told}, expected {expected}"]
        same = (
            "the ranks' capacities differ: their buffers do not fit together. This rank's tokens are not all there is"
        )
        require(len(set(told)) == 1, same, *details)
        wrong = {
            "k is not in it: a token has k routes": math.ceil(factor * most / experts),
            "the factor is not in it": math.ceil(k * most / experts),
            "rounded up for each choice: once, for all k": k * math.ceil(factor * most / experts),
            "not more than the tokens of a rank: it is ceil(factor k T / E) all the same": min(expected, most),
            "without tokens there is nothing to make room for: 0": max(1, expected),
            "rounded down: ceil": math.floor(factor * k * most / experts),
            "the smallest rank's T: the others drop what has room": math.ceil(factor * k * min(each) / experts),
            "all ranks' tokens, added: buffers N times too large": math.ceil(factor * k * sum(each) / experts),
            "the mean T: a fuller rank drops what it need not": math.ceil(factor * k * sum(each) / len(each) / experts),
        }
        if found != expected:
            raise Wrong(
                next(
                    (s for s, n in wrong.items() if n == found),
                    f"the capacity is wrong: {found}, and ceil(factor k T / E) is {expected}",
                ),
                *details,
            )
        sends_numbers(watched, "agreed_capacity", 1, "max")


@on_ranks(2, 3, 4)
def test_balance_loss(answer: Answer, group: WatchedGroup) -> None:
    E = 6
    kinds = {"two choices": ([8] * 4, 2), "unequally many tokens, one rank has none": ([5, 0, 9, 2], 2),
             "everything goes to expert 2": ([4] * 4, 1), "no tokens anywhere": ([0] * 4, 2)}  # fmt: skip
    for name, (tokens, k) in kinds.items():
        for dtype in (torch.float32, torch.bfloat16)[: 2 if name == "two choices" else 1]:
            case(f"{name}: tokens {tokens[: group.size]}, {E} experts, k = {k}, {dtype}")
            every = [numbers(t, E, seed=30 + r) for r, t in enumerate(tokens[: group.size])]
            if k == 1:
                every = [x.index_fill(1, torch.tensor(2), 9.0) for x in every]
            chosen = [x.argsort(dim=1, descending=True, stable=True)[:, :k] for x in every]
            judge_balance(answer, group.fresh(), [x.to(dtype) for x in every], chosen)


def judge_balance(answer: Answer, group: WatchedGroup, every: list[Tensor], chosen: list[Tensor]) -> None:
    logits, experts = every[group.rank].clone().requires_grad_(), chosen[group.rank]
    truth = logits.detach().clone().requires_grad_()
    with untouched(logits=logits, experts=experts):
        found = answer.balance_loss(logits, experts, group)
    E, T = logits.shape[1], max(len(logits), 1)
    counts = torch.cat(chosen).flatten().bincount(minlength=E)
    own = experts.flatten().bincount(minlength=E)
    mean = truth.float().softmax(1).sum(0) / T
    low = truth.detach().softmax(1)
    likeliest = torch.cat(every).argmax(1).bincount(minlength=E)
    expected = E * (counts / max(int(counts.sum()), 1) * mean).sum()
    value = expected.detach()
    mean_here = mean.detach()
    known = {
        "f is of this rank's tokens alone: a rank's few tokens are never even": (
            E * (own / max(int(own.sum()), 1) * mean_here).sum()
        ),
        "the mean is over all ranks' tokens: P is over this rank's": (
            value * T * experts.shape[1] / max(int(counts.sum()), 1)
        ),
        "P is of all ranks' tokens: it is the mean over this rank's": (
            E * (counts / max(int(counts.sum()), 1) * torch.cat(every).float().softmax(1).mean(0)).sum()
        ),
        "the factor E is missing: even experts make it 1": value / E,
        "f is divided by the tokens, not by the routes: it is k where all is even": value * experts.shape[1],
        "f counts each token's likeliest expert: count all its routes, as `experts` says": (
            E * (likeliest / max(int(likeliest.sum()), 1) * mean_here).sum()
        ),
    }
    for end, sums in (("", low.float().sum(0)), (".", low.sum(0))):
        known[f"the softmax is in bf16: 8 bits are too few for a gate{end}"] = (
            E * (counts / max(int(counts.sum()), 1) * sums / T).sum()
        )
    if isinstance(found, Tensor) and not bool(found.detach().isfinite().all()):
        raise Wrong(f"the loss is {found.item()}: a rank, or all of them, can have no tokens, and 0/0 is not a number")
    equal(found, value, "the loss", known={s: t for s, t in known.items() if not torch.allclose(t, value)})
    sends_numbers(group, "balance_loss", E)
    attached(found, "the loss" if len(logits) else "the loss, 0, of a rank without tokens").backward()
    expected.backward()
    assert truth.grad is not None
    # logits - logsumexp has two gradients, of which each is rounded to bf16 before they are added up.
    rtol, atol = (2e-2, 1e-3) if logits.dtype == torch.bfloat16 else (1e-4, 1e-6)
    equal(logits.grad, truth.grad, "the gradient of the logits", rtol=rtol, atol=atol)


def lines(group: WatchedGroup) -> Iterator[tuple[int, WatchedGroup]]:
    """ep, and the ranks that have the same experts as this one: those with its place in each block of ep ranks."""
    for ep in (n for n in range(1, group.size + 1) if group.size % n == 0):
        yield ep, of_ranks([r for r in range(group.size) if r % ep == group.rank % ep], group)


def of_ranks(ranks: list[int], group: WatchedGroup) -> WatchedGroup:
    handle = dist.new_group(ranks, use_local_synchronization=True) if len(ranks) > 1 else None
    return WatchedGroup(handle, group.control)


def parameters(rank: int, seed: int, missing: bool) -> list[nn.Parameter]:
    """With this rank's gradients; of odd shapes, in two dtypes, one frozen, one that is None on some ranks."""
    found = []
    for i, (shape, dtype) in enumerate([((12, 5), torch.float32), ((24,), torch.bfloat16), ((4, 3), torch.float32)]):
        p = nn.Parameter(torch.zeros(shape, dtype=dtype))
        p.grad = numbers(*shape, seed=seed + 10 * rank + i, dtype=dtype)
        if i == 0:
            p.grad = p.grad.t().contiguous().t()
        if i and missing:
            p.grad = None
        found.append(p)
    frozen = nn.Parameter(torch.zeros(12), requires_grad=False)
    return [*found, frozen]


@on_ranks(2, 3, 4)
def test_average_gradients(answer: Answer, group: WatchedGroup) -> None:
    for ep, same in lines(group):
        n = group.size
        case(f"{n} ranks, of which {n // ep} have the same experts (ep = {ep}); some gradients are None on even ranks")
        home = group.rank % ep
        dense = [parameters(r, 100, r % 2 == 0) for r in range(n)]
        experts = [parameters(r, 500 + 100 * (r % ep), r % 2 == 0) for r in range(n)]
        mine, own = dense[group.rank], experts[group.rank]
        world, line = group.fresh(), same.fresh()
        held = [[None if p.grad is None else p.grad.clone() for p in params] for params in (mine, own)]
        sums = summed(dense), summed([experts[r] for r in range(n) if r % ep == home])
        mixed = summed(experts)
        with untouched(dense=mine, experts=own):
            answer.average_gradients(mine, own, world, line)
        for what, params, totals, before in (("dense", mine, sums[0], held[0]), ("expert", own, sums[1], held[1])):
            for i, (p, total, grad) in enumerate(zip(params, totals, before, strict=True)):
                if not p.requires_grad:
                    require(p.grad is None, "a frozen parameter has a gradient now")
                    continue
                missing = "a gradient that is None on this rank stays None: other ranks have one, and it counts as 0"
                require(p.grad is not None, missing)
                known = {"this rank's own, not summed": totals_of([params], i) / n} if n == 1 else {}
                if what == "expert":
                    known["the mean over all ranks' experts: other ranks have other experts"] = mixed[i] / n
                    known[
                        f"divided by the {n // ep} ranks that have it: its tokens came from all {n}, and each rank's "
                        "loss is the mean over its own"
                    ] = total / (n // ep)
                    known["summed, and not divided by the number of ranks"] = total
                if grad is not None:
                    for own_part, done in ((grad, "as it was"), (grad / n, "divided")):
                        known[
                            f"this rank's own, {done}: it is not reduced, or what a copy became is not put into p.grad"
                        ] = own_part
                expected = (total / n).to(p.dtype)
                different = {s: t.to(p.dtype) for s, t in known.items() if not torch.equal(t.to(p.dtype), expected)}
                name = f"the gradient of {what} parameter {i}"
                loose = 1e-2 if i == 1 else 1e-5  # absolute too: who divides before the sum rounds each rank's
                equal(p.grad, expected, name, ranks=n, known=different, rtol=loose, atol=loose)
        judge_bytes(world, line, mine, own)


def summed(each: list[list[nn.Parameter]]) -> list[Tensor]:
    return [totals_of(each, i) for i in range(len(each[0]))]


def totals_of(each: list[list[nn.Parameter]], i: int) -> Tensor:
    grads = [params[i].grad for params in each]
    return sum((g.float() for g in grads if g is not None), torch.zeros(each[0][i].shape))


def judge_bytes(world: WatchedGroup, line: WatchedGroup, dense: list[nn.Parameter], own: list[nn.Parameter]) -> None:
    oracles = world.oracle(), line.oracle()
    for oracle, params in zip(oracles, (dense, own), strict=True):
        for p in params:
            if p.requires_grad:
                oracle.all_reduce(torch.zeros_like(p.detach()))
    found, expected = (sum(g.ledger.sent_bytes().values()) for g in (line, oracles[1]))
    idle = f"{found:,} bytes go to the ranks with the same experts, expected {expected:,}"
    require(found or not expected, f"{idle}: are the experts reduced over all ranks?")
    same_traffic(world, oracles[0], "the world's group", calls=False)
    same_traffic(line, oracles[1], "the group with the same experts", calls=False)


@on_ranks(2, 3, 4)
def test_two_level_all_to_all(answer: Answer, group: WatchedGroup) -> None:
    N = group.size
    for n in (n for n in range(1, N + 1) if N % n == 0):
        node, place = divmod(group.rank, n)
        inner = of_ranks(list(range(node * n, node * n + n)), group)
        outer = of_ranks(list(range(place, N, n)), group)
        for shape, dtype in (((3,), torch.float32), ((2, 5), torch.bfloat16), ((), torch.int64), ((0,), torch.float32)):
            case(f"{N // n} nodes of {n} ranks, x [{N}, {', '.join(map(str, shape))}] of {dtype}")
            every = [numbers(N, *shape, seed=70 + r).to(dtype) + 10 * r for r in range(N)]
            x, one, other = every[group.rank], inner.fresh(), outer.fresh()
            with untouched(x=x):
                found = answer.two_level_all_to_all(x, one, other)
            expected = torch.stack([rows[group.rank] for rows in every])
            swapped = expected.view(N // n, n, -1).transpose(0, 1).reshape(expected.shape)
            known = {
                "row i is not from rank i: ranks lie by their place, and then by node": swapped,
                "nothing has moved": x,
                "between the two, rows that go to one rank must be brought together": lying(every, node, place, n),
                "between the two, rows that go to one node must be brought together": lying(
                    every, node, place, n, inner_first=True
                ),
            }
            equal(found, expected, "what arrives", known={s: t for s, t in known.items() if not t.equal(expected)})
            for watched, what in ((one, "inside the node"), (other, "between the nodes")):
                oracle = watched.oracle()
                oracle.all_to_all(torch.empty_like(x), x)
                same_traffic(watched, oracle, what, itemsize=dtype.itemsize)


def lying(every: list[Tensor], node: int, place: int, n: int, inner_first: bool = False) -> Tensor:
    """What comes of two all-to-alls with nothing moved between them."""
    nodes = len(every) // n
    if inner_first:
        rows = [every[j * n + t // nodes][place * nodes + t % nodes]
                for j in range(nodes) for t in range(node * n, node * n + n)]  # fmt: skip
    else:
        rows = [every[t // n * n + i][node * n + t % n]
                for i in range(n) for t in range(place * nodes, place * nodes + nodes)]  # fmt: skip
    return torch.stack(rows)
