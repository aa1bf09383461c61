"""Expert gradients to the bit for every ep: the ranks that have the same expert add one after the other.

Of four ranks with ep = 2, the first pair adds g0 + g1 and the second g2 + g3; what one process would add is
((g0 + g1) + g2) + g3, and fp32 tells them apart. So the sum is passed on: the second pair begins with what the first
has. Backward takes the newest node first, so a node made after the experts' hands autograd that sum as the first part
of the gradient, and the blocks' own are added to it in order. The last has it all, the others keep zeros, so that a sum
over `expert_data` stays what it is.

    sent a rank     n bytes, once a backward pass (the sum's own 2n (edp-1)/edp come on top)
    in return       each pair waits for the one before it, a layer behind: for comparisons, not for speed
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from refimpl.comm.group import Group
from refimpl.model.moe import Many, Mix
from refimpl.model.routes import Routes
from refimpl.parallel.expert.exchange import by_source

TAG = "experts, in order"


@dataclass
class InOrder:
    """A mix whose experts' gradients are those of all ranks of `group` on its last rank, and 0 on the others."""

    mix: Mix
    group: Group

    def __call__(self, experts: Many, x: Tensor, routes: Routes) -> Tensor:
        assert isinstance(experts, nn.Module)
        learned = {name: p for name, p in experts.named_parameters() if p.requires_grad}
        if self.group.size == 1 or not learned or not torch.is_grad_enabled():
            return self.mix(experts, x, routes)

        def in_order(rows: Tensor, sizes: Sequence[Sequence[int]]) -> Tensor:
            passed = PassOn.apply(self.group, *learned.values())  # type: ignore[no-untyped-call]
            weights = dict(zip(learned, passed, strict=True))
            # A call a source, so that each source's gradients come by themselves, of stacked weights too.
            joined = by_source(lambda block, row: functional_call(experts, weights, (block, [row])), rows, sizes)
            result: Tensor = BeginWith.apply(joined, self.group, *passed)  # type: ignore[no-untyped-call]
            return result

        return self.mix(in_order, x, routes)

    def __deepcopy__(self, memo: object) -> "InOrder":
        return self


class PassOn(torch.autograd.Function):
    """Parameters as they are; backward sends their gradients to the next rank."""

    @staticmethod
    def forward(ctx: Any, group: Group, *params: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        return tuple(p.view_as(p) for p in params)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        group = ctx.group
        if group.rank == group.size - 1:
            return None, *grads
        group.send(torch.cat([grad.flatten() for grad in grads]), group.rank + 1, tag=TAG)
        return None, *(torch.zeros_like(grad) for grad in grads)


class BeginWith(torch.autograd.Function):
    """x as it is; backward gives each parameter the sum that the rank before has sent, the first rank none."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, *params: Tensor) -> Tensor:
        ctx.group, ctx.params = group, params
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        group, params = ctx.group, ctx.params
        if group.rank == 0:
            return grads[0], None, *[None] * len(params)
        sums = params[0].new_empty(sum(p.numel() for p in params))
        group.recv(sums, group.rank - 1, tag=TAG)
        parts = sums.split([p.numel() for p in params])
        return grads[0], None, *(part.view(p.shape) for part, p in zip(parts, params, strict=True))
