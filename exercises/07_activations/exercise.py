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
    raise NotImplementedError("checkpoint")


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
    raise NotImplementedError("stretches")


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
    raise NotImplementedError("least_time")


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
        raise NotImplementedError("KeepResults.__enter__")

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
        raise NotImplementedError("KeepResults.__torch_dispatch__")


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
        raise NotImplementedError("PartitionedInput.__init__")

    def whole(self) -> Tensor:
        """x again, by one all-gather: shape, dtype and values, without a graph."""
        raise NotImplementedError("PartitionedInput.whole")
