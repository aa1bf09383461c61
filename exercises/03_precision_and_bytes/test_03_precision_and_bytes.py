"""Grades chapter 03: rounding, agreement between ranks, master weights, and bytes as counted on refimpl's stages."""

import functools
import random

import torch
from torch import Tensor, nn, optim

from refimpl.grading.compare import equal, first_divergence, require
from refimpl.grading.grade import on_ranks
from refimpl.grading.rank import Answer, case
from refimpl.grading.traffic import WatchedGroup, same_traffic
from refimpl.measure.memory import MemoryMeter
from refimpl.optim.loss_scale import DynamicLossScaler as Oracle
from refimpl.zero.ddp import DDP
from refimpl.zero.stage import Stage
from refimpl.zero.zero1 import Zero1
from refimpl.zero.zero2 import Zero2
from refimpl.zero.zero3 import Zero3

STAGES: dict[str, type[Stage]] = {"ddp": DDP, "zero1": Zero1, "zero2": Zero2, "zero3": Zero3}


@on_ranks(1)
def test_sum_in_fp32(answer: Answer, group: WatchedGroup) -> None:
    small = torch.tensor([[256.0], [1.0], [1.0]])
    many = torch.randn(8, 33, generator=torch.Generator().manual_seed(0)) * 10
    for dtype in (torch.bfloat16, torch.float16):
        for rows in (small * (1 if dtype == torch.bfloat16 else 8), many):
            case(f"{len(rows)} rows in {dtype}")
            low = rows.to(dtype)
            expected = functools.reduce(torch.add, low.float()).to(dtype)  # in row order, as `Group.all_reduce` does
            rounded = low[0].clone()
            for row in low[1:]:
                rounded += row
            known = {f"each addition is rounded to {dtype}: keep the running sum in fp32": rounded}
            found = answer.sum_in_fp32(low.clone())
            equal(found, expected, "the sum", known=known, ranks=len(rows), rtol=0, atol=0)


@on_ranks(2, 3, 4)
def test_overflowed(answer: Answer, group: WatchedGroup) -> None:
    for bad, value in ((None, 0.0), (0, float("inf")), (group.size - 1, float("nan")), (0, -float("inf"))):
        case(f"{value} on rank {bad}" if bad is not None else "all finite")
        grads = [torch.ones(3), torch.ones(2, 2)] if group.rank != 1 else []
        if group.rank == bad:
            grads = [torch.ones(3), torch.tensor([1.0, value])]
        found = answer.overflowed(group, grads)
        require(isinstance(found, bool), f"the result is {found!r}, expected True or False")
        expected = bad is not None
        answers = group.everyone(found)
        require(len(set(answers)) == 1, f"the ranks must agree, but they answer {answers}: rank {bad} holds {value}")
        require(found == expected, f"{found}, expected {expected}" + (f": {value} is not finite" if expected else ""))
    watched, oracle = group.fresh(), group.oracle()
    answer.overflowed(watched, [torch.ones(100)])
    oracle.all_reduce(torch.zeros(1))
    if watched.ledger.calls() != {"all_reduce": 1}:
        same_traffic(watched, oracle, "overflowed")
    sent = sum(watched.ledger.sent_bytes().values())
    require(sent <= 8 * group.size, f"{sent} bytes for one flag: reduce one number, not the gradients")


@on_ranks(1)
def test_unscale_and_clip(answer: Answer, group: WatchedGroup) -> None:
    for scale, limit, size in ((1024.0, 1.0, 20.0), (1024.0, 1.0, 0.001), (65536.0, 0.5, 0.2), (1.0, 100.0, 300.0)):
        for dtype in (torch.float16, torch.bfloat16):
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
                p.grad *= min(1.0, limit / norm)
            before = [g.clone() for g in grads]
            result = answer.unscale_and_clip(grads, scale, limit)
            require(isinstance(result, tuple) and len(result) == 2, f"the result is {result!r}, expected (list, float)")
            found, found_norm = result
            judge_norm(found_norm, norm, scale, limit, raw)
            require(len(found) == len(grads), f"{len(found)} gradients came back, expected {len(grads)}")
            for i, (f, p, r) in enumerate(zip(found, unscaled, raw, strict=True)):
                assert p.grad is not None
                scaled_norm = norm * scale
                known = {
                    "it is not clipped": r,
                    "it is clipped before it is unscaled: the limit is meant for the true gradient": r
                    * min(1.0, limit / scaled_norm),
                    "it is clipped by its own norm: there is one norm for all gradients together": r
                    * min(1.0, limit / float(r.norm())),
                    "it is multiplied by limit / norm although the norm is within the limit": r * (limit / norm),
                    "it is still scaled": p.grad.float() * scale,
                }
                equal(f, p.grad.float(), f"gradient {i}", known=known)
            kept = all(torch.equal(a, b) for a, b in zip(grads, before, strict=True))
            require(kept, "the 16-bit gradients were changed: make new ones")


