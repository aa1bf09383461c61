"""A mixture that ends in one call, experts(x [T, M], indices [T, k], weights [T, k]) -> [T, M], as in transformers 5.

What is before it, and what is made of router logits, is the model's own affair. Only that call is replaced: rows go to
the ranks of their experts (`dispatch.py`), the module's own forward answers each with weight 1, and the answers are
weighted and added where the token is. It must be so:

    sums    experts(x, i, w) = sum over j of w_j experts(x, i_j, 1): what is sent can be weighted afterwards

Outputs then differ from the whole model's by the order of k additions a token, and by what a matrix product with other
rows beside it rounds otherwise. Traffic: as `dispatch.py`.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from refimpl.comm.streams import told
from refimpl.model.routes import Routes
from refimpl.parallel.expert.trying import REFUSALS, Forward, Found, close, rows, trial, widths


class Routed(Found):
    def unlike(self, module: nn.Module) -> str | None:
        with trial(module):
            self.width, said = width_of(module)
            if not self.width:
                return f"no rows of any of its widths, with one route each, come back in the same shape{said}"
            if not adds_up(module, self):
                return "it does not answer with the weighted sum of its experts' answers"
        return None

    def sample(self, module: nn.Module, cut: bool) -> Tensor:
        like = next(module.parameters())
        indices, ones = chosen(like, [[self.first + i] for i in range(self.each)])
        x = rows(like, self.each, self.width)
        return ask(type(module).forward, module, x, indices - self.shift * cut, ones).view_as(x)

    def answer(self, forward: Forward, module: nn.Module, given: list[Any]) -> Tensor:
        x, indices, weights = given
        flat, k = x.reshape(-1, x.shape[-1]), indices.shape[-1]
        routes = Routes.given(indices.reshape(-1, k), weights.reshape(-1, k), self.count)
        answer: Tensor = self.over_ranks()(partial(answers, forward, module, self), flat, routes).view_as(x)
        return answer


def ask(forward: Forward, module: nn.Module, x: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
    """The module's own answer. indices, weights: [T, k]."""
    answer: Tensor = forward(module, x, indices, weights)
    return answer


def width_of(module: nn.Module) -> tuple[int, str]:
    """The width of its rows: the first of its tensors' for which as many numbers come back; or 0, and what it says."""
    like, said = next(module.parameters()), ""
    for width in widths(module):
        x = like.new_zeros(2, width)
        try:
            answer = ask(type(module).forward, module, x, *chosen(like, [[0], [1]]))
        except REFUSALS as error:
            said = said or f" ({type(error).__name__}: {error})"
            continue
        if isinstance(answer, Tensor) and answer.numel() == x.numel():
            return width, ""
    return 0, said


def chosen(like: Tensor, indices: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """(indices [T, k], as many weights of 1)."""
    index = torch.tensor(indices, device=like.device)
    return index, like.new_ones(index.shape)


def adds_up(module: nn.Module, experts: Found) -> bool:
    """Whether two routes of a token give the weighted sum of what each gives."""
    like, last, forward = next(module.parameters()), experts.count - 1, type(module).forward
    x = rows(like, 3, experts.width)
    indices, ones = chosen(like, [[0, last], [last, 0], [last // 2, last]])
    weights = rows(like, 3, 2).abs() + 0.25
    together = ask(forward, module, x, indices, weights).view_as(x)
    each = [ask(forward, module, x, indices[:, [j]], ones[:, [j]]).view_as(x) * weights[:, [j]] for j in range(2)]
    return close(together, each[0] + each[1])


def answers(
    forward: Forward, module: nn.Module, experts: Found, x: Tensor, sizes: Sequence[Sequence[int]]
) -> Tensor:  # fmt: skip
    """Rows [R, M], by (source, expert) -> their experts' answers, by the module's own forward.

    An expert without rows gets one of zeros, whose answer nobody reads: its gradient is zeros then, and not None, and
    backward comes past here on every rank.
    """
    each = len(sizes[0])
    idle = [e for e in range(each) if not any(row[e] for row in sizes)]
    numbers = [e for row in sizes for e, n in enumerate(row) for _ in range(n)]
    number = told([*numbers, *idle], torch.int64, x.device)
    padded = torch.cat([x, x.new_zeros(len(idle), x.shape[1])]) if idle else x
    index = (number + experts.first - experts.shift)[:, None]
    answer = ask(forward, module, padded, index, padded.new_ones(len(padded), 1)).reshape_as(padded)
    return answer[: len(x)]
