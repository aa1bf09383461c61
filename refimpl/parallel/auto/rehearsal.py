"""Whether a cut model computes the whole one: each rank plays its part alone, against the whole model's own numbers.

    whole run     notes what goes out of each layer, and the gradient that comes back into it
    a part        this rank's part of the model. Where ranks would add up, it notes its summand, and takes the whole
                  run's sum and goes on: so one rank needs no other, and one whose part fails leaves nobody waiting
    after it      summands of all ranks must add up to those sums; outputs, logits and gradients of parts must be parts
                  of the whole's. By induction over the layers the cut model then computes what the whole one does

It is played on a twin of the model with random weights in fp64: a bias that is 0 would show nothing. Twice, in training
with gradients, and without them in evaluation, for which some modules have another way; dropout drops nothing, but must
stand in the right places. Parameters that are whole on every rank must have either the whole gradient, or parts of it
that add up: then they work inside a cut region, like a norm over the features of a head, and their gradients must be
summed.

BOUND: rounding differs in the last bits, of fp32 where a model computes a softmax or norm in it whatever it is given,
some 1e-7. What a wrong cut leaves out is a rank's share of a sum.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from refimpl.activation.state import aside
from refimpl.comm.group import Group
from refimpl.parallel.auto.dropout import Inside, NoDropout, drawn_wrong
from refimpl.parallel.auto.trace import Call, hooked, plain_layers, tensors
from refimpl.parallel.split import Split
from refimpl.parallel.tensor import ColumnParallelLinear, Parted, RowParallelLinear, cuts, local
from refimpl.parallel.vocabulary import VocabParallelEmbedding

BOUND = 1e-3  # relative to a tensor's norm
FLOOR = 1e-6  # of the largest such tensor: what is 0 but for rounding has no relative error

Key = tuple[str, int]  # a layer, and which of its calls


@dataclass
class Notes:
    """Of one run."""

    outs: dict[Key, Tensor] = field(default_factory=dict)  # what comes out of a layer; of a part: this rank's summand
    sums: dict[Key, Tensor] = field(default_factory=dict)  # of a part: what the summands must add up to
    grads: dict[Key, Tensor] = field(default_factory=dict)  # what its input's gradient is
    outputs: list[Tensor] = field(default_factory=list)
    dropout: NoDropout = field(default_factory=NoDropout)
    params: dict[str, Tensor] = field(default_factory=dict)  # gradients
    copied: list[str] = field(default_factory=list)  # of a part: parameters that several ranks have the same part of
    shares: dict[Key, tuple[Tensor, Tensor]] = field(default_factory=dict)  # of outputs that are gathered: found, right


class Note(torch.autograd.Function):
    """x. Its gradient is noted, and `instead` is handed on if there is one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, notes: dict[Key, Tensor], key: Key, instead: Tensor | None) -> Tensor:
        ctx.notes, ctx.key, ctx.instead = notes, key, instead
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        ctx.notes[ctx.key] = grads[0]
        return grads[0] if ctx.instead is None else ctx.instead, None, None, None


class Substitute(torch.autograd.Function):
    """`whole` in place of x; its gradient goes back to x, or its part along the last dimension does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, whole: Tensor, part: Any) -> Tensor:
        ctx.part = part
        return whole.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0] if ctx.part is None else ctx.part(grads[0]), None, None


def make_twin(model: nn.Module, dtype: torch.dtype = torch.float64) -> nn.Module:
    """A copy on the CPU with other weights, equal on all ranks: spread as in a model that trains well."""
    twin: nn.Module = deepcopy(model)._apply(lambda x: x.to("cpu", in_twin(x, dtype)))  # type: ignore[no-untyped-call]
    draw = torch.Generator().manual_seed(0)
    for p in twin.parameters():
        if p.is_floating_point():
            noise = torch.randn(p.shape, generator=draw, dtype=torch.float64)
            p.requires_grad_()
            with torch.no_grad():
                p.copy_(noise * p.shape[-1] ** -0.5 if p.dim() > 1 else p + 0.1 * noise)
    if getattr(twin, "config", None) is not None and hasattr(twin.config, "use_cache"):
        twin.config.use_cache = False  # or the outputs are keys and values too, of which a rank has its heads
    for module in twin.modules():
        if getattr(module, "gradient_checkpointing", False) is True:
            module.gradient_checkpointing = False  # type: ignore[assignment]  # the marks are gone when it runs again
    return twin.eval()


def in_twin(x: Tensor, dtype: torch.dtype) -> torch.dtype:
    """The dtype of a tensor there: a rotation by complex numbers stays one."""
    if x.is_complex():
        return dtype.to_complex()
    return dtype if x.is_floating_point() else x.dtype


@contextmanager
def seeded(dropout: NoDropout | None) -> Iterator[None]:
    """The same random numbers in every run, none taken from the caller's.

    `dropout`: None in evaluation, where it is off by itself; torch's own layers look there whether anybody intercepts
    their calls, and then do not take the way that is to be tried.
    """
    with aside(torch.device("cpu"), seed=0), dropout if dropout is not None else nullcontext():
        yield


@contextmanager
def kept_buffers(model: nn.Module) -> Iterator[None]:
    """After it they are as before: a BatchNorm's running statistics, on which its next evaluation would depend."""
    before = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        for buffer, was in before:
            buffer.data.copy_(was)


