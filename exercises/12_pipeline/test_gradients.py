"""Grades chapter 12's gradients: those of weights that stages share, and a backward in two halves."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from refimpl.grading.compare import equal, require
from refimpl.grading.grade import on_ranks
from refimpl.grading.memory import Kept, let_go, own_memory, untouched
from refimpl.grading.rank import Answer, case
from refimpl.grading.traffic import WatchedGroup, all_done, starts


@on_ranks(2, 3, 4)
def test_tied_gradients(answer: Answer, group: WatchedGroup) -> None:
    N = group.size
    for ranks, dtype, missing in (
        ([0, N - 1], torch.float32, []),
        ([0, N - 1], torch.bfloat16, list(range(1, N))),  # strangers too
        ((N - 1, *range(N - 1)), torch.float32, []),
        ([*range(N)[1:], 0], torch.float32, []),
        (list(range(1, N)), torch.float32, list(range(1, N))),
    ):
        none = f", no gradient of the first parameter on {missing}" if missing else ""
        case(f"copies on ranks {list(ranks)}, {str(dtype).removeprefix('torch.')}{none}")
        every = {rank: copies(rank, dtype, rank in missing) for rank in range(N)}
        params, fresh = copies(group.rank, dtype, group.rank in missing), group.fresh()
        with untouched(ranks=ranks, params=[p.detach() for p in params]):
            answer.tied_gradients(fresh, ranks, params)
        seen = group.everyone([p.grad for p in params])
        if group.rank in ranks:
            for i, p in enumerate(params):
                judge_sum(p, [every[r][i].grad for r in ranks], every[group.rank][i].grad, i)
                judge_bits([seen[r][i] for r in ranks], i)
            judge_exchange(fresh, ranks, sum(p.nbytes for p in params))
        else:
            judge_stranger(fresh, params, every[group.rank])


def copies(rank: int, dtype: torch.dtype, is_missing: bool) -> list[nn.Parameter]:
    """A rank's copies of two weights, with gradients of its own; one's memory is not contiguous.

    The second's begin with numbers whose sum depends on the order in which they are added.
    """
    chance = torch.Generator().manual_seed(rank)
    params = [nn.Parameter(torch.ones(5, 3, dtype=dtype)), nn.Parameter(torch.ones(7, dtype=dtype))]
    params[0].grad = None if is_missing else torch.randn(3, 5, generator=chance).to(dtype).t()
    params[1].grad = torch.randn(7, generator=chance).to(dtype)
    params[1].grad[0] = (1.0, 1e20, -1e20, 1.0)[rank]
    return params


def judge_stranger(group: WatchedGroup, params: list[nn.Parameter], before: list[nn.Parameter]) -> None:
    """Of a rank that holds no copy."""
    for p, old in zip(params, before, strict=True):
        has = p.grad is not None and old.grad is not None
        same = torch.equal(p.grad, old.grad) if has else p.grad is old.grad  # type: ignore[arg-type]
        require(same, f"rank {group.rank} holds no copy, and its gradients were changed")
    require(not group.ledger.events, f"rank {group.rank} holds no copy, and takes part in a transfer")


def judge_sum(p: nn.Parameter, grads: list[Tensor | None], own: Tensor | None, i: int) -> None:
    total, what = torch.zeros_like(p), f"the gradient of shared parameter {i}"
    for grad in grads:
        total = total if grad is None else total + grad
    require(p.grad is not None, f"{what} is None: a missing one counts as zeros, and the sum is a gradient")
    known = {"the mean over the copies: they are parts of one gradient, to be added": total / len(grads)}
    if own is not None:
        known |= {"this rank's own part, nothing was added": own, "this rank's own part counts twice": total + own}
    known = known if len(grads) > 1 else {}
    equal(
        p.grad,
        total,
        f"{what} (added in the order of `ranks`)",
        known=known,
        rtol=2e-2 if p.dtype == torch.bfloat16 else 1e-5,
    )
    assert p.grad is not None
    require(not p.grad.requires_grad, f"{what} requires a gradient itself: it is added up without a graph")
    own_memory(p.grad, what, "it keeps the sums of all parameters alive; clone the part")


def judge_bits(seen: list[Tensor], i: int) -> None:
    what = f"the gradient of shared parameter {i} is None on some rank: a missing one counts as zeros"
    require(all(grad is not None for grad in seen), what)
    alike = all(torch.equal(grad, seen[0]) for grad in seen)
    at = int(max((grad != seen[0]).flatten().int().argmax() for grad in seen))
    digits = f"  element {at}: " + ", ".join(repr(grad.flatten()[at].item()) for grad in seen)
    advice = "add in the order of `ranks`, your own in its place"
    require(alike, f"the gradient of shared parameter {i} has other bits on each rank: {advice}", digits)


def judge_exchange(group: WatchedGroup, ranks: list[int], nbytes: int) -> None:
    sends = starts(group.ledger, "send")
    others = sorted(set(group.ledger.calls()) - {"send", "recv"})
    require(not others, f"{', '.join(others)} is used: it needs all ranks of the group, also those without a copy")
    partners = [r for r in ranks if r != group.rank]
    for to in partners:
        mine = [e for e in sends if e.tag == f"to {to}"]
        total = sum(e.sent_bytes for e in mine)
        require(total != 2 * nbytes, f"rank {to} is sent 2x the bytes: {total:,}; in the gradients' own dtype, once")
        require(total == nbytes, f"rank {to} is sent {total:,} bytes, expected {nbytes:,}: every gradient once")
        require(len(mine) == 1, f"rank {to} is sent {len(mine)} messages, expected 1: flatten all gradients into one")
    strangers = sorted({e.tag for e in sends} - {f"to {to}" for to in partners})
    require(not strangers, f"a message goes {', '.join(strangers)}, which holds no copy")
    all_done(group, "tied_gradients")


class Products(TorchDispatchMode):
    """Counts multiplications of matrices."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket.__name__ in ("mm", "addmm", "bmm", "baddbmm")
        return func(*args, **(kwargs or {}))


