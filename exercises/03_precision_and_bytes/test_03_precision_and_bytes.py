"""Grades chapter 03: rounding, agreement between ranks, the loss scale, and master weights."""

import functools
import math
import random

import torch
from torch import Tensor, nn, optim

from refimpl.grading.compare import as_made, equal, first_divergence, require
from refimpl.grading.grade import on_ranks
from refimpl.grading.memory import Kept, untouched
from refimpl.grading.rank import Answer, case
from refimpl.grading.traffic import WatchedGroup, same_traffic
from refimpl.optim.loss_scale import DynamicLossScaler as Oracle


@on_ranks(1)
def test_sum_in_fp32(answer: Answer, group: WatchedGroup) -> None:
    small = torch.tensor([[256.0], [1.0], [1.0]])
    many = torch.randn(8, 33, generator=torch.Generator().manual_seed(0)) * 10
    order = torch.tensor([-(2.0**30), 0.0, 2.0**30, 1.0]).view(4, 1)  # exact in row order alone
    ones = torch.ones(8, 2)  # as torch.sum adds them, 1 is lost beside 2^30, which row 1 takes away again
    ones[0], ones[1] = -(2.0**30), 2.0**30
    exact = torch.tensor([[1.0], [2.0], [4.0]])  # where no rounding hides that one is missing
    for dtype in (torch.bfloat16, torch.float16):
        for rows in (
            exact,
            small * (1 if dtype == torch.bfloat16 else 8),
            many,
            *([order, ones] if dtype == torch.bfloat16 else []),
        ):
            case(f"{len(rows)} rows in {dtype}")
            low = rows.to(dtype)
            expected = functools.reduce(torch.add, low.float()).to(dtype)  # in row order, as `Group.all_reduce` does
            rounded = low[0].clone()
            for row in low[1:]:
                rounded += row
            known = {f"each addition is rounded to {dtype}: keep the running sum in fp32": rounded}
            if rows is exact:
                known = {f"row {i} is missing": (low.sum(0) - row) for i, row in enumerate(low)}
            if rows is order:
                known = {
                    "in row order nothing is lost here: add row 0, then row 1, and so on": torch.zeros_like(expected)
                }
            if rows is ones:
                known = {
                    "torch.sum has an order of its own: add row 0, then row 1, and so on": low.float().sum(0).to(dtype)
                }
            rows = low.clone()
            with untouched(rows=rows):
                found = answer.sum_in_fp32(rows)
            equal(found, expected, "the sum", known=known, ranks=len(rows), rtol=0, atol=0)


@on_ranks(2, 3, 4)
def test_overflowed(answer: Answer, group: WatchedGroup) -> None:
    inf, nan, most = float("inf"), float("nan"), torch.finfo(torch.float32).max
    for bad, value, place in (
        (None, 1.0, 0),
        (None, most, 0),
        (0, inf, 2),
        (group.size - 1, nan, 2),
        (0, -inf, 2),
        (0, inf, 0),
        *((rank, nan, 1) for rank in range(group.size)),
    ):
        where = f"{value} in gradient {place} of 3 on rank {bad}"
        none = "" if bad == 1 else "; rank 1 has no gradients"
        case((where if bad is not None else f"all finite, {value:g} at the most") + none)
        grads = [torch.ones(3), torch.ones(2, 2), torch.full((4,), value if bad is None else 1.0)]
        grads = grads if group.rank != 1 or bad == 1 else []
        if group.rank == bad:
            grads[place] = torch.tensor([1.0, value, 1.0])
        with untouched(grads=grads):
            found = answer.overflowed(group, grads)
        require(isinstance(found, bool), f"the result is {found!r}, expected True or False")
        expected = bad is not None
        answers = group.everyone(found)
        require(len(set(answers)) == 1, f"the ranks must agree, but they answer {answers}: rank {bad} holds {value}")
        why = f": {where}; {value} is not finite: look at every element of every gradient" if expected else ""
        if value == most:
            why = f": every gradient is finite, only a sum of them is not: {value:g} + {value:g} overflows"
        require(found == expected, f"{found}, expected {expected}{why}")
    case("inf on every rank")
    found = answer.overflowed(group, [torch.tensor([inf])])
    require(found, f"{found}, expected True: every rank holds inf, and the sum of {group.size} flags is no longer 1")
    watched, oracle = group.fresh(), group.oracle()
    answer.overflowed(watched, [torch.ones(100)])
    oracle.all_reduce(torch.zeros(1))
    if watched.ledger.calls() != {"all_reduce": 1}:
        same_traffic(watched, oracle, "overflowed")
    sent = sum(watched.ledger.sent_bytes().values())
    oracle.ledger.reset()
    oracle.all_reduce(torch.zeros(1, dtype=torch.float64))
    room = sum(oracle.ledger.sent_bytes().values())
    require(sent <= room, f"{sent} bytes for one flag, one number takes {room}: put all that a rank knows into one")


