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
        self.params, self.group = list(params), group
        shard = -(-sum(p.numel() for p in self.params) // group.size)
        self.full, at = torch.zeros(shard * group.size, dtype=self.params[0].dtype), 0
        for p in self.params:
            piece = self.full[at : at + p.numel()].view(p.shape)
            piece.copy_(p.detach())
            p.data = piece
            at += p.numel()
        group.broadcast(self.full)
        self.mine = self.full.view(group.size, shard)[group.rank].clone()
        self.free()

    def gather(self) -> None:
        """Everyone's shards -> self.full, at once into its memory: no other buffer is as large.

        Nothing, and no traffic, if it is whole already.
        """
        storage = self.full.untyped_storage()
        if storage.nbytes() == 0:
            storage.resize_(self.full.numel() * self.full.element_size())
            self.group.all_gather(self.full, self.mine)

    def free(self) -> None:
        """Give the memory of self.full back."""
        self.full.untyped_storage().resize_(0)


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
        self.group = group
        own = {m: list(m.parameters(recurse=False)) for m in model.modules()}
        self.units = {m: ShardedParams(params, group) for m, params in own.items() if params}
        self.grads: dict[nn.Module, Tensor] = {}
        for module, unit in self.units.items():
            module.register_forward_pre_hook(self.before_forward)
            module.register_forward_hook(self.after_forward)
            for p in unit.params:
                p.register_post_accumulate_grad_hook(partial(self.on_gradient, module))

    def before_forward(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """The module is about to compute."""
        self.units[module].gather()

    def after_forward(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        """It has: free it. And ask to be called before its backward: output.register_hook(fn)
        calls fn(gradient).
        """
        self.units[module].free()
        if output.requires_grad:
            output.register_hook(lambda _: self.units[module].gather())

    def on_gradient(self, module: nn.Module, p: nn.Parameter) -> None:
        """One gradient is complete. If it is the module's last: reduce-scatter them, free
        gradients and parameters.
        """
        unit = self.units[module]
        grads = [q.grad for q in unit.params if q.grad is not None]
        if len(grads) < len(unit.params):
            return
        flat, mine = (
            torch.zeros_like(unit.mine).repeat(self.group.size),
            torch.empty_like(unit.mine),
        )
        flat[: sum(g.numel() for g in grads)] = torch.cat([g.reshape(-1) for g in grads])
        for q in unit.params:
            q.grad = None
        unit.free()
        self.group.reduce_scatter(mine, flat, "mean")
        self.grads[module] = self.grads[module] + mine if module in self.grads else mine


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
    in_air, alive = sum(sizes[u] for u in flying), sum(sizes[u] for u in live)
    chosen: list[str] = []
    for unit in trace[at:]:
        if unit in live or unit in chosen:
            continue
        flies_alone = in_air == 0 and budget > 0
        in_air, alive = in_air + sizes[unit], alive + sizes[unit]
        if (in_air > budget and not flies_alone) or alive > most_live:
            break
        chosen.append(unit)
    return chosen


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
    rest, freed = list(trace[at:]), []
    for unit in live:
        if unit not in rest:
            freed.append(unit)
            continue
        between = {u for u in rest[: rest.index(unit)] if u not in live}
        if sum(sizes[u] for u in between) >= max_reuse_distance:
            freed.append(unit)
    return freed


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
    kept = sum(units) // ranks * (2 * itemsize + 8 + (4 if itemsize < 4 else 0))
    trace = [*range(len(units)), *reversed(range(len(units)))]
    flying: list[int] = []
    peak = 0
    for at, now in enumerate(trace):
        flying = [u for u in flying if u != now]
        for unit in trace[at + 1 :]:
            if unit == now or unit in flying:
                continue
            if sum(units[u] for u in [*flying, unit]) > budget and (flying or not budget):
                break
            flying.append(unit)
        peak = max(peak, units[now] + sum(units[u] for u in flying))
    return {"kept": kept, "gathered": peak * itemsize}


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
    units: list[ShardedParams] = []
    originals = {cls: (cls.__init__, "__init__" in vars(cls)) for cls in classes}

    def sharding(cls: type[nn.Module], original: Callable[..., None]) -> Callable[..., None]:
        def init(module: nn.Module, *args: Any, **kwargs: Any) -> None:
            original(module, *args, **kwargs)
            if cls is next(c for c in type(module).__mro__ if c in classes):
                units.append(ShardedParams(list(module.parameters()), group))

        return init

    try:
        for cls, (original, _) in originals.items():
            cls.__init__ = sharding(cls, original)  # type: ignore[method-assign]
        yield units
    finally:
        for cls, (original, is_own) in originals.items():
            if is_own:
                cls.__init__ = original  # type: ignore[method-assign]
            else:
                del cls.__init__


HINTS = {
    "ShardedParams": [
        "__init__: one buffer, each parameter's .data a view of its piece; then everyone takes rank 0's buffer.",
        "self.mine must be a clone: a view of the buffer loses its memory with it.",
        "gather: storage.nbytes() == 0 says that it is freed; resize_ to numel * element_size bytes, then all_gather.",
        "free: resize_(0). Do not replace the buffer by a new one: autograd has kept views of the old.",
    ],
    "Zero3": [
        "model.modules() names all modules, the model too; module.parameters(recurse=False) are its own parameters.",
        "before_forward gathers. after_forward frees, and output.register_hook(...) gathers before backward, if the "
        "output requires a gradient (it does not under torch.no_grad).",
        "on_gradient: if some q.grad of the module is still None, wait for the next call.",
        "Then: cat the gradients into a padded buffer, q.grad = None, free the unit, reduce_scatter, add to grads.",
    ],
    "prefetch": [
        "Walk along trace[at:], and pass over what is live or chosen already.",
        "Add the unit's size to what flies and to what lives; if either is too much, stop there.",
    ],
    "to_release": [
        "Look for the unit in trace[at:]. Not there: free it.",
        "Between here and there, which units must be gathered? A set, so that each counts once; not those live now.",
    ],
    "zero3_bytes": [
        "kept: the sum of units over ranks, times bytes an element: 2 itemsize + 8, and 4 more below fp32.",
        "The iteration is 0, 1, ..., n-1, n-1, ..., 1, 0. Walk along it with a list of what flies.",
        "At each use: take the unit off the list; add the next ones while they fit; count it and all that flies.",
    ],
    "sharded_init": [
        "cls.__init__ can be replaced by a function that calls the original and then shards the module.",
        "Make that function in a helper that takes the original: a closure in a loop sees only the last class.",
        "Two named classes, one derived from the other: the first of type(module).__mro__ that is named shards.",
        "try: replace, yield units; finally: put the originals back.",
    ],
}