@on_ranks(1)
def test_split_linear(answer: Answer, group: WatchedGroup) -> None:
    for shape, dtype, frozen, first in (
        ((6, 5), torch.float32, (), False),
        ((2, 3, 5), torch.bfloat16, (), False),
        ((6, 5), torch.float32, ("weight",), False),
        ((6, 5), torch.float32, ("bias",), False),
        ((6, 5), torch.float32, ("weight", "bias"), False),
        ((6, 5), torch.float32, (), True),
        ((5,), torch.float32, (), False),
    ):
        words = [f"x {list(shape)}", str(dtype).removeprefix("torch."), *(f"{name} frozen" for name in frozen)]
        case(", ".join(words) + ", x needs no gradient" * first)
        judge_halves(answer, shape, dtype, frozen, first)
    case("two micro-batches, then both weight halves")
    judge_accumulation(answer)
    case("what is kept")
    judge_release(answer, group)


def weights(dtype: torch.dtype, frozen: tuple[str, ...] = ()) -> dict[str, nn.Parameter]:
    chance = torch.Generator().manual_seed(2)
    made = {"weight": torch.randn(4, 5, generator=chance), "bias": torch.randn(4, generator=chance)}
    return {name: nn.Parameter(x.to(dtype), requires_grad=name not in frozen) for name, x in made.items()}


def judge_halves(
    answer: Answer, shape: tuple[int, ...], dtype: torch.dtype, frozen: tuple[str, ...], first: bool
) -> None:
    torch.manual_seed(3)
    x = torch.randn(shape).to(dtype)
    x = (x.mT.contiguous().mT if x.ndim > 1 else x).requires_grad_(not first)  # not contiguous
    gradient, rough = torch.randn(*shape[:-1], 4).to(dtype), 3e-2 if dtype == torch.bfloat16 else 1e-5
    twin, truth = x.detach().clone().requires_grad_(not first), weights(dtype, frozen)
    out = F.linear(twin, truth["weight"], truth["bias"])
    if out.requires_grad:
        out.backward(gradient)
    params, later = weights(dtype, frozen), list[Callable[[], None]]()
    y = answer.split_linear(x, params["weight"], params["bias"], later)
    equal(y, out, "the output", rtol=rough, atol=rough)
    require(not later, "something is put off in forward already: the gradient is known in backward only")
    if not y.requires_grad:
        require(not out.requires_grad, "the output has no graph: apply the Function to x, weight and bias")
        return
    with Products() as products:
        y.backward(gradient)
    early = " and ".join(name for name, p in params.items() if p.grad is not None)
    require(not early, f"backward has computed the gradient of {early} already: that is the weight half")
    why = "the gradient of x, which needs none, was computed" if first else "the product of the input half alone"
    allowed = int(not first)
    require(products.count <= allowed, f"backward multiplies {products.count} matrices, expected {allowed}: {why}")
    if first:
        require(x.grad is None, "x needs no gradient, and got one")
    else:
        equal(x.grad, twin.grad, "the gradient of x", rtol=rough, atol=rough)  # type: ignore[arg-type]
    wanted = int(len(frozen) < 2)
    require(len(later) == wanted, f"{len(later)} weight halves are put off after one backward, expected {wanted}"
            + ": weight and bias are frozen" * (not wanted))  # fmt: skip
    with Products() as products:
        for half in later:
            half()
    judge_weights(params, truth, frozen, rough)
    extra = int("weight" not in frozen)
    require(products.count <= extra, f"the weight half multiplies {products.count} matrices, expected {extra}")