def judge_norm(found: object, norm: float, scale: float, limit: float, raw: list[Tensor]) -> None:
    require(isinstance(found, float), f"the norm is {found!r}, expected a Python float")
    known = {
        "it is the norm of the scaled gradients: unscale first": norm * scale,
        "it is the norm after clipping": min(norm, limit),
        "it is the sum of the gradients' norms: square, add up, then take one root": sum(float(g.norm()) for g in raw),
        "the root is missing": norm**2,
    }
    tensors = {k: torch.tensor(v, dtype=torch.float64) for k, v in known.items()}
    value = torch.tensor(found, dtype=torch.float64)
    equal(value, torch.tensor(norm, dtype=torch.float64), "the norm", known=tensors, rtol=1e-5, atol=0)


@on_ranks(1)
def test_DynamicLossScaler(answer: Answer, group: WatchedGroup) -> None:
    for window, hysteresis, share in ((1000, 1, 1.0), (2, 1, 0.0), (3, 2, 0.3), (1, 3, 0.3), (4, 2, 0.1)):
        case(f"window {window}, hysteresis {hysteresis}")
        random.seed(window)
        mine = answer.DynamicLossScaler(scale=2.0**8, window=window, hysteresis=hysteresis)
        oracle = Oracle(2.0**8, window, hysteresis)
        story: list[str] = []
        for step in range(40):
            overflow = random.random() < share
            raised = [stopped(scaler, overflow) for scaler in (mine, oracle)]
            event = "overflow" if overflow else "good"
            story.append(f"  step {step:2}: {event:<8}  scale {mine.scale:g}, expected {oracle.scale:g}")
            if raised[1]:
                require(raised[0], "no OverflowError, although the scale is 1 and the gradients overflow", *story[-6:])
                break
            require(not raised[0], "OverflowError although the scale could still be halved", *story[-6:])
            require(
                mine.scale == oracle.scale,
                f"step {step}: the scale is {mine.scale:g}, expected {oracle.scale:g}: {why(mine, oracle, overflow)}",
                *story[-6:],
            )


def stopped(scaler: Oracle, overflow: bool) -> bool:
    try:
        scaler.update(overflow)
    except OverflowError:
        return True
    return False


def why(mine: Oracle, oracle: Oracle, overflow: bool) -> str:
    if overflow:
        return "hysteresis endures this overflow" if mine.scale < oracle.scale else "this overflow halves it"
    if mine.scale > oracle.scale:
        return "it doubles too early: an overflow sets the count of good steps to 0"
    return "it doubles after `window` good steps in a row"


@on_ranks(1)
def test_MasterWeights(answer: Answer, group: WatchedGroup) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        case(f"60 steps in {dtype}, updates of 2e-4 on weights near 1")
        start = [1 + torch.rand(shape, generator=torch.Generator().manual_seed(0)) for shape in ((7,), (3, 5))]
        params = [nn.Parameter(s.to(dtype)) for s in start]
        master = answer.MasterWeights(params, lambda own: optim.AdamW(own, lr=2e-4))
        exact = [nn.Parameter(s.to(dtype).float()) for s in start]
        oracle = optim.AdamW(exact, lr=2e-4)
        found, expected = [], []
        for step in range(60):
            grads = [torch.randn(p.shape, generator=torch.Generator().manual_seed(step)) * 0.1 + 1 for p in params]
            for p, e, g in zip(params, exact, grads, strict=True):
                p.grad, e.grad = g.to(dtype), g.clone()
            master.step([g.clone() for g in grads])
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
        require(m.grad is None and p.grad is None, "gradients are kept after the step: set .grad to None")
    for state in optimizer.state.values():
        for name, t in state.items():
            require(t.dtype == torch.float32, f"the optimizer's {name} is {t.dtype}: it must update the fp32 masters")