def play(model: nn.Module, call: Call, notes: Notes, learning: bool) -> None:
    """One run. `learning`: in training, with gradients of a random sum of all outputs; else evaluation."""
    model.train(learning)
    model.zero_grad()
    with kept_buffers(model), seeded(notes.dropout if learning else None), torch.set_grad_enabled(learning):
        outputs = tensors(call(model))
        if learning:
            draw, ys = torch.Generator().manual_seed(1), [y for y in outputs if y.requires_grad]
            torch.autograd.backward(ys, [torch.randn(y.shape, generator=draw, dtype=y.dtype) for y in ys])
    notes.outputs = [y.detach() for y in outputs]
    notes.params = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()


def whole_run(twin: nn.Module, call: Call, learning: bool) -> Notes:
    """The notes of the model as it is, of all plain layers."""
    notes, calls = Notes(), Counter[str]()

    def enter(module: nn.Module, args: Any, name: str) -> Any:
        calls[name] += 1
        if not args or not args[0].is_floating_point():
            return None
        return (Note.apply(args[0], notes.grads, (name, calls[name] - 1), None), *args[1:])  # type: ignore[no-untyped-call]

    def leave(module: Any, args: Any, out: Any, name: str) -> None:
        if isinstance(out, Tensor):
            notes.outs[name, calls[name] - 1] = out.detach().clone()  # the model may write to it

    with hooked(plain_layers(twin), enter, leave):
        play(twin, call, notes, learning)
    return notes


class Stand:
    """What a cut layer exchanges with the other ranks, in a rehearsal: notes, and the whole run's numbers."""

    def __init__(self, name: str, layer: Any, whole: Notes, part: Notes) -> None:
        self.name, self.layer, self.whole, self.part = name, layer, whole, part
        self.entered, self.left = count(), count()

    def enter(self, x: Tensor, group: Group) -> Tensor:
        key = self.name, next(self.entered)
        y: Tensor = Note.apply(x, self.part.grads, key, self.whole.grads.get(key))  # type: ignore[no-untyped-call]
        return y

    def sum(self, x: Tensor, group: Group) -> Tensor:
        key, bias = (self.name, next(self.left)), getattr(self.layer, "bias", None)
        whole = self.whole.outs[key] if bias is None else self.whole.outs[key] - bias.detach()
        self.part.outs[key], self.part.sums[key] = x.detach(), whole
        y: Tensor = Substitute.apply(x, whole, None)  # type: ignore[no-untyped-call]
        return y

    def gathered(self, x: Tensor, group: Group) -> Tensor:
        key, split = (self.name, next(self.left)), self.layer.split
        whole = self.whole.outs[key]
        self.part.shares[key] = x.detach(), split.part(whole, group.rank, -1)
        y: Tensor = Substitute.apply(x, whole, lambda grad: split.part(grad, group.rank, -1))  # type: ignore[no-untyped-call]
        return y


def stand_in(model: nn.Module, whole: Notes, part: Notes) -> None:
    """In every cut layer, a rehearsal's exchanges in place of the group's."""
    place: Any = Inside()
    part.dropout = NoDropout(place)
    for name, layer in model.named_modules():
        if isinstance(layer, ColumnParallelLinear | RowParallelLinear):
            layer.draws = place
        if isinstance(layer, Parted):
            stand = Stand(name, layer, whole, part)
            if isinstance(layer, ColumnParallelLinear):
                layer.enter = stand.enter
                layer.leave = stand.gathered if layer.gathered else local
            elif isinstance(layer, RowParallelLinear | VocabParallelEmbedding):
                layer.leave = stand.sum


