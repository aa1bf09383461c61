"""Grades chapter 07: gradients to the last bit, what is kept for backward, second runs, and bytes as counted."""

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from refimpl.grading.compare import Wrong, equal, require
from refimpl.grading.grade import on_ranks
from refimpl.grading.memory import Kept
from refimpl.grading.rank import Answer, case
from refimpl.grading.traffic import WatchedGroup
from refimpl.measure.memory import MemoryMeter

Call = Callable[..., Any]
ROWS, WIDTH = 64, 16
DRAWN = "a random number drawn after backward"


class Layer(nn.Module):
    """Dropout between two products, a frozen one among them; counts its runs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.runs = self.needless = 0

    def one(self, x: Tensor) -> Tensor:
        self.runs += 1
        return x + self.frozen(self.down(F.dropout(F.gelu(self.up(x)), 0.5)))

    def several(self, x: Tensor, rows: Tensor, scale: float, other: Tensor) -> tuple[Tensor, ...]:
        self.needless += other.requires_grad
        y = self.one(x)[rows] * scale
        return y, other.sin(), y.detach().argmax(1), x.square()


def alone(layer: Layer, x: Tensor, call: Call) -> Tensor:
    return call(layer.one, x)


def chained(layer: Layer, x: Tensor, call: Call) -> Tensor:
    return call(layer.one, F.dropout(call(layer.one, x), 0.1))


def mixed(layer: Layer, x: Tensor, call: Call) -> Tensor:
    rows = torch.arange(ROWS).flip(0)
    y, other, best, square = call(layer.several, x, rows, 0.5, x.detach() * 2)
    return y * other + best[:, None] + square


def both(layer: Layer, x: Tensor, call: Call) -> Tensor:
    return call(lambda scale, a, b: layer.one(a) * b.sin() * scale, 0.5, x * 2, x * 3)  # type: ignore[no-any-return]


def partly(layer: Layer, x: Tensor, call: Call) -> Tensor:
    outputs: tuple[Tensor, ...] = call(layer.several, x, torch.arange(ROWS), 0.5, x.detach())
    return outputs[0]


def gradients(use: Callable[[Layer, Tensor, Call], Tensor], call: Call) -> tuple[dict[str, Tensor], Layer]:
    """Output, gradients, and a random number drawn at the end; and the layer."""
    layer, x = Layer(), torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1)).requires_grad_()
    torch.manual_seed(2)
    out = use(layer, x, call)
    out.square().sum().backward()
    found = {"the output": out.detach(), "the input's gradient": x.grad}
    found |= {f"the gradient of {name}": p.grad for name, p in layer.named_parameters() if p.requires_grad}
    for name, tensor in found.items():
        require(tensor is not None, f"{name} is missing: backward must reach it")
    return {**found, DRAWN: torch.rand(3)}, layer  # type: ignore[dict-item]


def in_a_tuple(layer: Layer, x: Tensor, call: Call) -> Tensor:
    outputs = call(lambda x: (layer.one(x),), x)
    require(isinstance(outputs, tuple), "fn returns a tuple of one tensor, and checkpoint the tensor itself")
    return outputs[0]  # type: ignore[no-any-return]


def plain(fn: Call, *args: Any) -> Any:
    return fn(*args)


@on_ranks(1)
def test_checkpoint(answer: Answer, group: WatchedGroup) -> None:
    cases = {
        "one layer": alone,
        "two layers, dropout between them": chained,
        "integers, a float, several outputs": mixed,
        "a float, and two tensors that need gradients": both,
        "several outputs, of which only one is used": partly,
        "one output, in a tuple": in_a_tuple,
    }
    needless = 0
    for name, use in cases.items():
        case(name)
        (found, layer), (expected, once) = gradients(use, answer.checkpoint), gradients(use, plain)
        judge_runs(layer.runs, once.runs)
        needless += layer.needless
        for what, truth in expected.items():
            reason = "the second run must draw the same random numbers: set the generator back to where the first began"
            if "layer" not in name:
                reason = "backward gets a gradient for each output, and all of them count"
            if use is both:
                reason = "each argument has a gradient of its own, and its own place in what backward returns"
            if what == DRAWN:
                reason = "the generator does not stand where it stood before the second run: put it back there"
            if isinstance(found[what], Tensor) and found[what].shape == truth.shape:
                twice = f"{what} counts twice: the second run needs arguments of its own, detached"
                require(what == DRAWN or not torch.allclose(found[what], 2 * truth), twice)
                require(torch.equal(found[what], truth), f"{what} is another: {reason}")
            equal(found[what], truth, what)
    case("what is kept between forward and backward")
    judge_kept(answer.checkpoint)
    why = "an argument that needs no gradient gets one in the second run: see ctx.needs_input_grad"
    require(not needless, why)
    case("an argument is changed in place before backward")
    x = torch.ones(4, requires_grad=True) * 1
    y = answer.checkpoint(torch.sin, x)
    with torch.no_grad():
        x.add_(1)
    try:
        y.sum().backward()
    except RuntimeError:
        return
    raise Wrong("an argument that was changed in place goes unnoticed: keep tensors by ctx.save_for_backward")


def judge_runs(runs: int, once: int) -> None:
    require(runs != once, "fn ran only in forward: nothing is computed again, so everything was kept")
    require(runs == 2 * once, f"fn ran {runs} times, expected {2 * once}: once in forward and once in backward")


def judge_kept(checkpoint: Call) -> None:
    layer, x = Layer(), torch.randn(4 * ROWS, WIDTH)
    meter = MemoryMeter(lambda: {"parameters": layer.parameters()})
    with meter:
        middle, other = (x * 1).requires_grad_(), x * 1
        loss = (checkpoint(lambda a, b: layer.one(a) + b, middle, other) * other).sum()
        kept = meter.now()
    found, room = kept["activations"] + kept["other"], middle.nbytes + other.nbytes
    of_ctx = "the result is the caller's: do not keep it on ctx, nor a copy of an argument, which is kept itself"
    recorded = "what autograd recorded of fn is still there: forward of an autograd.Function records nothing by itself"
    require(
        found <= room + 6000,
        f"{found:,} bytes stay alive between forward and backward, expected {room:,}: the two arguments alone",
        of_ctx if found <= room + 2 * x.nbytes + 6000 else recorded,
    )
    with meter:
        loss.backward()
        kept = meter.now()
    of_weights = sum(p.grad.nbytes for p in layer.parameters() if p.grad is not None)
    found, room = kept["activations"] + kept["other"], room + middle.nbytes + of_weights
    require(
        found <= room + 6000,
        f"{found:,} bytes stay alive after backward, expected {room:,}: the arguments, and gradients",
        "what the second run has computed, or the gradient that arrived, is still there: keep nothing of it on ctx",
    )


class Counter(TorchDispatchMode):
    """Operations that are really computed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def network(x: Tensor, weight: Tensor, alpha: int = 3, again: int = 1) -> Tensor:
    torch.manual_seed(3)
    y = F.dropout(torch.mm(x, weight), 0.5)
    y = torch.mm(y.sin(), weight).mul_(2)  # in place: what is kept of the product must not change with it
    y = torch.add(torch.mm(y.exp(), weight), y * again, alpha=alpha)  # a keyword
    y = y[torch.multinomial(torch.ones(3), 3)]
    return (y + y * torch.rand(3, 3)).t().cos()  # in memory column by column