@on_ranks(2, 3)
def test_memory_bytes(answer: Answer, group: WatchedGroup) -> None:
    for name in STAGES:
        for dtype in (torch.float32, torch.bfloat16):
            case(f"{name}, {dtype}")
            stage = build(name, dtype, group)
            stage.backward(stage.model(torch.ones(2, 64, dtype=dtype)).sum())
            counted = MemoryMeter(stage.tensors).now()
            stage.step()
            state = MemoryMeter(stage.tensors).now()["optimizer"] - 4 * len(stage.buckets)  # less AdamW's step counts
            counted |= {"optimizer": state}
            padded = sum(b.padded for b in stage.buckets)
            found = answer.memory_bytes(name, padded, group.size, dtype.itemsize)
            require(isinstance(found, dict), f"the result is {found!r}, expected a dict")
            evidence = [
                f"{padded} parameters, {dtype.itemsize} bytes each, {group.size} ranks",
                "  class            yours   counted on refimpl",
            ]
            keys = ("parameters", "gradients", "optimizer", "master weights")
            evidence += [f"  {k:<14} {found.get(k, 0):>7}   {counted[k]:>7}" for k in keys]
            for key in keys:
                mine, theirs = found.get(key), counted[key]
                hint = times(mine, theirs)
                if mine == theirs * group.size:
                    hint = f": {name} shards it over the ranks"
                elif theirs == (mine or 0) * group.size:
                    hint = f": {name} does not shard it"
                require(mine == theirs, f"{name}: {mine} bytes of {key}, counted {theirs}{hint}", *evidence)


@on_ranks(2, 3)
def test_sent_bytes(answer: Answer, group: WatchedGroup) -> None:
    for name in STAGES:
        for micro_batches in (1, 3):
            case(f"{name}, {micro_batches} micro-batches")
            stage = build(name, torch.float32, group)
            stage.group.ledger.reset()
            for i in range(micro_batches):
                stage.backward(stage.model(torch.ones(2, 64)).sum(), sync=i == micro_batches - 1)
            stage.step()
            counted = stage.group.ledger.sent_bytes("tag")
            padded = sum(b.padded for b in stage.buckets)
            found = answer.sent_bytes(name, padded, group.size, 4, micro_batches)
            require(isinstance(found, dict), f"the result is {found!r}, expected a dict")
            evidence = [
                f"{padded} parameters of 4 bytes, {group.size} ranks, {micro_batches} micro-batches",
                *stage_story(stage),
            ]
            for key in ("gradients", "parameters"):
                mine, theirs = found.get(key), counted.get(key, 0)
                hint = times(mine, theirs)
                require(mine == theirs, f"{name}: {mine} bytes of {key}, the ledger says {theirs}{hint}", *evidence)


def build(name: str, dtype: torch.dtype, group: WatchedGroup) -> Stage:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 6, bias=False), nn.Linear(6, 64, bias=False)).to(dtype)
    return STAGES[name](model, optim.AdamW(model.parameters()), group.oracle())


def stage_story(stage: Stage) -> list[str]:
    calls = stage.group.ledger.calls("tag")
    return ["what refimpl sent:"] + [
        f"  {tag:<12} {calls[tag]} calls, {sent} bytes"
        for tag, sent in stage.group.ledger.sent_bytes("tag").items()
        if tag in ("gradients", "parameters")
    ]


def times(mine: object, theirs: int) -> str:
    """ ": exactly 2x" or ": exactly 1/2", if it is."""
    if not isinstance(mine, int) or not mine or not theirs:
        return ""
    if mine % theirs == 0:
        return f": exactly {mine // theirs}x"
    return f": exactly 1/{theirs // mine}" if theirs % mine == 0 else ""