@on_ranks(1)
def test_unscale_and_clip(answer: Answer, group: WatchedGroup) -> None:
    both = (torch.float16, torch.bfloat16)
    for scale, limit, size, dtypes in (
        (1024.0, 1.0, 20.0, both),
        (1024.0, 1.0, 0.001, both),
        (65536.0, 0.5, 0.2, both),
        (1.0, 100.0, 300.0, both),
        (8.0, 1.0, 0.0, both),
        (65536.0, 1.0, 1e-7, both),
        (1024.0, 1e-5, 0.001, both),
        (1.0, 1.0, 1e25, both[1:]),
    ):
        for dtype in dtypes:
            case(f"{dtype}, loss scale {scale:g}, limit {limit:g}, gradients of size {size:g}")
            generator = torch.Generator().manual_seed(1)
            true = [size * torch.randn(shape, generator=generator).clamp(-2, 2) / 4 for shape in ((5,), (3, 4), (1,))]
            grads = [(g * scale).to(dtype) for g in true]
            unscaled = [nn.Parameter(torch.zeros(g.shape, dtype=torch.float64)) for g in grads]
            for p, g in zip(unscaled, grads, strict=True):
                p.grad = g.double() / scale
            raw = [p.grad.float().clone() for p in unscaled if p.grad is not None]
            norm = float(torch.linalg.vector_norm(torch.cat([g.flatten().double() for g in raw])))
            for p in unscaled:
                assert p.grad is not None
                p.grad *= min(1.0, limit / norm) if norm else 1.0
            with untouched(grads=grads):
                result = answer.unscale_and_clip(grads, scale, limit)
            pair = isinstance(result, tuple | list) and len(result) == 2 and isinstance(result[0], tuple | list)
            require(pair, "the result is no pair (list of gradients, norm)")
            found, found_norm = result
            judge_norm(found_norm, norm, scale, limit, raw)
            require(len(found) == len(grads), f"{len(found)} gradients came back, expected {len(grads)}")
            for i, (f, p, r) in enumerate(zip(found, unscaled, raw, strict=True)):
                assert p.grad is not None
                scaled_norm, norm = norm * scale or 1.0, norm or 1.0
                known = {
                    "it is not clipped": r,
                    "it is clipped before it is unscaled: the limit is meant for the true gradient": r
                    * min(1.0, limit / scaled_norm),
                    "it is clipped by its own norm: there is one norm for all gradients together": r
                    * min(1.0, limit / (float(r.norm()) or 1.0)),
                    "it is multiplied by limit / norm although the norm is within the limit": r * (limit / norm),
                    "it is still scaled": p.grad.float() * scale,
                    "each element is clamped: clipping multiplies all by one factor": r.clamp(-limit, limit),
                    f"it went through {dtype} again after it was unscaled: small ones are lost; stay in fp32": r.to(
                        dtype
                    ).float()
                    * min(1.0, limit / norm),
                }
                equal(f, p.grad.float(), f"gradient {i}", known=known, atol=1e-12)

    case("an Inf among the gradients")
    _, found_norm = answer.unscale_and_clip([torch.tensor([1.0, torch.inf]).half()], 8.0, 1.0)
    require(not math.isfinite(found_norm), f"the norm is {found_norm:g}, expected inf: an overflow must be seen")