@on_ranks(1)
def test_KeepResults(answer: Answer, group: WatchedGroup) -> None:
    everything = {
        "mm": lambda op: op.overloadpacket.__name__ == "mm",
        "all but views": keepable,
        "none": lambda op: False,
    }
    for (name, keep), dtype in itertools.product(everything.items(), (torch.float32, torch.bfloat16)):
        case(f"keep: {name}, {str(dtype).removeprefix('torch.')}")
        x, weight = torch.randn(3, 3).to(dtype), torch.randn(3, 3).to(dtype)
        expected, after = network(x, weight), torch.rand(2)
        known = {
            "what is kept was changed in place by who got it: keep and hand out copies": network(x, weight, again=2),
            "torch.add's keyword `alpha` is lost: call func(*args, **(kwargs or {}))": network(x, weight, alpha=1),
        }
        switched_on(answer.KeepResults(keep))
        kept, outs = answer.KeepResults(keep), []
        for run, what in enumerate(("first", "second", "third", "fourth")):
            with Counter() as counter, kept:
                outs.append(network(x, weight))
            drawn = f"a random number drawn after the {what} run is another than after fn itself"
            require(torch.equal(torch.rand(2), after), f"{drawn}: what is random is drawn in every run, and never kept")
            equal(outs[-1], expected, f"the {what} run's result", known=known)
            strides = "elements lie in another order in memory than fn's own result: clone() keeps it"
            require(outs[-1].stride() == expected.stride(), f"the {what} run's result: {strides}")
            computed = counter.seen.count("mm")
            if run and name != "none":
                require(not computed, f"the {what} run computes {computed} products of which the results were kept")
            else:
                require(computed == 3, f"{computed} products were computed in the {what} run, expected 3")
    case("two functions at a time, each with results of its own")
    x, weight = torch.randn(2, 3, 3), torch.randn(3, 3)
    both = [answer.KeepResults(everything["mm"]) for _ in range(2)]
    for what in ("the first run", "the second run, after another's first"):
        for kept, each in zip(both, x, strict=True):
            with kept:
                out = each @ weight
            of_another = {"the results of another KeepResults: each keeps its own": (x.sum(0) - each) @ weight}
            equal(out, each @ weight, f"{what}: the product", known=of_another)
    case("results are kept without their graph")
    weight = torch.randn(3, 3)
    x, kept, before = torch.randn(3, 3), answer.KeepResults(everything["mm"]), Kept(group)
    with kept:
        out = network(x.clone().requires_grad_(), weight)
    del out
    before.judge(3 * 36, "the first run", "three products of 36 bytes may stay: detach what is kept")


def switched_on(mode: Any) -> None:
    """Raise Wrong unless `with` makes torch ask it."""
    mode.__enter__()
    on = _get_current_dispatch_mode() is mode
    if on:
        mode.__exit__(None, None, None)
    require(on, "no operation is seen inside `with`: call TorchDispatchMode's own __enter__, which switches it on")


def keepable(op: Any) -> bool:
    """Makes new tensors, and changes none."""
    return not op.is_view and not op._schema.is_mutable
