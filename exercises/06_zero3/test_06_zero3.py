"""Grades chapter 06's stage: what is whole at each moment, gradients equal to one process's, and what is sent."""

from functools import partial

import torch
from torch import Tensor, nn

from refimpl.grading.compare import equal, require
from refimpl.grading.grade import on_ranks
from refimpl.grading.memory import Kept, own_memory, storage_bytes
from refimpl.grading.rank import Answer, case
from refimpl.grading.traffic import WatchedGroup, all_done, same_traffic
from refimpl.zero.zero3 import Zero3

FEATURES, LAYERS = 7, 5


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
        self.gain, self.shift = nn.Parameter(torch.rand(3) + 0.5), nn.Parameter(torch.ones(2))
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.inner(x) * self.shift[0] + self.shift.mean())
        if h.requires_grad:
            h.register_hook(self.look)
        out: Tensor = h * self.gain.mean()
        return out

    def look(self, grad: Tensor) -> None:
        """gain's gradient is complete; what comes next in backward needs the values of shift."""
        early = "a module is freed inside its backward: wait for the last gradient of each module"
        require(self.shift.untyped_storage().nbytes(), early)


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


@on_ranks(2, 3, 4)
def test_Zero3(answer: Answer, group: WatchedGroup) -> None:
    for steps, parts in ((2, 1), (1, 3)):
        case(f"steps: {steps}, micro-batches: {parts}")
        train(answer, group, steps, parts, torch.float32)
    case("the model itself has parameters of its own")
    whole = Scaled(nn.Linear(3, 3))
    zero = answer.Zero3(whole, group.fresh())
    require(not zero.grads, "a new Zero3 has gradients: is the dictionary the class's, one for all of them?")
    require(whole in zero.units, "self.units leaves out the model itself, which has parameters of its own")
    watched, (model, probe), (plain, _) = group.fresh(), net(0), net(0)
    answer.Zero3(model, watched)
    for training in (True, False):
        case("an evaluation under torch.no_grad()" + ", after model.eval()" * (not training))
        with torch.no_grad():
            equal(model.train(training)(batch(0, 0)), plain(batch(0, 0)), "the output")
        left = storage_bytes(probe.params)
        require(left == 0, f"{left} bytes of parameters are still whole after an evaluation")
    case("bf16, trained in evaluation mode")
    train(answer, group, 1, 2, torch.bfloat16)


def train(answer: Answer, group: WatchedGroup, steps: int, parts: int, dtype: torch.dtype) -> None:
    """Steps of plain descent on the shards, beside one process's; gradients, memory, traffic."""
    watched, (plain, _) = group.fresh(), net(0)
    plain.to(dtype)
    largest = dtype.itemsize * max(sum(p.numel() for p in m.parameters(recurse=False)) for m in plain.modules())
    for p in plain.parameters():
        p.grad = torch.zeros_like(p)  # there from the start: not to be counted as the answer's
    kept = Kept(watched)
    model, probe = net(0)
    model.to(dtype).train(dtype == torch.float32)  # a model is also tuned in evaluation mode, without dropout
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
    for step in range(steps):
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
        judge_gradients(group, zero, owners, plain, before, step, parts)
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
                mode = "" if module.training else ", in evaluation mode"
                case(f"the backward of module {name} begins, and its parameters have no memory{mode}")

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
    step: int, parts: int,
) -> None:  # fmt: skip
    """Everyone's shards of the gradients put together, beside one process's."""
    grads = zero.grads  # type: ignore[attr-defined]
    missing = [name for name, m in owners.items() if m not in grads]
    require(not missing, f"step {step}: self.grads has no entry for module {', '.join(missing)}")
    for name, m in owners.items():
        size = -(-sum(p.numel() for p in m.parameters(recurse=False)) // group.size)
        shard = f"step {step}: self.grads of {name} has {grads[m].numel()} elements, and a shard {size}: keep your own"
        require(grads[m].numel() == size, shard)
        own_memory(grads[m], f"self.grads of {name}", "reduce-scatter into a tensor of its own")
        dtype = next(plain.parameters()).dtype
        advice = (
            f"self.grads of {name} is {grads[m].dtype}, not {dtype}: further backwards add up in the gradients' dtype"
        )
        require(grads[m].dtype == dtype, f"step {step}: {advice}")
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
            equal(found, truth, text, ranks=group.size, parts=parts, known=known, rtol=loose[0], atol=loose[1])
        require(not flat[at:].any(), f"step {step}: the padding of self.grads of {name} is not zero: a norm counts it")


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
    require(
        gathers >= wanted,
        f"step {step}: {gathers} gathers, expected {wanted}: {wanted - gathers} of the units are still whole when "
        "backward comes to them: free each one after its forward",
    )
    same_traffic(watched, oracle, f"step {step}", itemsize=itemsize)