def judge_norm(found: object, norm: float, scale: float, limit: float, raw: list[Tensor]) -> None:
    require(isinstance(found, float), f"the norm is {found!r}, expected a Python float")
    known = {
        "it is the norm of the scaled gradients: unscale first": norm * scale,
        "it is the norm after clipping": min(norm, limit),
        "it is the sum of the gradients' norms: square, add up, then take one root": sum(
            float(g.double().norm()) for g in raw
        ),
        "the root is missing": norm**2,
        "it is the sum of magnitudes: an L2 norm is the root of the sum of squares": sum(
            float(g.double().abs().sum()) for g in raw
        ),
        "it is multiplied by the scale: the gradients are those of loss x scale, so divide": norm * scale**2,
        "it is inf: a square was too large: square and add in fp64": math.inf,
    }
    tensors = {k: torch.tensor(v, dtype=torch.float64) for k, v in known.items()}
    value = torch.tensor(found, dtype=torch.float64)
    equal(value, torch.tensor(norm, dtype=torch.float64), "the norm", known=tensors, rtol=1e-5, atol=0)


@on_ranks(1)
def test_DynamicLossScaler(answer: Answer, group: WatchedGroup) -> None:
    high = 2.0**8
    for start, window, hysteresis, share in (
        (high, 1000, 1, 1.0),
        (high, 2, 1, 0.0),
        (high, 3, 2, 0.3),
        (high, 1, 3, 0.3),
        (high, 4, 2, 0.1),
        (1.0, 1000, 3, 1.0),
    ):
        case(f"window {window}, hysteresis {hysteresis}, from a scale of {start:g}")
        random.seed(window)
        mine = answer.DynamicLossScaler(scale=start, window=window, hysteresis=hysteresis)
        oracle = Oracle(start, window, hysteresis)
        story: list[str] = []
        for step in range(40):
            overflow, before = random.random() < share, oracle.scale
            raised = [stopped(scaler, overflow) for scaler in (mine, oracle)]
            event = "overflow" if overflow else "good"
            story.append(f"  step {step:2}: {event:<8}  scale {mine.scale:g}, expected {oracle.scale:g}")
            if raised[1]:
                require(raised[0], "no OverflowError, although the scale is 1 and the gradients overflow", *story[-6:])
                halved = f"after the OverflowError the scale is {mine.scale:g}: raise in place of halving a scale of 1"
                require(mine.scale == oracle.scale, halved, *story[-6:])
                break
            early = "the scale could still be halved" if before > 1 else "hysteresis endures this overflow"
            require(not raised[0], f"OverflowError although {early}", *story[-6:])
            scales = f"step {step}: the scale is {mine.scale:g}, expected {oracle.scale:g}"
            require(mine.scale == oracle.scale, f"{scales}: {why(mine, oracle, overflow, before, story)}", *story[-6:])


def stopped(scaler: Oracle, overflow: bool) -> bool:
    try:
        scaler.update(overflow)
    except OverflowError:
        return True
    return False


def why(mine: Oracle, oracle: Oracle, overflow: bool, before: float, story: list[str]) -> str:
    if overflow:
        return "hysteresis endures this overflow" if oracle.scale == before else "this overflow halves it"
    if mine.scale > oracle.scale:
        interrupted = any("overflow" in line for line in story)
        early = "an overflow sets the count of good steps to 0"
        return "it doubles too early: " + (early if interrupted else "on the good step that follows `window` good ones")
    return "it doubles after `window` good steps in a row"


