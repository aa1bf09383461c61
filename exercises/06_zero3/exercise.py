"""Chapter 06, ZeRO-3: a rank keeps 1/N of the parameters; a module's own are whole only while
it computes.

A unit is the parameters of one module, end to end in one buffer [P]. P is the smallest multiple
of the number of ranks N that holds them, the padding at the end is zero. A rank keeps its shard
[S], S = P / N, and the buffer has memory only while it is needed:

    tensor.untyped_storage().resize_(0)        # the tensor and all its views have no memory
    tensor.untyped_storage().resize_(nbytes)   # memory again, with anything in it

Tensor, views, and whatever autograd has kept of them stay the same objects, so they are right
again when the buffer is filled again. Whoever reads them before that ends the process
(SIGSEGV).

`group` is a refimpl Group: `group.rank`, `group.size`, and

    group.broadcast(x, root=0)            # x of the root on every rank
    group.all_gather(out, x)              # x [S] on every rank -> out [P]
    group.reduce_scatter(out, x, "mean")  # x [P] on every rank -> out [S], the rank's shard
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from refimpl.comm.group import Group


class ShardedParams:
    """Parameters that are whole between gather() and free(), and a shard for the rest of the
    time.

    unit = ShardedParams(module.parameters(), group)    # freed; this rank keeps unit.mine [S]
    unit.gather()                                       # the parameters can be used
    unit.free()                                         # they have no memory; shapes stay
    """

    def __init__(self, params: Sequence[nn.Parameter], group: Group) -> None:
        """Take rank 0's values: make self.full [P], of which the parameters are views, and
        self.mine [S]; free full.

        self.mine has memory of its own. `params` have one dtype, and need not be contiguous.
        """
        raise NotImplementedError("ShardedParams.__init__")

    def gather(self) -> None:
        """Everyone's shards -> self.full, at once into its memory: no other buffer is as large.

        Nothing, and no traffic, if it is whole already.
        """
        raise NotImplementedError("ShardedParams.gather")

    def free(self) -> None:
        """Give the memory of self.full back."""
        raise NotImplementedError("ShardedParams.free")


class Zero3:
    """Trains a model of which no rank ever holds more than a module or two.

        zero = Zero3(model, group)
        model(batch).mean().backward()
        zero.grads[module]            # [S], the mean over ranks, laid out as
                                      # zero.units[module].mine; padding zero

    Each module with parameters of its own (module.parameters(recurse=False)) is a unit. It is
    gathered before the module's forward and freed after it; gathered again before its backward,
    and freed when all its gradients are complete. They are reduce-scattered at once, and
    further backwards add up, in the gradients' dtype. Every parameter is trained, none is
    shared, every module returns one tensor. Traffic of a forward and backward: 2 all-gathers
    and 1 reduce-scatter a unit.
    """

    def __init__(self, model: nn.Module, group: Group) -> None:
        """Make self.units, {module: ShardedParams}, and self.grads = {}; put the hooks below on
        modules and parameters.

        module.register_forward_pre_hook(fn) calls fn(module, args);
        module.register_forward_hook(fn) calls fn(module, args, output);
        p.register_post_accumulate_grad_hook(fn) calls fn(p) when p.grad is complete.
        """
        raise NotImplementedError("Zero3.__init__")

    def before_forward(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """The module is about to compute."""
        raise NotImplementedError("Zero3.before_forward")

    def after_forward(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        """It has: free it. And ask to be called before its backward: output.register_hook(fn)
        calls fn(gradient).
        """
        raise NotImplementedError("Zero3.after_forward")

    def on_gradient(self, module: nn.Module, p: nn.Parameter) -> None:
        """One gradient is complete. If it is the module's last: reduce-scatter them, free
        gradients and parameters.
        """
        raise NotImplementedError("Zero3.on_gradient")


def prefetch(
    trace: Sequence[str], at: int, sizes: Mapping[str, int], live: Collection[str],
    flying: Collection[str], budget: int, most_live: int,
) -> list[str]:  # fmt: skip
    """Which units to gather ahead, in the order of the trace, while the one before trace[at]
    computes.

    trace: the units in the order in which the iteration uses them; trace[at] is the next.
    sizes: bytes of a unit. live: units that are whole or on their way, also the one that
    computes; flying: those of them that are on their way. All that fly may take `budget` bytes
    together, all that live `most_live`. One that flies alone may be larger than the budget (a
    large layer would never be gathered ahead), unless that is 0. Stop at the first that does
    not fit: one behind it would come too early.
    Example: trace a b c d, at 1, all of 4 bytes, live {a}, nothing flies, budget 8, most_live
    100 -> [b, c].
    """
    raise NotImplementedError("prefetch")


def to_release(
    trace: Sequence[str],
    at: int,
    sizes: Mapping[str, int],
    live: Sequence[str],
    max_reuse_distance: int,
) -> list[str]:
    """Which of the live units to free now, in the order of `live`; trace[at] is what the
    iteration uses next.

    A unit is kept if it is used again after fewer than `max_reuse_distance` bytes of others
    have to be gathered first: the sizes of the units in between that are not live, each counted
    once. One that is not used again is freed.
    Example: trace a b c b a, at 3 (next: b), all of 4 bytes, live [a, c], max_reuse_distance 5
    -> [c].
    """
    raise NotImplementedError("to_release")


def zero3_bytes(units: Sequence[int], ranks: int, itemsize: int, budget: int) -> dict[str, int]:
    """Bytes on a rank with AdamW: "kept", and "gathered", the most that is whole at once in an
    iteration.

    units: elements of each, multiples of `ranks`, in the order of forward; backward uses them
    in the opposite order.
    kept: the shards of parameters and gradients (`itemsize` bytes an element), AdamW's two fp32
    numbers, and fp32 masters below fp32. gathered: at each use the unit itself is whole. Then
    the units that the iteration uses next are sent for, one after the other; what is whole or
    was sent for already is passed over. A unit flies from then until its use, and is whole in
    memory. All that fly may have `budget` elements together; the first that would be too much
    is not sent for, and none behind it. One that flies alone may be larger, unless the budget
    is 0. After its use a unit is freed.
    Example: units [4, 8, 4], fp32, 2 ranks: kept 8 * 16. gathered with budget 0: 8 * 4; with
    budget 4: 12 * 4.
    """
    raise NotImplementedError("zero3_bytes")


@contextmanager
def sharded_init(group: Group, *classes: type[nn.Module]) -> Iterator[list[ShardedParams]]:
    """Inside, a module of one of these classes is sharded as soon as its constructor returns;
    yields the list of units.

        with sharded_init(group, nn.Linear) as units:
            model = Large()              # never whole: at most one nn.Linear at a time is

    A unit has all parameters inside the module. Every rank gets rank 0's values. A class counts
    with those derived from it; where both are named, the module is sharded when the derived
    one's constructor returns, which is the last to do so. Afterwards, also after an exception,
    the classes are as they were before: one that had no constructor of its own has none.
    """
    raise NotImplementedError("sharded_init")
