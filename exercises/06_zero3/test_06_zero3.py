"""Grades chapter 06: memory that comes and goes, gradients equal to one process's, and plans equal to refimpl's."""

import random
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from types import SimpleNamespace

import torch
from torch import Tensor, nn, optim

from refimpl.grading.compare import Wrong, equal, require
from refimpl.grading.grade import on_ranks
from refimpl.grading.memory import Kept, own_memory, storage_bytes, untouched
from refimpl.grading.rank import Answer, case
from refimpl.grading.traffic import WatchedGroup, all_done, same_traffic
from refimpl.measure.memory import MemoryMeter
from refimpl.zero.config import ZeroConfig
from refimpl.zero.fetch import Fetch
from refimpl.zero.prefetch import Trace
from refimpl.zero.zero3 import Zero3

FEATURES, LAYERS = 7, 8


class Probe(nn.Module):
    """Between two layers: calls `look` in forward, and in backward just before the layer in front of it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, int]] = []  # ("forward" or "backward", bytes of parameters that are whole)
        self.grads: list[int] = []  # bytes of whole gradients, in backward
        self.params: list[nn.Parameter] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(("forward", storage_bytes(self.params)))
        out: Tensor = x * 1
        if out.requires_grad:
            out.register_hook(self.look)
        return out

    def look(self, grad: Tensor) -> None:
        self.seen.append(("backward", storage_bytes(self.params)))
        self.grads.append(storage_bytes(p.grad for p in self.params if p.grad is not None))


class Scaled(nn.Module):
    """A parameter of its own around a layer that has some too."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.rand(3) + 0.5)
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.tanh(self.inner(x)) * self.gain.mean()
        return out


def net(seed: int) -> tuple[nn.Sequential, Probe]:
    """Layers of odd sizes, with a probe (always the same one) between them."""
    torch.manual_seed(seed)
    probe, model = Probe(), nn.Sequential()
    for i in range(LAYERS):
        layer = nn.Linear(FEATURES, FEATURES, bias=i % 3 > 0)
        model.append(Scaled(layer) if i % 2 else layer)
        model.append(probe)
    probe.params = list(model.parameters())
    return model, probe


def batch(rank: int, step: int, part: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * part + rank)
    return torch.randn(3, FEATURES, generator=generator).to(dtype)