@on_ranks(1)
def test_MasterWeights(answer: Answer, group: WatchedGroup) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        case(f"60 steps in {dtype}, updates of 2e-4 on weights near 1")
        start = [1 + torch.rand(shape, generator=torch.Generator().manual_seed(0)) for shape in ((7,), (3, 5))]
        params = [nn.Parameter(s.to(dtype)) for s in start]
        master = answer.MasterWeights(params, lambda own: optim.AdamW(own, lr=2e-4))
        as_made(getattr(master, "optimizer", None), lambda own: optim.AdamW(own, lr=2e-4))
        places = [p.data_ptr() for p in params]
        exact = [nn.Parameter(s.to(dtype).float()) for s in start]
        oracle = optim.AdamW(exact, lr=2e-4)
        found: list[dict[str, Tensor]] = []
        expected: list[dict[str, Tensor]] = []
        for step in range(60):
            grads = [torch.randn(p.shape, generator=torch.Generator().manual_seed(step)) * 0.1 + 1 for p in params]
            for p, e, g in zip(params, exact, grads, strict=True):
                p.grad, e.grad = g.to(dtype), g.clone()
            with untouched(grads=grads):
                master.step(grads)
            oracle.step()
            found.append({f"parameter {i}": p.detach().float().clone() for i, p in enumerate(params)})
            expected.append({f"parameter {i}": e.detach().to(dtype).float() for i, e in enumerate(exact)})
        frozen = all(torch.equal(p, s.to(dtype)) for p, s in zip(params, start, strict=True))
        require(
            not frozen,
            "the weights never moved: each update of 2e-4 is rounded away; keep fp32 masters and update those",
        )
        first_divergence(found, expected, "the value", rtol=0, atol=0)
        judge_memory(master, params, dtype)
        moved = [p.data_ptr() for p in params] != places
        require(not moved, "a parameter has new memory: copy into the old, of which others may hold views")
    case("plain SGD with gradients that 16 bits cannot hold")
    given = torch.randn(50, generator=torch.Generator().manual_seed(1))
    master = answer.MasterWeights([nn.Parameter(torch.ones(50).bfloat16())], lambda own: optim.SGD(own, lr=1.0))
    master.step([given])
    low = {"the gradient was rounded to 16 bits first: give it to the master in fp32": 1 - given.bfloat16().float()}
    equal(master.masters[0].detach(), 1 - given, "the master", known=low, rtol=1e-6)
    case("a step from nothing: what stays?")
    params = [nn.Parameter(torch.ones(500, dtype=torch.bfloat16))]
    kept = Kept(group)
    master = answer.MasterWeights(params, lambda own: optim.AdamW(own, lr=2e-4))
    master.step([torch.ones(500)])
    kept.judge(500 * 12, "MasterWeights", "masters and Adam's two numbers alone may stay: 12 bytes a parameter")


def judge_memory(master: object, params: list[nn.Parameter], dtype: torch.dtype) -> None:
    masters, optimizer = getattr(master, "masters", None), getattr(master, "optimizer", None)
    require(
        isinstance(masters, list) and isinstance(optimizer, optim.Optimizer),
        "self.masters or self.optimizer is missing",
    )
    assert isinstance(masters, list)
    assert isinstance(optimizer, optim.Optimizer)
    for p, m in zip(params, masters, strict=True):
        require(m.dtype == torch.float32, f"a master is {m.dtype}, expected torch.float32")
        require(p.dtype == dtype, f"a parameter became {p.dtype}, expected {dtype}")
        for whose, grad in (("a master", m.grad), ("a parameter of the model", p.grad)):
            require(grad is None, f"{whose} keeps its gradient after the step: set the .grad of both to None")
    for state in optimizer.state.values():
        for name, t in state.items():
            require(t.dtype == torch.float32, f"the optimizer's {name} is {t.dtype}: it must update the fp32 masters")
