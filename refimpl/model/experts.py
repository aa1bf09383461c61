"""Many experts, each of which multiplies the rows that are its own.

Rows come sorted by (source, expert): from one source, each expert's together. Where tokens of several ranks meet, a
rank is a source, and its rows are multiplied apart from the others'. A matrix product's row can come out in other bits
when more rows stand beside it, so this is what makes outputs, and all gradients of tokens, the same bits wherever an
expert lives. An expert's weight gradients are added in the order of the sources, ((g0 + g1) + g2) + ..., which is
that of an all-reduce: sources are computed last to first, because backward takes what came last first.

An expert without rows is called all the same: what is gathered for it (ZeRO-3) is then gathered on all ranks alike, and
its gradient is zeros and not None.

    Experts          any modules [n, M] -> [n, M]
    StackedExperts   gated or plain MLPs whose weights are one tensor a matrix, as in transformers' Mixtral; on a GPU
                     one launch multiplies all experts' rows, `refimpl/kernels/grouped_matmul.py`

FLOPs: 2 a weight and row, 4 more backward. DeepSpeed: deepspeed/moe/experts.py, moe/ep_experts.py.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from refimpl.comm.streams import told
from refimpl.model.gpt import Linear


class Experts(nn.ModuleDict):
    """Any modules, each under its number among all experts, so that names say the same on every rank."""

    def __init__(self, experts: Sequence[nn.Module], first: int = 0) -> None:
        """`first`: the number of the first."""
        super().__init__({str(first + i): expert for i, expert in enumerate(experts)})

    def forward(self, x: Tensor, sizes: Sequence[Sequence[int]]) -> Tensor:
        """x [R, M], rows by (source, expert) -> [R, M]. sizes: rows, `[sources][experts]`."""
        experts = list(self.values())
        return in_sources(x, sizes, lambda rows, number: experts[number](rows))

    def part(self, start: int, stop: int) -> "Experts":
        """Experts start to stop alone; the same modules."""
        return Experts(list(self.values())[start:stop], start)


class StackedExperts(nn.Module):
    """down(act(up x)), or down(act(gate x) * up x), each matrix of all experts in one tensor [E, out, in]."""

    def __init__(
        self,
        width: int,
        hidden: int,
        experts: int,
        *,
        gated: bool = True,
        act: Callable[[Tensor], Tensor] = F.silu,
        std: float = 0.02,
    ) -> None:
        """gated: `up` has the gate's rows first, then the others: [E, 2 hidden, width]."""
        super().__init__()
        self.gated, self.act, self.std, self.first, self.of = gated, act, std, 0, experts
        self.up = nn.Parameter(torch.empty(experts, hidden * (1 + gated), width))
        self.down = nn.Parameter(torch.empty(experts, width, hidden))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for weight in (self.up, self.down):
            nn.init.normal_(weight, std=self.std)

    def __len__(self) -> int:
        return len(self.up)

    def forward(self, x: Tensor, sizes: Sequence[Sequence[int]]) -> Tensor:
        """As `Experts`."""
        if x.is_cuda and x.dtype == self.up.dtype:
            blocks = x.split([sum(row) for row in sizes])  # type: ignore[no-untyped-call]
            last_first = [self.grouped(*call) for call in zip(blocks[::-1], sizes[::-1], strict=True)]
            return torch.cat(last_first[::-1])
        up, down = self.up.unbind(), self.down.unbind()  # whose gradients come back as one stack

        def expert(rows: Tensor, number: int) -> Tensor:
            return Linear.multiply(self.between(Linear.multiply(rows, up[number], None)), down[number], None)

        return in_sources(x, sizes, expert)

    def grouped(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        """One source's rows [R, M], by expert: one launch a matrix, for all experts."""
        from refimpl.kernels.grouped_matmul import grouped_matmul  # which a CPU has no use for

        counts = told(sizes, torch.int32, x.device)
        return grouped_matmul(self.between(grouped_matmul(x, self.up.mT, counts)), self.down.mT, counts)

    def between(self, hidden: Tensor) -> Tensor:
        """What `up` made -> what `down` takes."""
        if not self.gated:
            return self.act(hidden)
        gate, hidden = hidden.chunk(2, -1)
        return self.act(gate) * hidden

    def part(self, start: int, stop: int) -> "StackedExperts":
        """Experts start to stop alone, their weights copied."""
        part = StackedExperts.__new__(StackedExperts)
        nn.Module.__init__(part)
        part.gated, part.act, part.std, part.first = self.gated, self.act, self.std, self.first + start
        part.of = self.of
        for name, weight in self.named_parameters():
            part.register_parameter(name, nn.Parameter(weight.detach()[start:stop].clone(), weight.requires_grad))
        return part


def in_sources(x: Tensor, sizes: Sequence[Sequence[int]], expert: Callable[[Tensor, int], Tensor]) -> Tensor:
    """expert(rows, its number) on every block of x [R, M]; the last source first. ValueError if sizes are not x's."""
    flat = [n for row in sizes for n in row]
    if sum(flat) != len(x):
        raise ValueError(f"{len(x)} rows, and the experts' sizes are {[list(row) for row in sizes]}")
    blocks = x.split(flat)  # type: ignore[no-untyped-call]
    answers: list[Tensor] = [x] * len(flat)
    for place in from_the_last(sizes):
        answer = expert(blocks[place], place % len(sizes[0]))
        # Megatron's layers give (output, a bias that is not added): the bias is left out, as DeepSpeed does.
        answers[place] = answer[0] if isinstance(answer, tuple) else answer
    return torch.cat(answers)


def from_the_last(sizes: Sequence[Sequence[int]]) -> Iterator[int]:
    """Places of the blocks: sources from the last to the first, in each the experts in order."""
    for source in reversed(range(len(sizes))):
        yield from range(source * len(sizes[0]), (source + 1) * len(sizes[0]))
