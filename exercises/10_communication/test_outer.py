"""Grades chapter 10's steps over ranks: LAMB's norms of layers that are cut, and DiLoCo's outer step."""

import torch
from torch import Tensor

from refimpl.grading.compare import close, equal, require
from refimpl.grading.grade import on_ranks
from refimpl.grading.memory import in_place, untouched
from refimpl.grading.rank import Answer, case
from refimpl.grading.traffic import WatchedGroup, same_traffic

FP32, BF16 = torch.float32, torch.bfloat16


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def other(known: dict[str, Tensor], expected: Tensor) -> dict[str, Tensor]:
    """Of well-known mistakes those that can be told from what is right."""
    return {s: t for s, t in known.items() if t.shape != expected.shape or not close(t, expected)}


def layers_of(ranks: int, dtype: torch.dtype) -> tuple[list[list[Tensor]], list[list[Tensor]]]:
    """Weights and updates, a list of each rank's parts for every layer."""
    everywhere = [5] * ranks
    cuts = [everywhere, [6] + [0] * (ranks - 1), [3, 1, 0, 4][:ranks], [0] * (ranks - 1) + [9], everywhere, everywhere]
    weights, updates = [], []
    for i, cut in enumerate([*cuts, [4000] * ranks, everywhere, everywhere]):
        weights.append([((0.5 + i) * random(c, seed=9 * i + r)).to(dtype) for r, c in enumerate(cut)])
        updates.append([(1 + random(c, seed=99 * i + r)).to(dtype) for r, c in enumerate(cut)])
    weights[4] = [w * 0 for w in weights[4]]
    updates[5] = [u * 0 for u in updates[5]]
    updates[7], weights[8] = [u / 2**20 for u in updates[7]], [w / 1024 for w in weights[8]]  # ratios far from 1
    return weights, updates


def ratio(w: Tensor, u: Tensor) -> Tensor:
    return torch.where((w > 0) & (u > 0), w / u, 1.0)


def norms(parts: list[Tensor]) -> Tensor:
    return torch.stack([p.double().norm() for p in parts])


def sum_in_bf16(parts: list[Tensor]) -> Tensor:
    return torch.stack([p.square().sum().double() for p in parts]).sum()


def added_in_fp32(parts: list[Tensor]) -> Tensor:
    return torch.stack([p.square().double().sum() for p in parts]).sum()


def norms_in_bf16(parts: list[Tensor]) -> Tensor:
    return torch.stack([p.norm().double().square() for p in parts]).sum()


@on_ranks(2, 3, 4)
def test_trust_ratios(answer: Answer, group: WatchedGroup) -> None:
    for dtype in (FP32, BF16):
        case(f"layers cut over all ranks, on one, in unequal parts; one of zeros, one without an update; {dtype}")
        weights, updates = layers_of(group.size, dtype)
        own, moved = ([layer[group.rank] for layer in layers] for layers in (weights, updates))
        with untouched(weights=own, updates=moved):
            found = answer.trust_ratios(own, moved, group)
        w, u = (norms([torch.cat(layer) for layer in layers]) for layers in (weights, updates))
        added = [torch.stack([norms(layer).sum() for layer in layers]) for layers in (weights, updates)]
        low = [torch.stack([sum_in_bf16(layer) for layer in layers]).sqrt() for layers in (weights, updates)]
        half, rounded = (
            [torch.stack([of(layer) for layer in layers]).sqrt() for layers in (weights, updates)]
            for of in (added_in_fp32, norms_in_bf16)
        )
        right = ratio(w, u)
        known = {
            "of this rank's parts alone: the norm is the layer's": ratio(norms(own), norms(moved)),
            "norms were added over ranks, but only squares can be": ratio(*added),
            "the squares' ratio: the root is missing": right**2,
            "|u| / |w|, the other way round": 1 / right,
            "0, infinite or NaN where a norm is 0: there the ratio is 1": w / u,
            "0 where the weight is 0: it would never move": torch.where(u > 0, w / u, 1.0),
            "infinite where there is no update: 1 is asked": torch.where(w > 0, w / u, 1.0),
            "squared in bf16: in fp32": ratio(*low),
            "squared in bf16, and added in fp32: square in fp32 too": ratio(*half),
            "of norms that were rounded to bf16: squares and their sum are fp32": ratio(*rounded),
            "something is added to |u|, which makes the ratio of a small update smaller": torch.where(
                (w > 0) & (u > 0), w / (u + 1e-6), 1.0
            ),
            "held between bounds, which nobody asks for here": right.clamp(0.01, 10),
            "something is added to the squares, which makes the ratio of a small update smaller": torch.where(
                (w > 0) & (u > 0), (w**2 + 1e-12).sqrt() / (u**2 + 1e-12).sqrt(), 1.0
            ),
        }
        expected = right.float()
        oracle = group.oracle()
        oracle.all_reduce(torch.zeros(2 * len(own)))
        same_traffic(group, oracle, "trust_ratios")
        group.ledger.reset()
        fits = {s: t.float() for s, t in known.items() if not close(t.float(), expected, 1e-4)}
        equal(found, expected, "the ratios", known=fits, rtol=1e-4)
    case("all layers lie on rank 0")
    own = [torch.ones(4 if group.rank == 0 else 0) for _ in range(2)]
    left = {"this rank holds nothing, and has left before the all-reduce: all take part": torch.ones(2)}
    equal(answer.trust_ratios(own, [2 * t for t in own], group), torch.full((2,), 0.5), "the ratios", known=left)


