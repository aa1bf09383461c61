"""Chapter 07, activations: what backward needs can be kept, computed again, or kept in parts by
those who share it.

autograd keeps tensors for backward, mostly the inputs of operations. A checkpointed function
keeps its own arguments only, and runs once more in backward. What the second run must find as
it was: the arguments, and the random generator.

    torch.get_rng_state(), torch.set_rng_state(state)   the CPU's generator, as dropout uses

`group` is a refimpl Group: `group.rank`, `group.size`, and

    group.all_gather(out, x)                               # x [s] on every rank -> out [N*s]
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from refimpl.comm.group import Group


def checkpoint(fn: Callable[..., Any], *args: Any) -> Any:
    """fn(*args), of which only the tensor arguments are kept for backward, which runs fn a
    second time.

    Write a torch.autograd.Function: its forward runs fn, and inside it autograd records
    nothing; its backward gets one gradient for each output, runs fn with gradients enabled on
    detached arguments, and returns one gradient for each argument (None for what is no tensor,
    or needs none). fn returns a tensor or a tuple of tensors. Its parameters get gradients too.
    The second run draws the same random numbers as the first; afterwards the generator stands
    where it stood before it. Arguments that change in place before backward must be an error:
    ctx.save_for_backward sees to that.
    """

    class Recompute(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            ctx.is_tensor = [isinstance(a, Tensor) for a in args]
            ctx.others = [None if isinstance(a, Tensor) else a for a in args]
            ctx.save_for_backward(*(a for a in args if isinstance(a, Tensor)))
            ctx.random = torch.get_rng_state()
            return fn(*args)

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Any:
            saved, inputs = iter(ctx.saved_tensors), list(ctx.others)
            for place, needs in enumerate(ctx.needs_input_grad):
                if ctx.is_tensor[place]:
                    inputs[place] = next(saved).detach().requires_grad_(needs)
            now = torch.get_rng_state()
            torch.set_rng_state(ctx.random)
            with torch.enable_grad():
                outputs = fn(*inputs)
            torch.set_rng_state(now)
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            pairs = [
                (out, grad)
                for out, grad in zip(outputs, grads, strict=True)
                if out.requires_grad
            ]
            torch.autograd.backward([out for out, _ in pairs], [grad for _, grad in pairs])
            return tuple(x.grad if isinstance(x, Tensor) else None for x in inputs)

    return Recompute.apply(*args)  # type: ignore[no-untyped-call]


def stretches(layers: int, saved: float) -> list[tuple[int, int]]:
    """Cut a chain of equal layers into stretches [first, stop) of k layers, each checkpointed
    as a whole.

    The last may be shorter. Choose the k with the least peak, and the smallest of those.

    The peak, in units of a layer's input: one input for each stretch, and while a stretch of k
    runs again, for each of its layers what the layer keeps beside its input (`saved`), and for
    all but the first the input as well.
    Examples: stretches(9, 0) -> [(0, 3), (3, 6), (6, 9)], the peak is 3 + 2; stretches(4, 15)
    -> every layer by itself.
    """

    def peak(k: int) -> float:
        return -(-layers // k) + k * saved + (k - 1)

    k = min(range(1, layers + 1), key=peak)
    return [(first, min(first + k, layers)) for first in range(0, layers, k)]


def least_time(
    seconds: Sequence[float], inputs: Sequence[int], saved: Sequence[int], budget: int
) -> float:
    """The least seconds of forward work, second runs included, with which a chain is trained in
    `budget` bytes.

    Layer i has an input of inputs[i] bytes, keeps saved[i] bytes beside it, and runs in
    seconds[i]. Layers i to t - 1, whose first input is there already and counts nothing, get
    ready for backward within m bytes, T(i, t, m), in one of these ways; T of no layers is 0.

        keep i       seconds[i], if saved[i] <= m;
                     then T(i+1, t, m - saved[i] - inputs[i+1])
        run i to j-1 again, for some i < j < t:
                     their seconds, keeping nothing; then T(j, t, m - inputs[j]); when
                     the backward of these is over, all m bytes are free: then T(i, j, m)

    inputs[i+1] is not taken where i + 1 == t. Nothing fits into less than 0 bytes. math.inf if
    it cannot be done.
    Example: seconds [1, 1], inputs [1, 1], saved [4, 4]: 2 with 9 bytes (4 + 1 + 4), 3 with 5
    (1 + 4), inf with 4. The number of different (i, t, m) is small: compute each once
    (functools.cache).
    """
    from functools import cache
    from math import inf

    @cache
    def time(i: int, t: int, m: int) -> float:
        if m < 0:
            return inf
        if i == t:
            return 0.0
        best = inf
        if saved[i] <= m:
            best = seconds[i] + time(
                i + 1, t, m - saved[i] - (inputs[i + 1] if i + 1 < t else 0)
            )
        for j in range(i + 1, t):
            first_run = sum(seconds[i:j])
            best = min(best, first_run + time(j, t, m - inputs[j]) + time(i, j, m))
        return best

    return time(0, len(seconds), budget)


class KeepResults(TorchDispatchMode):
    """Selective checkpointing: the first run keeps the results that `keep` wants, later ones
    hand them out in order.

    kept = KeepResults(lambda op: op.overloadpacket.__name__ == "addmm")
    with kept: y = fn(x)
    with kept: z = fn(x)       # the same, and no addmm ran
    """

    def __init__(self, keep: Callable[[OpOverload], bool]) -> None:  # given
        super().__init__()  # type: ignore[no-untyped-call]
        self.keep = keep
        self.results: list[Any] = []
        self.runs, self.next = 0, 0

    def __enter__(self) -> "KeepResults":
        """Each `with` is a run; the second and later ones begin at the first result.

        It is TorchDispatchMode's own __enter__ that switches the mode on: call that, too.
        """
        self.runs, self.next = self.runs + 1, 0
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """One operation, func(*args, **(kwargs or {})), and its result, one tensor.

        Kept is what `keep(func)` wants, but nothing random (torch.Tag.nondeterministic_seeded
        in func.tags): the second run's generator must draw as often as the first's. A result is
        kept without its graph; whoever gets it, in any run, may change it in place without harm
        to what is kept.
        """
        if not self.keep(func) or torch.Tag.nondeterministic_seeded in func.tags:
            return func(*args, **(kwargs or {}))
        if self.runs > 1:
            self.next += 1
            return self.results[self.next - 1].clone()
        result = func(*args, **(kwargs or {}))
        self.results.append(result.detach().clone())
        return result


class PartitionedInput:
    """A tensor that all ranks of a group have alike, kept in N parts: this rank's is 1/N,
    rounded up.

    kept = PartitionedInput(x, group)      # nothing is sent; of x only the part stays alive
    x = kept.whole()                       # a collective
    """

    def __init__(self, x: Tensor, group: Group) -> None:
        """Make self.mine [S], this rank's part of x, which may have any shape, dtype and number
        of elements, and need not be contiguous.

        x may require a gradient; the part needs none. The padding at the end is zero.
        """
        self.group, self.shape = group, x.shape
        size = -(-x.numel() // group.size)
        self.mine = torch.zeros(size, dtype=x.dtype)
        part = x.detach().reshape(-1)[group.rank * size : (group.rank + 1) * size]
        self.mine[: part.numel()] = part

    def whole(self) -> Tensor:
        """x again, by one all-gather: shape, dtype and values, without a graph."""
        out = torch.empty(self.mine.numel() * self.group.size, dtype=self.mine.dtype)
        self.group.all_gather(out, self.mine)
        return out[: self.shape.numel()].view(self.shape)


HINTS = {
    "checkpoint": [
        "Define the class inside: its static methods then see fn. Start with one tensor argument and one output.",
        "forward: save_for_backward the tensors, remember the rest and their places, get_rng_state, return fn(*args).",
        "backward: detach().requires_grad_(...) each tensor; set the generator back; torch.enable_grad(); run fn; set "
        "the generator to where it was; torch.autograd.backward(outputs, grads); return the inputs' .grad.",
        "ctx.needs_input_grad says for each argument whether it needs a gradient. Leave outputs out that need none.",
    ],
    "stretches": [
        "How many stretches are there? ceil(layers / k). While one runs again its first input is counted already.",
        "peak(k) = ceil(layers / k) + k * saved + k - 1. Try every k.",
    ],
    "least_time": [
        "Write T as it stands, an inner function of (i, t, m) with @cache.",
        "First m < 0, then i == t. Then the two ways, the second in a loop over j; take the least.",
    ],
    "KeepResults": [
        "__enter__ counts the runs, and calls super().__enter__(), or nothing is ever asked of the mode.",
        "In the first run append each result; in later runs take results[next].",
        "detach() drops the graph; clone() gives memory of its own. Both when it is kept, clone when it is handed out.",
    ],
    "PartitionedInput": [
        "size = ceil(numel / N). x.reshape(-1) is flat, also where x is not contiguous; the last parts may be empty.",
        "A slice is a view that keeps all of x alive: copy into zeros of your own.",
        "whole: all_gather into N * size elements, cut the padding off, view as the shape.",
    ],
}
