"""A block whose experts are tensors alone, which it cuts itself: recognised by what it answers.

    for e in range(E): out[i] += (act(x[i] gate_e) * (x[i] up_e)) down_e * w[i]     blocks of DeepSpeed's AutoEP tests

Nobody can step between a block and a tensor that it indexes. So its forward is replaced by one of ours, put together of

    router    its only linear layer [E, M]; softmax or sigmoid, the k highest, divided by their sum or not
    experts   gate and up apart, or one after the other in one tensor, as [out, in] or [in, out]; silu, gelu or relu

and it is taken only if it answers some rows as the block does, which may draw and keep nothing.
Traffic: as `dispatch.py`.
DeepSpeed: deepspeed/module_inject/auto_ep_layer.py, after a preset of the family.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import permutations, product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from refimpl.model.experts import in_sources
from refimpl.model.moe import mix
from refimpl.model.routes import Routes
from refimpl.parallel.expert.trying import REFUSALS, Forward, Found, close, rows, trial

Act = Callable[[Tensor], Tensor]
ACTS: tuple[Act, ...] = (F.silu, F.gelu, partial(F.gelu, approximate="tanh"), F.relu)
SCORES: tuple[Act, ...] = (partial(torch.softmax, dim=-1), torch.sigmoid)


@dataclass(frozen=True)
class Formula:
    """What a block does."""

    k: int
    score: Act
    sums_to_one: bool
    act: Act
    gate_last: bool
    out_first: bool  # stored as [out, in]
    first: tuple[str, ...]  # tensors of gate and up, or of both
    down: str

    def routes(self, logits: Tensor) -> Routes:
        """logits [T, E]."""
        weights, indices = self.score(logits).topk(self.k, -1)
        if self.sums_to_one:
            weights = weights / weights.sum(-1, keepdim=True)
        return Routes.given(indices, weights, logits.shape[-1])

    def alone(self, router: nn.Module, holder: nn.Module, x: Tensor) -> Tensor:
        """x [T, M] by one rank that has all."""
        return mix(partial(self.answers, holder), x, self.routes(router(x)))

    def answers(self, holder: nn.Module, x: Tensor, sizes: Sequence[Sequence[int]]) -> Tensor:
        """Rows x [R, M], by (source, expert) -> theirs."""
        tensors = {name: p.unbind() for name, p in holder.named_parameters()}

        def times(rows: Tensor, weight: Tensor) -> Tensor:
            return rows @ (weight.T if self.out_first else weight)

        def expert(rows: Tensor, number: int) -> Tensor:
            made = torch.cat([times(rows, tensors[name][number]) for name in self.first], -1)
            gate, up = made.chunk(2, -1)[:: -1 if self.gate_last else 1]
            return times(self.act(gate) * up, tensors[self.down][number])

        return in_sources(x, sizes, expert)


@dataclass
class Bare(Found):
    """`holder`: the module that has the tensors, and nothing else, in the block."""

    router: str = ""
    formula: Formula | None = None
    __deepcopy__ = Found.__deepcopy__

    def unlike(self, module: nn.Module) -> str | None:
        """module: the block."""
        block, linear = f"its block ({type(module).__name__})", (nn.Linear, self.count)
        routers = [n for n, m in module.named_modules() if (type(m), getattr(m, "out_features", 0)) == linear]
        if len(routers) != 1:
            return f"{block} has {len(routers)} linear layers to {self.count} experts, and not one"
        self.router = routers[0]
        weight = module.get_submodule(self.router).weight
        assert isinstance(weight, Tensor)
        self.width = weight.shape[1]
        x, kept = rows(weight, 6, self.width), dict(vars(module))
        try:
            expected = [self.asked(module, x, training) for training in (False, True)]
        except REFUSALS as error:
            return f"{block} takes no tokens alone ({type(error).__name__}: {error})"
        if new := [name for name, value in vars(module).items() if value is not kept.get(name)]:
            return f"{block} keeps {', '.join(new)} at each call, which nobody would do for it"
        if not all(isinstance(y, Tensor) and close(y, expected[0]) for y in expected):
            return f"{block} does not give back rows alone, or others in training"
        if (formula := self.found(module, x, expected[0])) is None:
            return f"{block} indexes its experts' tensors, and is no sum of k gated experts"
        self.formula = formula
        return None

    def asked(self, block: nn.Module, x: Tensor, training: bool) -> Any:
        with trial(block):
            return type(block).forward(block.train(training), x.clone())

    def found(self, block: nn.Module, x: Tensor, expected: Tensor) -> Formula | None:
        """The first that gives these answers."""
        for formula in self.formulas(block):
            try:
                with trial(block):
                    answer = formula.alone(block.get_submodule(self.router), self.experts(block), x)
            except REFUSALS:
                continue
            if close(answer, expected):
                return formula
        return None

    def formulas(self, block: nn.Module) -> Iterator[Formula]:
        """What it may do, the usual first."""
        names = [name for name, _ in self.experts(block).named_parameters()]
        ints = [v for v in vars(block).values() if type(v) is int and 1 <= v < self.count]
        numbers = dict.fromkeys(ints or range(1, min(self.count, 8) + 1))
        yes = (True, False)
        for *first, down in permutations(names):
            for k, score, one, act, last, out_first in product(numbers, SCORES, yes, ACTS, yes[::-1], yes):
                yield Formula(k, score, one, act, last, out_first, tuple(first), down)

    def answer(self, forward: Forward, module: nn.Module, given: list[Any], **named: Any) -> Tensor:
        """The block's, of tokens alone: [.., M]."""
        if len(given) != 1 or named:
            raise TypeError(f"{type(module).__name__}: its experts are on several ranks, and it takes tokens alone")
        assert self.formula is not None
        x = given[0].reshape(-1, self.width)
        routes = self.formula.routes(module.get_submodule(self.router)(x))
        return self.over_ranks()(partial(self.formula.answers, self.experts(module)), x, routes).view_as(given[0])
