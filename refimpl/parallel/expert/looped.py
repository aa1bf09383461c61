"""A block that loops over a list of experts itself, made expert-parallel without knowing how it routes.

    for i, expert in enumerate(self.experts):                         Mixtral, Qwen-MoE, DeepSeek as published,
        out.index_add_(0, tokens_of_i, expert(x[tokens_of_i]) * w)    Switch in transformers 5

Such a block may leave out an expert that has no tokens, so ranks do not call alike, and no call can be a collective. It
is run twice instead:

    asked       experts note their rows and answer zeros; what the router draws is drawn again the second time
    exchange    all rows at once to the ranks of their experts, and back     R M (ep-1)/ep elements each way
    answered    experts give back what has come

The second run has the result, the first one the graph by which gradients reach what the rows were made of. Every rank's
rows are multiplied apart and come to where they would have been: outputs are the whole model's to the bit, where a row
is a multiple of 16 bytes (a product's last bits depend on how its rows lie in memory). The price is the block's own
work, its router and what is beside the experts, twice in forward, and a copy of its input, which it may change in place
(Switch does, by its noise). Its hooks are called once; those of modules in it that are no experts twice.

An expert for which no rank has rows gets a gradient of zeros, as in DeepSpeed's layer: Adam's momentum moves it on. The
block by itself calls it not at all, so its gradient is None, and the optimizer leaves it alone.

Taken is a block that can be tried with tokens alone, whose experts take rows and give back as many, and that comes out
the same both ways, in training and not. Refused: one that changes a buffer of its own, which would happen twice.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from refimpl.activation.state import aside
from refimpl.model.experts import in_sources
from refimpl.parallel.expert.exchange import loads
from refimpl.parallel.expert.trying import REFUSALS, Forward, Found, close, kept_modes, rows, widths

Call = tuple[int, Tensor]  # an expert's number, and the rows it was called with [.., M]


class Looped(Found):
    """`listed`: names of the experts in `holder`, which is part of the block."""

    def unlike(self, module: nn.Module) -> str | None:
        """module: the block. What is asked of `Found` is of its list of experts."""
        where, said = type(module).__name__, ""
        for width in widths(self.experts(module)):
            self.width = width
            for shape in ((2, 3, self.width), (6, self.width)):
                x = rows(next(self.experts(module).parameters()), 6, self.width).view(shape)
                try:
                    with kept_modes(module):
                        return self.alike_both_ways(module, x)
                except REFUSALS as error:
                    said = said or f"{type(error).__name__}: {error}"
        return f"its block ({where}) cannot be tried with tokens alone ({said})"

    @torch.no_grad()
    def alike_both_ways(self, block: nn.Module, x: Tensor) -> str | None:
        """Raises what the block does if it does not take x. Leaves the block in another mode."""
        forward, where = type(block).forward, type(block).__name__
        buffers = list(block.buffers())
        before = [b.clone() for b in buffers]
        try:
            for training in (False, True):
                block.train(training)
                self.experts(block).eval()  # what experts draw, they draw in another order
                with aside(x.device, seed=0):
                    expected = tensors(forward(block, x.clone()))
                calls: list[Call] = []
                with aside(x.device, seed=0):
                    found = tensors(self.twice(forward, block, (x.clone(),), {}, calls))
                if not calls:
                    return f"its block ({where}) does not call them"
                if not all(map(torch.equal, buffers, before)):
                    return f"its block ({where}) changes a buffer, and would do so twice"
                if len(found) != len(expected) or not all(map(close, found, expected)):
                    return f"its block ({where}) answers otherwise if all experts are called at once"
        finally:
            for buffer, was in zip(buffers, before, strict=True):
                buffer.copy_(was)
        return None

    def answer(self, forward: Forward, module: nn.Module, given: list[Any], **named: Any) -> Any:
        """All that the block returns."""
        return self.twice(forward, module, given, named, [])

    def twice(self, forward: Forward, block: nn.Module, args: Any, kwargs: Any, calls: list[Call]) -> Any:
        """The block's result. calls: is filled with what the experts were asked."""

        def note(number: int, x: Tensor) -> Tensor:
            calls.append((number, x))
            return torch.zeros_like(x)

        given = next(iter(args), None)
        with aside(given.device if isinstance(given, Tensor) else torch.device("cpu")), self.stand_in(block, note):
            forward(block, *map(copied, args), **{name: copied(value) for name, value in kwargs.items()})
        answers = iter(self.exchanged(self.experts(block), calls))
        asked = iter(calls)

        def hand_out(number: int, x: Tensor) -> Tensor:
            expert, rows = next(asked, (None, None))
            if rows is None or (expert, rows.shape) != (number, x.shape):
                raise RuntimeError(
                    f"{type(block).__name__}: expert {number} was called otherwise the second time: its routing must "
                    "be the same when the block is run twice"
                )
            return next(answers)

        with self.stand_in(block, hand_out):
            return forward(block, *args, **kwargs)

    @contextmanager
    def stand_in(self, block: nn.Module, answer: Callable[[int, Tensor], Tensor]) -> Iterator[None]:
        """Within it, calls of experts are calls of `answer(number, rows)`."""
        holder = self.experts(block)
        own = dict(holder._modules)
        holder._modules.update({name: partial(answer, i) for i, name in enumerate(self.listed)})  # type: ignore[misc]
        try:
            yield
        finally:
            holder._modules.update(own)

    def exchanged(self, holder: nn.Module, calls: list[Call]) -> list[Tensor]:
        """The experts' answers to the calls, each in the shape of its rows. A collective, and so is backward."""
        like = next(holder.parameters())
        order = sorted(range(len(calls)), key=lambda i: calls[i][0])
        parts = [calls[i][1].reshape(-1, calls[i][1].shape[-1]) for i in order]
        x = torch.cat(parts) if parts else like.new_empty(0, self.width)
        sizes = [0] * self.count
        for i, part in zip(order, parts, strict=True):
            sizes[calls[i][0]] += len(part)
        here = self.listed[self.first :][: self.each] if self.dispatch else self.listed
        experts = [holder._modules[name] for name in here]
        many = partial(in_sources, expert=lambda rows, number: answered(experts[number], rows))
        if self.dispatch is None:
            found = many(x, [sizes])
        else:
            found = self.dispatch.through(many, x, loads(sizes, self.dispatch.group))
        answers: list[Tensor] = [x] * len(calls)
        for i, answer in zip(order, found.split([len(part) for part in parts]), strict=True):  # type: ignore[no-untyped-call]
            answers[i] = answer.view_as(calls[i][1])
        return answers


def answered(expert: nn.Module | None, x: Tensor) -> Tensor:
    assert expert is not None
    answer = expert(x)
    if not isinstance(answer, Tensor) or answer.shape != x.shape:
        raise ValueError(f"an expert ({type(expert).__name__}) does not give back rows like those it is given")
    return answer


def copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def tensors(result: Any) -> list[Tensor]:
    """Those in a block's result."""
    if isinstance(result, Tensor):
        return [result]
    parts = result.values() if isinstance(result, dict) else result if isinstance(result, tuple | list) else ()
    return [t for part in parts for t in tensors(part)]