def odd_params(seed: int, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((3, 5), (4,), (1, 2, 3))
    params = [nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in shapes]
    params[1].requires_grad_(False)  # frozen ones take as much memory
    return [*params, nn.Parameter(torch.randn(2, 5, generator=generator).to(dtype).t())]  # not contiguous


@on_ranks(2, 3, 4)
def test_ShardedParams(answer: Answer, group: WatchedGroup) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        gather_and_free(answer, group, dtype)
    case("module.parameters(): an iterator")
    layer = nn.Linear(3, 5)
    try:
        unit = answer.ShardedParams(layer.parameters(), group.fresh())
    except (TypeError, IndexError, ValueError, StopIteration) as error:
        raise Wrong(
            "an iterator can be walked once, and has no length: begin with list(params)", f"  {error}"
        ) from error
    require(unit.full.numel() >= 20, "an iterator can be walked once: begin with list(params)")


def gather_and_free(answer: Answer, group: WatchedGroup, dtype: torch.dtype) -> None:
    case(f"{dtype}, ranks begin with different values; one parameter is not contiguous")
    watched, truth = group.fresh(), [p.detach().clone() for p in odd_params(0, dtype)]
    numel, itemsize = sum(t.numel() for t in truth), dtype.itemsize
    shard = -(-numel // group.size)
    end = torch.zeros(shard * group.size - numel, dtype=dtype)
    padded = torch.cat([*(t.reshape(-1) for t in truth), end])
    own = torch.cat([*(p.detach().reshape(-1) for p in odd_params(group.rank, dtype)), end])
    kept = Kept(watched)
    params = odd_params(group.rank, dtype)
    unit = answer.ShardedParams(params, watched)
    left = storage_bytes(params)
    require(left == 0, f"{left} bytes of parameters are alive after ShardedParams(...): free them")
    kept.judge(
        shard * itemsize, "ShardedParams(...)", "self.mine alone may stay; where are the original values, or a copy?"
    )
    mine, rows = group.rank, (padded.view(group.size, shard), own.view(group.size, shard))
    judge_shard(unit, rows[0][mine], {"it is cut from this rank's own values: take rank 0's": rows[1][mine]})
    buffer = unit.full
    for again in range(2):
        case(f"{dtype}, gather and free, number {again}")
        watched.ledger.reset()
        unit.gather()
        all_done(watched, "gather")
        for i, (p, t) in enumerate(zip(params, truth, strict=True)):
            known = {"it is still this rank's own: take rank 0's": odd_params(group.rank, dtype)[i].detach()}
            equal(p.detach(), t, f"parameter {i} after gather()", known=known if group.rank else None)
        unit.gather()
        oracle = group.oracle()
        oracle.all_gather(torch.zeros(shard * group.size, dtype=dtype), torch.zeros(shard, dtype=dtype))
        same_traffic(watched, oracle, "gather(), called twice,", itemsize=itemsize)
        whole = storage_bytes(params)
        size = len(padded) * itemsize
        require(whole == size, f"{whole} bytes are alive after gather(), the buffer has {size}: {itemsize} an element")
        unit.free()
        judge_free(unit, params, truth)
    case(f"{dtype}, the shard changes, as in a step")
    with torch.no_grad():
        unit.mine += 1
    unit.gather()
    stepped = torch.cat([p.detach().reshape(-1) for p in params])
    equal(
        stepped, padded[:numel] + 1, "the parameters", known={"they are what they were before the step": padded[:numel]}
    )
    case("autograd keeps a view of a parameter in forward; freed and gathered before backward")
    x = torch.ones(1, 5, requires_grad=True, dtype=dtype)
    y = x @ params[0].t()
    unit.free()
    unit.gather()
    same = "self.full is another tensor now: autograd has kept views of the first one, which stay without memory"
    require(unit.full is buffer, same)
    y.sum().backward()
    assert x.grad is not None
    loose = 1e-5 if dtype == torch.float32 else 0.02
    equal(x.grad, (truth[0] + 1).sum(0, keepdim=True), "the gradient", rtol=loose, atol=loose)
    del x, y, stepped
    unit.free()
    kept.judge(shard * itemsize, "after gather() and free(), the unit", "self.mine alone may stay")


def judge_shard(unit: object, expected: Tensor, known: dict[str, Tensor]) -> None:
    mine = getattr(unit, "mine", None)
    require(isinstance(mine, Tensor), "self.mine is missing")
    assert isinstance(mine, Tensor)
    nbytes = mine.untyped_storage().nbytes()
    require(mine.dtype == expected.dtype, f"self.mine has dtype {mine.dtype}, expected {expected.dtype}")
    require(nbytes > 0, "self.mine has lost its memory: it is a view of the buffer that was freed; clone it")
    require(
        nbytes <= expected.numel() * expected.element_size(),
        f"self.mine keeps {nbytes} bytes alive, and a shard is {expected.numel() * expected.element_size()}: "
        "nothing is sharded, or it is a view, which keeps the whole storage",
    )
    equal(mine.detach(), expected, "self.mine", known=known)
    require(isinstance(getattr(unit, "full", None), Tensor), "self.full is missing")


def judge_free(unit: object, params: list[nn.Parameter], truth: list[Tensor]) -> None:
    left = storage_bytes(params)
    require(left == 0, f"{left} bytes are alive after free(): resize the storage to 0, a view keeps all of it")
    full = getattr(unit, "full", None)
    require(isinstance(full, Tensor), "self.full is missing")
    assert isinstance(full, Tensor)
    require(full.untyped_storage().nbytes() == 0, "self.full still has memory after free()")
    for i, (p, t) in enumerate(zip(params, truth, strict=True)):
        require(p.shape == t.shape, f"parameter {i} has shape {tuple(p.shape)} after free(), expected {tuple(t.shape)}")


@on_ranks(2, 3, 4)
def test_Zero3(answer: Answer, group: WatchedGroup) -> None:
    for parts in (1, 2):
        case(f"2 steps of {parts} micro-batch{'es' * (parts > 1)}")
        train(answer, group, parts, torch.float32)
    case("2 steps in bf16")
    train(answer, group, 1, torch.bfloat16)
    case("an evaluation under torch.no_grad()")
    watched, (model, probe), (plain, _) = group.fresh(), net(0), net(0)
    answer.Zero3(model, watched)
    with torch.no_grad():
        equal(model(batch(0, 0)), plain(batch(0, 0)), "the output")
    left = storage_bytes(probe.params)
    require(left == 0, f"{left} bytes of parameters are still whole after an evaluation")


def train(answer: Answer, group: WatchedGroup, parts: int, dtype: torch.dtype) -> None:
    """Two steps of plain descent on the shards, beside one process's; gradients, memory, traffic."""
    watched, (plain, _) = group.fresh(), net(0)
    plain.to(dtype)
    largest = dtype.itemsize * max(sum(p.numel() for p in m.parameters(recurse=False)) for m in plain.modules())
    for p in plain.parameters():
        p.grad = torch.zeros_like(p)  # there from the start: not to be counted as the answer's
    kept = Kept(watched)
    model, probe = net(0)
    model.to(dtype)
    zero = answer.Zero3(model, watched)
    left = storage_bytes(probe.params)
    require(left == 0, f"{left} bytes of parameters are whole after Zero3(...): every module's must be sharded")
    owners = {name: m for name, m in model.named_modules() if list(m.parameters(recurse=False))}
    missing = [name for name, m in owners.items() if m not in zero.units]
    require(not missing, f"self.units has no entry for module {', '.join(missing)}")
    shards = {m: -(-sum(p.numel() for p in m.parameters(recurse=False)) // group.size) for m in owners.values()}
    of_all = sum(shards.values()) * dtype.itemsize
    kept.judge(of_all, "Zero3(...)", "the shards alone may stay; is a copy of the model kept somewhere?")
    watch_backward(owners)
    for step in range(2):
        watched.ledger.reset()
        zero.grads.clear()
        plain.zero_grad(set_to_none=False)
        before: dict[str, Tensor] = {}
        for part in range(parts):
            before = {n: p.grad.clone() for n, p in plain.named_parameters() if p.grad is not None and part}
            probe.seen.clear()
            probe.grads.clear()
            case(f"{dtype}, step {step}, micro-batch {part}")
            model(batch(group.rank, step, part, dtype)).pow(2).sum().backward()
            case(f"{dtype}, step {step}, micro-batch {part}")
            judge_memory(probe, largest + 4 * 64, model)
            for rank in range(group.size):
                (plain(batch(rank, step, part, dtype)).pow(2).sum() / group.size).backward()
        all_done(watched, "backward")
        judge_calls(watched, len(owners) * parts, step)
        judge_gradients(group, zero, owners, plain, before, step)
        judge_traffic(watched, wanted(group, model, shards, parts, dtype), step, dtype.itemsize)
        before.clear()
        kept.judge(2 * of_all, f"step {step}", "the shards of parameters and gradients alone may stay")
        with torch.no_grad():
            for m in owners.values():
                zero.units[m].mine -= 0.01 * zero.grads[m]
            for p in plain.parameters():
                assert p.grad is not None
                p -= 0.01 * p.grad


def wanted(
    group: WatchedGroup, model: nn.Sequential, shards: dict[nn.Module, int], parts: int, dtype: torch.dtype
) -> WatchedGroup:
    """A group that has sent what a step sends: a gather a unit in forward; in backward one more, and its gradients."""
    oracle = group.oracle()
    layers = [[m for m in layer.modules() if m in shards] for layer in model]
    for _ in range(parts):
        for backward, order in ((False, layers), (True, layers[::-1])):
            for m in [m for layer in order for m in layer]:
                mine = torch.zeros(shards[m], dtype=dtype)
                oracle.all_gather(mine.repeat(group.size), mine)
                if backward:
                    oracle.reduce_scatter(mine, mine.repeat(group.size))
    return oracle


def watch_backward(owners: dict[str, nn.Module]) -> None:
    """Name, in the report of whatever then happens, a module whose backward begins while it has no memory."""

    def after(name: str, module: nn.Module, _: object, output: Tensor) -> None:
        def before_backward(*_: object) -> None:
            if not all(p.untyped_storage().nbytes() for p in module.parameters(recurse=False)):
                case(f"the backward of module {name} begins, and its parameters have no memory")

        if output.grad_fn is not None:
            output.grad_fn.register_prehook(before_backward)  # behind the answer's own, which was there before

    for name, module in owners.items():
        module.register_forward_hook(partial(after, name))


def judge_memory(probe: Probe, room: int, model: nn.Module) -> None:
    """Between two layers no more than about one of them is whole."""
    for during in ("forward", "backward"):
        sizes = [n for what, n in probe.seen if what == during]
        evidence = f"bytes of whole parameters between the layers, in {during}: {', '.join(map(str, sizes))}"
        advice = {
            "forward": "free each module after its forward",
            "backward": "free it when its gradients are complete",
        }
        require(
            max(sizes) <= room,
            f"{max(sizes)} bytes of parameters are whole at once in {during}: {advice[during]}",
            evidence,
        )
    left = storage_bytes(probe.params)
    require(left == 0, f"{left} bytes of parameters are still whole after backward")
    most = max(probe.grads)
    late = f"{most} bytes of whole gradients are alive at once in backward"
    require(most <= room, f"{late}: reduce-scatter each module's as soon as they are complete")
    kept = [n for n, p in model.named_parameters() if p.grad is not None]
    require(not kept, f"{len(kept)} whole gradients are alive after backward: set .grad to None when it has travelled")


def judge_gradients(
    group: WatchedGroup, zero: Zero3, owners: dict[str, nn.Module], plain: nn.Module, before: dict[str, Tensor],
    step: int,
) -> None:  # fmt: skip
    """Everyone's shards of the gradients put together, beside one process's."""
    grads = zero.grads  # type: ignore[attr-defined]
    missing = [name for name, m in owners.items() if m not in grads]
    require(not missing, f"step {step}: self.grads has no entry for module {', '.join(missing)}")
    for name, m in owners.items():
        own_memory(grads[m], f"self.grads of {name}", "reduce-scatter into a tensor of its own")
    everyones = group.everyone({name: grads[m].detach().clone() for name, m in owners.items()})
    for name, m in owners.items():
        flat, at = torch.cat([each[name] for each in everyones]), 0
        for key, p in m.named_parameters(recurse=False):
            truth = plain.get_parameter(f"{name}.{key}").grad
            assert truth is not None
            found, what = flat[at : at + p.numel()].view(p.shape), f"{name}.{key}"
            at += p.numel()
            known = {}
            if what in before:
                known["only the last micro-batch is there: add to what the one before has left"] = truth - before[what]
            text = f"step {step}, the gradient of {what}"
            loose = (1e-4, 1e-5) if truth.dtype == torch.float32 else (0.1, 0.1 * float(truth.abs().max()))
            equal(found, truth, text, ranks=group.size, known=known, rtol=loose[0], atol=loose[1])


def judge_calls(watched: WatchedGroup, expected: int, step: int) -> None:
    """A unit that is reduced too often was reduced before all its gradients were there."""
    calls = watched.ledger.calls().get("reduce_scatter", 0)
    require(
        calls <= expected,
        f"step {step}: {calls} reduce-scatters, expected {expected}: wait for the last gradient of each module",
    )


def judge_traffic(watched: WatchedGroup, oracle: WatchedGroup, step: int, itemsize: int) -> None:
    gathers, wanted = (g.ledger.calls().get("all_gather", 0) for g in (watched, oracle))
    require(
        2 * gathers != wanted,
        f"step {step}: every unit is gathered once, expected twice: it must be freed between forward and backward",
    )
    same_traffic(watched, oracle, f"step {step}", itemsize=itemsize)


@dataclass(eq=False)
class Fake:
    """As much of a refimpl Unit as its plans look at."""

    name: str
    numel: int
    is_free: bool = True
    in_flight: bool = False

    @property
    def padded(self) -> int:
        return self.numel


def draw(seed: int) -> tuple[list[str], int, dict[str, Fake]]:
    """A trace (forward, then backward), a place in it, and units of which some are live and some on their way."""
    rng = random.Random(seed)
    units = {name: Fake(name, rng.randint(1, 20)) for name in "abcdefg"[: rng.randint(3, 7)]}
    trace = [*units, *reversed(units)]
    if seed % 3 == 0:  # not every model's backward is the mirror of its forward
        trace += rng.sample(trace, k=rng.randint(1, len(trace)))
    at = rng.randint(1, len(trace))
    for unit in units.values():
        unit.is_free = rng.random() < 0.6
        unit.in_flight = not unit.is_free and rng.random() < 0.4
    units[trace[at - 1]].is_free, units[trace[at - 1]].in_flight = False, False
    return trace, at, units


def refimpl_trace(trace: list[str], at: int, units: dict[str, Fake]) -> Trace:
    record = Trace()
    record.order = [(units[name], "forward") for name in trace]  # type: ignore[misc]
    record.at = at
    return record


@on_ranks(1)
def test_prefetch(answer: Answer, group: WatchedGroup) -> None:
    for seed in range(60):
        trace, at, units = draw(seed)
        rng = random.Random(1000 + seed)
        budget, most_live = rng.randint(0, 40), rng.choice((1000, rng.randint(10, 60)))
        sizes = {name: u.numel for name, u in units.items()}
        live, flying = (
            {n for n, u in units.items() if test(u)} for test in (lambda u: not u.is_free, lambda u: u.in_flight)
        )
        case(f"trace {' '.join(trace)}, at {at}")
        fetch = object.__new__(Fetch)
        fetch.gathered = {unit for unit in units.values() if not unit.is_free}  # type: ignore[misc]
        fetch.path = SimpleNamespace(trace=refimpl_trace(trace, at, units))  # type: ignore[assignment]
        fetch.config = ZeroConfig(prefetch_bucket_size=budget, max_live_parameters=most_live)
        with torch.enable_grad():
            expected = [u.name for u in fetch._ahead([units[trace[at - 1]]])]  # type: ignore[list-item]
        with untouched(trace=trace, sizes=sizes, live=live, flying=flying):
            found = answer.prefetch(trace, at, sizes, live, flying, budget, most_live)
        if found == expected:
            continue
        evidence = [
            f"  sizes {sizes}, live {sorted(live)}, flying {sorted(flying)}, budget {budget}, most_live {most_live}",
            f"  expected {expected}",
            f"  found    {found}",
        ]
        require(isinstance(found, list), f"the result is {found!r}, expected a list of names", *evidence)
        judge_prefetch(found, expected, sizes, live, flying, budget, most_live, evidence)


def judge_prefetch(
    found: list[str], expected: list[str], sizes: dict[str, int], live: set[str], flying: set[str], budget: int,
    most_live: int, evidence: list[str],
) -> None:  # fmt: skip
    require(not live & set(found), "a unit that is live already is gathered again", *evidence)
    require(len(set(found)) == len(found), "a unit is chosen twice", *evidence)
    aloft = {*found, *flying}
    in_air = sum(sizes[u] for u in aloft)
    fits = in_air <= budget or (len(aloft) == 1 and budget > 0)
    require(fits, f"{in_air} bytes would be on their way, the budget is {budget}", *evidence)
    alone = found == [] and len(expected) == 1 and sizes[expected[0]] > budget
    require(not alone, "a unit larger than the budget is never gathered ahead, although nothing else flies", *evidence)
    alive = sum(sizes[u] for u in {*found, *live})
    require(alive <= most_live, f"{alive} bytes would be live, most_live is {most_live}", *evidence)
    skipped = found[: len(expected)] == expected
    require(
        not skipped, "a later unit is taken although one before it does not fit: it would come too early", *evidence
    )
    raise Wrong("these are not the next units that fit", *evidence)


@on_ranks(1)
def test_to_release(answer: Answer, group: WatchedGroup) -> None:
    for seed in range(60):
        trace, at, units = draw(seed)
        limit = random.Random(2000 + seed).choice((0, 1, 10, 25, 1000))
        sizes, live = {n: u.numel for n, u in units.items()}, [n for n, u in units.items() if not u.is_free]
        case(f"trace {' '.join(trace)}, at {at}")
        record = refimpl_trace(trace, at, units)
        distances = {name: record.distance(units[name]) for name in live}  # type: ignore[arg-type]
        expected = [n for n, d in distances.items() if d is None or d >= limit]
        with untouched(trace=trace, sizes=sizes, live=live):
            found = answer.to_release(trace, at, sizes, live, limit)
        if found == expected:
            continue
        evidence = [
            f"  sizes {sizes}, live {live}, max_reuse_distance {limit}",
            f"  to be gathered before each is used again: {distances}",
            f"  expected {expected}",
            f"  found    {found}",
        ]
        require(isinstance(found, list), f"the result is {found!r}, expected a list of names", *evidence)
        require(set(found) <= set(live), "a unit is freed that is not live", *evidence)
        for name in live:
            if (name in found) != (name in expected):
                gone = distances[name]
                why = "is not used again" if gone is None else f"is used again after {gone} bytes are gathered"
                raise Wrong(f"{name} {why}: {'free' if name in expected else 'keep'} it", *evidence)
        raise Wrong("the order should be that of `live`", *evidence)


@on_ranks(2, 3)
def test_zero3_bytes(answer: Answer, group: WatchedGroup) -> None:
    widths = (8, 40, 16, 24, 8, 8)
    for dtype, budgets in ((torch.float32, (0, 700, 1500, 100_000)), (torch.bfloat16, (0, 1000))):
        for budget in budgets:
            case(f"{dtype}, budget {budget}")
            torch.manual_seed(0)
            model = nn.Sequential(*(nn.Linear(a, b, bias=False) for a, b in pairwise(widths)))
            model.to(dtype)
            config = ZeroConfig(prefetch_bucket_size=budget)
            stage = Zero3(model, optim.AdamW(model.parameters()), group.oracle(), config)
            meter = MemoryMeter(stage.tensors)
            for _ in range(2):  # the first iteration only records the trace
                meter.reset_peak()
                with meter:
                    stage.backward(model(torch.ones(2, widths[0], dtype=dtype)).sum())
                kept = meter.now()
                stage.step()
            classes = MemoryMeter(stage.tensors).now() | {k: kept[k] for k in ("parameters", "gradients")}
            classes["optimizer"] -= 4 * len(stage.buckets)  # AdamW's step counts
            total = sum(classes[k] for k in ("parameters", "gradients", "optimizer", "master weights"))
            counted = {"kept": total, "gathered": meter.peak["gathered"]}
            units = [u.padded for u in stage.units]
            found = answer.zero3_bytes(units, group.size, dtype.itemsize, budget)
            if dtype.itemsize * budget and found != counted:
                as_bytes = answer.zero3_bytes(units, group.size, dtype.itemsize, budget * dtype.itemsize)
                require(as_bytes != counted, "the budget counts elements, and you compare it with bytes")
            judge_bytes(found, counted, units, group.size, dtype.itemsize)
    for ranks in (16, 64):
        units = [ranks * n for n in (3, 5, 2)]
        case(f"units {units}, bf16, budget {4 * ranks}")
        one, many = (answer.zero3_bytes(units, n, 2, 4 * ranks) for n in (1, ranks))
        of_one = {"kept": one["kept"] // ranks, "gathered": one["gathered"]}
        require(many == of_one, f"on {ranks} ranks it is {many}; one rank's 1/{ranks} of what is kept is {of_one}")


def judge_bytes(found: object, counted: dict[str, int], units: list[int], ranks: int, itemsize: int) -> None:
    evidence = [f"units {units}, {ranks} ranks, {itemsize} bytes", f"  counted  {counted}", f"  found    {found}"]
    require(isinstance(found, dict), f"the result is {found!r}, expected a dict", *evidence)
    assert isinstance(found, dict)
    for key, sent in counted.items():
        mine = found.get(key)
        if mine == sent:
            continue
        known = {
            sent * ranks: "every class is sharded over the ranks",
            sum(units) * itemsize: "that is the whole model: units are freed after use",
            max(units) * itemsize: "that is the largest unit alone: what was sent for ahead is live too",
            sum(units) // ranks * (2 * itemsize + 8): "are there fp32 masters?",
            sum(units) // ranks * (2 * itemsize + 12): "beside fp32 parameters there are none that are masters",
        }
        why = f": {known[mine]}" if mine in known else ""
        raise Wrong(f"{mine} bytes {key}, counted {sent}{why}", *evidence)


class Large(nn.Module):
    """Looks, after each layer that it makes, at how much is whole; ends in an exception if told to."""

    def __init__(self, seen: list[int], fail: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        for i in range(5):
            layer = nn.Linear(9, out_features=11, bias=False) if i % 2 else nn.Embedding(11, 9, dtype=torch.bfloat16)
            self.layers.append(layer)
            seen.append(storage_bytes(self.parameters()))
        if fail:
            raise ValueError("this constructor fails on purpose")


@on_ranks(2, 3, 4)
def test_sharded_init(answer: Answer, group: WatchedGroup) -> None:
    originals = nn.Linear.__init__, nn.Embedding.__init__
    seen: list[int] = []
    kept = Kept(group)
    for fail in (False, True):
        case("a model is built, with other random numbers on every rank" if not fail else "its constructor fails")
        torch.manual_seed(group.rank)
        seen.clear()
        try:
            with answer.sharded_init(group.fresh(), nn.Linear, nn.Embedding) as made:
                built = Large(seen, fail)
        except ValueError:
            require(fail, "an exception of the constructor is raised, where there was none")
        else:
            require(not fail, "an exception inside the `with` block is swallowed")
            model, units = built, made
        restored = (nn.Linear.__init__, nn.Embedding.__init__) == originals
        nn.Linear.__init__, nn.Embedding.__init__ = originals  # type: ignore[method-assign]
        require(restored, "the classes' constructors are not what they were before: put them back in `finally`")
    evidence = f"bytes of whole parameters after each layer: {', '.join(map(str, seen))}"
    require(
        max(seen) == 0, "layers stay whole while the next are built: shard each when its constructor returns", evidence
    )
    case("what was built")
    del built, made
    shards = sum(storage_bytes([u.mine]) for u in units)
    kept.judge(shards, "sharded_init", "the units' shards alone may stay; what else holds the layers' first values?")
    torch.manual_seed(0)
    plain = Large([])
    require(len(units) == 5, f"{len(units)} units were yielded, expected one for each of 5 layers")
    for unit in units:
        unit.gather()
    kinds, asked = ({n: (tuple(p.shape), p.dtype) for n, p in m.named_parameters()} for m in (model, plain))
    lost = "the layers are not built as they were asked for: pass keyword arguments (bias=False, dtype=...) on too"
    require(kinds == asked, lost, f"  built  {kinds}", f"  asked  {asked}")
    for (name, p), truth in zip(model.named_parameters(), plain.parameters(), strict=True):
        equal(p.detach(), truth.detach(), f"{name} after gather()")