def close(found: Tensor, expected: Tensor, scale: Tensor | float = 0.0) -> bool:
    """Whether two tensors are equal but for rounding. `scale`: the norm of what they are a part of."""
    if found.shape != expected.shape:
        return False
    norm = max(float(expected.norm()), float(scale) * FLOOR / BOUND)
    return bool((found.double() - expected.double()).norm() <= BOUND * norm)


def differences(model: nn.Module, whole: Notes, part: Notes, group: Group) -> tuple[list[str], list[str]]:
    """After a part: (what is wrong on this rank, whole parameters whose gradient is not the whole one)."""
    wrong, partial = list[str](), list[str]()
    shapes = [[list(y.shape) for y in notes.outputs] for notes in (part, whole)]
    if not all(map(close, part.outputs, whole.outputs)) or shapes[0] != shapes[1]:
        wrong.append(f"the model's output is not the whole's: {shapes[0]} for {shapes[1]}")
    wrong += [words] if (words := drawn_wrong(part.dropout, whole.dropout)) else []
    wrong += [f"{name} gives other outputs" for (name, _), pair in part.shares.items() if not close(*pair)]
    parts, largest = cuts(model), largest_norm(whole.params)
    for name, p in model.named_parameters():
        if not p.is_floating_point():
            continue  # quantised: whole, and has no gradient
        cut, found, expected = parts.get(p), part.params.get(name), whole.params.get(name)
        if cut is not None and expected is not None:
            if cut[0].copies > 1:  # a part of a sum, where it lies in the whole
                part.copied.append(name)
                part.params[name] = spread(torch.zeros_like(p) if found is None else found, expected, cut, group.rank)
                continue
            expected = cut[0].part(expected, group.rank, cut[1])
        zero = torch.zeros_like(p)
        if not close(zero if found is None else found, zero if expected is None else expected, largest):
            if cut is None:
                partial.append(name)
            else:
                wrong.append(f"the gradient of {name} is no part of the whole's")
    return wrong, partial


def spread(part: Tensor, like: Tensor, cut: tuple[Split, int, Group], rank: int) -> Tensor:
    """A rank's part in its place in a whole of zeros."""
    whole, (split, dim, _) = torch.zeros_like(like), cut
    pieces = [whole.narrow(dim, span.start, span.stop - span.start) for span in split.spans(rank)]
    lengths = [piece.shape[dim] for piece in pieces]
    for piece, values in zip(pieces, torch.split(part, lengths, dim), strict=True):
        piece.copy_(values)
    return whole


def largest_norm(tensors: Mapping[Any, Tensor]) -> float:
    return max((float(x.norm()) for x in tensors.values()), default=0.0)


def sums_differ(runs: Sequence[tuple[Notes, Notes]], partial: Sequence[str], group: Group) -> str | None:
    """A collective, one all-reduce. `runs`: (part, whole). What the ranks' summands do not add up to, if anything."""
    terms = list[tuple[str, Tensor, Tensor, float]]()  # what to say, this rank's summand, the sum, the largest sum
    for part, whole in runs:
        pairs = [(key[0], x, part.sums[key]) for key, x in sorted(part.outs.items())]
        pairs += [(key[0], x, whole.grads[key]) for key, x in sorted(part.grads.items()) if key in whole.grads]
        largest = largest_norm({i: x for i, (_, _, x) in enumerate(pairs)})
        terms += [(f"the ranks' parts of {name} do not add up", x, right, largest) for name, x, right in pairs]
    part, whole = runs[0]
    for name in [*partial, *part.copied]:
        if name not in whole.params:
            return f"{name} has a gradient that it has not in the whole"
        mine = part.params.get(name, torch.zeros_like(whole.params[name]))
        says = f"the gradient of {name} is neither the whole's nor the sum of the ranks'"
        terms.append((says, mine, whole.params[name], largest_norm(whole.params)))
    total = torch.cat([torch.zeros(1, dtype=torch.float64), *(x.double().flatten() for _, x, _, _ in terms)])
    there = total.to(group.device)  # NCCL has no way for the twin's
    group.all_reduce(there, tag="rehearsal")
    sums = there.to("cpu")[1:].split([x.numel() for _, x, _, _ in terms])  # type: ignore[no-untyped-call]
    for (says, _, right, largest), found in zip(terms, sums, strict=True):
        if not close(found.view(right.shape), right, largest):
            return says
    return None