SHAPES = ((3, 2), (5,), ())


@on_ranks(2, 3, 4)
def test_outer_step(answer: Answer, group: WatchedGroup) -> None:
    for dtype, lr, mu in ((FP32, 0.4, 0.5), (BF16, 0.7, 0.9), (FP32, 1.0, 0.0)):
        start = [random(*shape, seed=i) for i, shape in enumerate(SHAPES)]
        momentum = [torch.zeros(shape) for shape in SHAPES]
        begin, speed = [t.clone() for t in start], [t.clone() for t in momentum]
        for step in range(3):
            case(f"lr {lr}, mu {mu}, {dtype}, outer step {step}")
            every = [
                [(t + 0.1 * random(*t.shape, seed=90 * step + 7 * rank + i)).to(dtype) for i, t in enumerate(begin)]
                for rank in range(group.size)
            ]
            params = [p.clone() for p in every[group.rank]]
            with in_place(params=params, start=start, momentum=momentum):
                answer.outer_step(params, start, momentum, lr, mu, group)
            judge_outer_traffic(group, begin)
            for i in range(len(SHAPES)):
                ends = [each[i] for each in every]
                judge_outer(
                    f"tensor {i}", params[i], start[i], momentum[i], begin[i], speed[i], ends, group.rank, lr, mu
                )
                d = begin[i] - torch.stack([end.float() for end in ends]).mean(0)
                speed[i] = mu * speed[i] + d
                begin[i] = begin[i] - lr * (d + mu * speed[i])


def judge_outer(
    name: str, params: Tensor, start: Tensor, momentum: Tensor, begin: Tensor, speed: Tensor, ends: list[Tensor],
    rank: int, lr: float, mu: float,
) -> None:  # fmt: skip
    """Raise Wrong unless all three are right; `begin` and `speed` are start and momentum before the step."""
    ranks, mean = len(ends), torch.stack([end.float() for end in ends]).mean(0)
    d, own = begin - mean, begin - ends[rank].float()
    m = mu * speed + d
    known = {
        "it is as before: it is to be changed in place": speed,
        "the sign: the outer gradient is start - mean, from the end of the way to its beginning": mu * speed - d,
        "of this rank's own way: it is the mean over ranks": mu * speed + own,
        "(1 - mu) d is added: here it is d": mu * speed + (1 - mu) * d,
        "it holds lr d: lr is applied to the step": mu * speed + lr * d,
        "the ranks' ways were added, not averaged": mu * speed + ranks * d,
        "the ranks' params were added, not averaged": mu * speed + begin - ranks * mean,
        "start was rounded to the params' dtype first: the way begins at start, in fp32": (
            mu * speed + torch.stack([(begin.to(end.dtype) - end).float() for end in ends]).mean(0)
        ),
    }
    equal(momentum, m, f"momentum, {name}", ranks=ranks, known=other(known, m), rtol=1e-4, atol=1e-5)
    right = begin - lr * (d + mu * m)
    known = {
        "it is as before: it is to be changed in place, for the next round": begin,
        "no Nesterov: its step is d + mu momentum, with the new momentum": begin - lr * m,
        "the momentum before this step: Nesterov's is with the new one": begin - lr * (d + mu * speed),
        "without momentum: this is averaging": begin - lr * d,
        "up, not down: start - lr (...)": begin + lr * (d + mu * m),
        "rounded to the params' dtype: start is fp32, and params are its copy": right.to(params.dtype).float(),
        "the mean of the ranks: then the outer optimizer does nothing": mean,
    }
    equal(start, right, f"start, {name}", known=other(known, right), rtol=1e-4, atol=1e-5)
    known = {
        "as after the inner steps: all ranks are to go on from start": ends[rank].float(),
        "the mean of the ranks: they go on from start": mean,
    }
    right = right.to(params.dtype)
    fits = other({s: t.to(params.dtype) for s, t in known.items()}, right)
    coarse = 1e-2 if params.dtype == BF16 else 1e-4
    equal(params, right, f"params, {name}", known=fits, rtol=coarse, atol=1e-5)
    require(
        params.untyped_storage()._cdata != start.untyped_storage()._cdata, f"params and start of {name} share memory"
    )


def judge_outer_traffic(group: WatchedGroup, tensors: list[Tensor]) -> None:
    oracle, low = group.oracle(), group.oracle()
    for t in tensors:
        oracle.all_reduce(t.clone())
        low.all_reduce(t.bfloat16())
    halved = group.ledger.sent_bytes() == low.ledger.sent_bytes()
    require(not halved, "what is all-reduced has 16 bits: the outer gradient is a small difference, it is fp32")
    same_traffic(group, oracle, "outer_step")
    group.ledger.reset()