def judge_weights(
    params: dict[str, nn.Parameter], truth: dict[str, nn.Parameter], frozen: tuple[str, ...], rough: float
) -> None:
    for name, p in params.items():
        if name in frozen:
            require(p.grad is None, f"{name} is frozen, and its weight half gave it a gradient")
            continue
        require(p.grad is not None, f"the gradient of {name} is missing after the weight half")
        has_graph = p.grad is not None and p.grad.requires_grad
        require(not has_graph, f"the gradient of {name} requires a gradient itself: detach the x that was saved")
        equal(p.grad, truth[name].grad, f"the gradient of {name}", rtol=rough, atol=rough)  # type: ignore[arg-type]


def judge_accumulation(answer: Answer) -> None:
    params, truth, one, other = (weights(torch.float32) for _ in range(4))
    for p in (*params.values(), *truth.values()):
        p.grad = torch.ones_like(p)  # of a micro-batch before
    later: list[Callable[[], None]] = []
    for k, own in enumerate((one, other)):
        torch.manual_seed(k)
        before = [*later]
        x, scale = torch.randn(6, 5, requires_grad=True), torch.randn(6, 4)
        (answer.split_linear(x, params["weight"], params["bias"], later) * scale).sum().backward()
        require(later[:k] == before, "`later` is the caller's, in order of the backwards: append behind what is there")
        for twin in (truth, own):
            (F.linear(x.detach(), twin["weight"], twin["bias"]) * scale).sum().backward()
    require(len(later) == 2, f"{len(later)} weight halves are put off after two backwards, expected 2, none lost")
    for half in reversed(later):
        half()
    for name, p in params.items():
        first, last, total = (twin[name].grad for twin in (one, other, truth))
        assert first is not None
        assert last is not None
        assert total is not None
        known = {
            "what was there before is lost: backward leaves weight.grad alone, and each half adds to it": total - 1,
            "that of the half called last alone: add to what is there": first,
            "the last micro-batch's alone": last,
            "the last micro-batch's twice: each weight half needs the x and the gradient of its own": 2 * last,
        }
        equal(p.grad, total, f"the gradient of {name} over two micro-batches", known=known)


def judge_release(answer: Answer, group: WatchedGroup) -> None:
    weight, bias = nn.Parameter(torch.randn(4, 256)), nn.Parameter(torch.randn(4))
    later: list[Callable[[], None]] = []
    kept = Kept(group)
    x = torch.randn(256, 256, requires_grad=True)
    output = let_go([answer.split_linear(x, weight, bias, later)], "the output")
    kept.judge(x.nbytes, "between forward and backward it", "x itself, of which the product needs no copy, may stay")
    torch.autograd.backward(output, torch.ones(1).expand(len(x), len(bias)))
    x.grad = None
    held = x.nbytes + len(x) * bias.nbytes
    kept.judge(held, "between backward and the weight half it", "x itself and the gradient may stay, and no copy")
    later[0]()
    del x, output
    advice = "the function that was called still holds x or the gradient: clear what it keeps"
    kept.judge(weight.nbytes + bias.nbytes, "after the weight half it", advice)
    require(len(later) == 1, "`later` is the caller's: append to it, and take nothing away")
