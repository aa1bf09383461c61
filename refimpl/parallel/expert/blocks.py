"""Experts that are handed rows in blocks, an expert's each: somebody else has sorted them, and adds the answers up.

    Sorted    experts(rows [R, M], sizes) -> [R, M']      sizes: a list, rows of each expert. JetMoe, and Granite before
                                                          transformers 5; a matrix a call, so rows travel twice a layer
    Slots     experts(rows [E C, M]) -> [E C, M]          C slots of each expert, empty or not. Llama 4, where every
                                                          expert is given every token, most of them times 0

Blocks go to the ranks of their experts and come back; each source's are multiplied apart, as they are on one rank.
Traffic: what the model's own form has, R M (ep-1)/ep elements there and R M' (ep-1)/ep back. For Slots that is E T M:
E / k times what tokens alone would be, since nobody but the model knows which of its rows do not matter.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from refimpl.parallel.expert.exchange import by_source, loads
from refimpl.parallel.expert.trying import REFUSALS, Forward, Found, close, rows, trial, widths


class Sorted(Found):
    def unlike(self, module: nn.Module) -> str | None:
        like, last = next(module.parameters()), self.count - 1
        sizes = [(e + 1) % 3 for e in range(last)] + [2]  # one has none
        for width in widths(module):
            x = rows(like, sum(sizes), width)
            with trial(module):
                try:
                    whole = self.ask(type(module).forward, module, x, sizes)
                    alone = self.ask(type(module).forward, module, x[-2:], [0] * last + [2])
                except REFUSALS:
                    continue
            if whole.shape[:-1] == x.shape[:-1]:
                self.width = width
                return None if close(alone, whole[-2:]) else "an expert's rows answer otherwise without the others'"
        return "it takes no rows sorted by expert, with a list of how many each has"

    def ask(self, forward: Forward, module: nn.Module, x: Tensor, sizes: Sequence[int]) -> Tensor:
        answer: Tensor = forward(module, x, list(sizes))
        return answer

    def sample(self, module: nn.Module, cut: bool) -> Tensor:
        sizes = [1] * self.each if cut else [int(self.first <= e < self.first + self.each) for e in range(self.count)]
        return self.ask(type(module).forward, module, rows(next(module.parameters()), self.each, self.width), sizes)

    def answer(self, forward: Forward, module: nn.Module, given: list[Any]) -> Tensor:
        x, sizes = given
        if not isinstance(sizes, list) or sum(sizes) != len(x):
            raise ValueError(
                f"{type(module).__name__}: {len(x)} rows by expert need a list of their sizes, not {sizes}"
            )
        ask = partial(by_source, partial(self.ask, forward, module))
        ranks = self.over_ranks()
        return ranks.through(ask, x, loads(sizes, ranks.group))


class Slots(Found):
    def unlike(self, module: nn.Module) -> str | None:
        like = next(module.parameters())
        for width in widths(module):
            x = rows(like, 2 * self.count, width)
            with trial(module):
                try:
                    whole = self.ask(type(module).forward, module, x)
                    x[2:] = 0
                    alone = self.ask(type(module).forward, module, x)
                except REFUSALS:
                    continue
            if isinstance(whole, Tensor) and whole.shape == x.shape:
                self.width = width
                return None if close(alone[:2], whole[:2]) else "an expert's rows answer otherwise beside other rows"
        return "it takes no rows in as many slots an expert"

    def ask(self, forward: Forward, module: nn.Module, x: Tensor, sizes: Sequence[int] = ()) -> Tensor:
        answer: Tensor = forward(module, x) if len(x) else x
        return answer

    def sample(self, module: nn.Module, cut: bool) -> Tensor:
        mine = slice(self.first, self.first + self.each)
        x = rows(next(module.parameters()), self.count, self.width)
        if cut:
            return self.ask(type(module).forward, module, x[mine])
        return self.ask(type(module).forward, module, x)[mine]

    def answer(self, forward: Forward, module: nn.Module, given: list[Any]) -> Tensor:
        (x,) = given
        flat = x.reshape(-1, x.shape[-1])
        if len(flat) % self.count:
            raise ValueError(f"{type(module).__name__}: {len(flat)} rows are not as many slots of {self.count} experts")
        ask = partial(by_source, partial(self.ask, forward, module))
        ranks = self.over_ranks()
        sizes = loads([len(flat) // self.count] * self.count, ranks.group)
        return ranks.through(ask, flat, sizes).view_as(x)
