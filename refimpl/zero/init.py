"""`Init`: a model that is never whole on any rank while it is built; `GatheredParameters`: whole for a moment.

Inside `with Init():` each module's own parameters are cut into shards as soon as its constructor returns, so the most
that a rank holds is its shard of what is built so far plus the module under construction. What a constructor reads or
writes of its children (`nn.init.normal_(self.proj.weight)`) is gathered when it is read and cut again, from rank 0's
values, when the next constructor returns, that one at the latest; `module.apply(fn)` gathers one module at a time.
What is built may be cast, all of it or a part (`model.to(torch.bfloat16)`), before there is a stage: gather/cast.py.
DeepSpeed: deepspeed/runtime/zero/partition_parameters.py, `Init` and `GatheredParameters`.
"""

import functools
import warnings
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from refimpl.comm import levels
from refimpl.comm.group import Group
from refimpl.offload.homes import Host
from refimpl.zero.gather.saved import StateDicts
from refimpl.zero.gather.unit import Unit, unit_of, whole
from refimpl.zero.parameter import Managed, stage_of


class Init:
    """Context manager: modules constructed inside are sharded over `group` (default: all ranks), in `dtype`.

    On a GPU they are constructed there, as in DeepSpeed. Their shards wait in `home` for a stage, if one is given: the
    host's memory has room for more than all GPUs. Integer parameters keep their own dtype.
    """

    def __init__(
        self,
        group: Group | None = None,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        home: Host | None = None,
    ) -> None:
        self.group, self.dtype, self.enabled, self.home = group, dtype, enabled, home
        self._depth: dict[int, int] = {}  # constructors running, by id of the module (a subclass runs its parent's)
        self._touched: list[Unit] = []  # gathered because a constructor read them
        self._undo = ExitStack()

    def __enter__(self) -> "Init":
        if self.enabled:
            self.group = self.group or levels.world()
            for cls in _subclasses(nn.Module):
                if "__init__" in vars(cls):
                    self._wrap(cls)
            self._replace(nn.Module, "__init_subclass__", classmethod(lambda cls, **kw: self._new_class(cls, **kw)))
            self._replace(nn.Module, "apply", self._apply())
            self._replace(nn.Module, "to_empty", self._to_empty())
            self._replace(nn.Parameter, "__new__", staticmethod(self._new_parameter()))
            if self.group.device.type != "cpu":
                self._undo.enter_context(self.group.device)  # what constructors make is made there, as DeepSpeed's
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def _replace(self, cls: type, name: str, value: Any) -> None:
        before = vars(cls).get(name)
        setattr(cls, name, value)
        self._undo.callback(lambda: delattr(cls, name) if before is None else setattr(cls, name, before))

    def _new_class(self, cls: type, **kwargs: Any) -> None:
        super(nn.Module, cls).__init_subclass__(**kwargs)  # type: ignore[misc]
        if "__init__" in vars(cls):
            self._wrap(cls)

    def _wrap(self, cls: Any) -> None:
        """Let cls.__init__ shard the module when it is the outermost constructor to return."""
        original = vars(cls)["__init__"]

        @functools.wraps(original)
        def init(module: nn.Module, *args: Any, **kwargs: Any) -> None:
            key = id(module)
            self._depth[key] = self._depth.get(key, 0) + 1
            try:
                original(module, *args, **kwargs)
            finally:
                self._depth[key] -= 1
                if not self._depth[key]:
                    del self._depth[key]
            if key not in self._depth:
                self._built(module)

        self._replace(cls, "__init__", init)

    def _built(self, module: nn.Module) -> None:
        """A constructor has returned: shard the module's own parameters, take over what it changed in its children."""
        assert self.group is not None
        fresh = [p for p in module.parameters(recurse=False) if unit_of(p) is None and not p.is_meta]
        for p in fresh:
            p.data = p.data.to(self.group.device, self.dtype if p.is_floating_point() else None)
        units = [Unit([p], self.group, name=type(module).__name__) for p in fresh]  # each may be cast by itself
        saved = StateDicts([module]) if units else None
        for unit in units:
            unit.on_use, unit.state_dicts = self._used, saved
            if self.home is not None:
                unit.shelve(self.home, unit.shard_numel, self.group)
        self._commit()

    def _used(self, unit: Unit, what: str) -> None:
        """A constructor computes with a parameter that is sharded already."""
        if self._depth:
            unit.wait()
            unit.is_shown = True  # it may keep a view
            self._touched.append(unit)

    def _commit(self) -> None:
        for unit in self._touched:
            unit.take_in()
            unit.adopt(root=0)
            unit.free()
        self._touched.clear()

    def _apply(self) -> Callable[[nn.Module, Callable[[nn.Module], None]], nn.Module]:
        def apply(module: nn.Module, fn: Callable[[nn.Module], None]) -> nn.Module:
            for child in module.children():
                child.apply(fn)
            with GatheredParameters(module.parameters(recurse=False), modifier_rank=0):
                fn(module)
            return module

        return apply

    def _new_parameter(self) -> Callable[..., Any]:
        """`nn.Parameter(p)` of what is sharded, as `weight_norm` makes: torch knows it of its own classes alone."""
        original = nn.Parameter.__new__

        def new(cls: type, data: Any = None, requires_grad: bool = True) -> Any:
            return original(cls, data.detach() if isinstance(data, Managed) else data, requires_grad)

        return new

    def _to_empty(self) -> Callable[..., nn.Module]:
        """What was built on the meta device is sharded when it gets memory: `torch.nn.utils.skip_init` does that."""
        original = nn.Module.to_empty

        def to_empty(module: nn.Module, **where: Any) -> nn.Module:
            original(module, **where)
            for each in module.modules():
                self._built(each)
            return module

        return to_empty


class GatheredParameters(whole):
    """`whole` for the user: a collective; with `modifier_rank` that rank's changes are kept.

    Without it they are for reading, and a change is an error on exit; but not one that was taken back, as where PEFT
    merges an adapter, hands the weights on, and unmerges it: what the ranks own is as it was. With it also the small
    parameters that ZeRO-3 keeps whole become that rank's; any others are left alone. Inside another block it leaves the
    changes to that one.
    After a stage was built, changes reach the fp32 master weights too. What was taken of a parameter without a copy,
    `p.detach()` or on a CPU `p.data.cpu()`, keeps its values after the block, as in DeepSpeed.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter] | nn.Parameter | nn.Module,
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        """`fwd_module` is DeepSpeed's: an external parameter is found by itself here. `enabled` False does nothing.

        ValueError if `modifier_rank` is none of the ranks that share a parameter.
        """
        if isinstance(params, nn.Module):
            params = params.parameters()
        params = [params] if isinstance(params, nn.Parameter) else list(params)
        super().__init__(params if enabled else [])
        self.modifier_rank = modifier_rank
        self.small = whole_ones(params) if enabled and modifier_rank is not None else {}
        self.before: dict[nn.Parameter, Tensor] = {}  # the small ones, as they were
        shared = [(unit.name, unit.group) for unit in self.units]
        for name, group in [*shared, *self.small.values()]:
            if modifier_rank not in (None, *range(group.size)):
                raise ValueError(
                    f"GatheredParameters: modifier_rank={modifier_rank}, but {group.size} ranks share "
                    f"{name}: 0 to {group.size - 1}"
                )

    def __enter__(self) -> list[Unit]:
        self.before = {p: p.detach().clone() for p in self.small}
        return super().__enter__()

    def __exit__(self, kind: type[BaseException] | None = None, *_: object) -> None:
        changed, lost = [], []
        for unit in self.units:
            unit.is_shown = True
            unit.take_in()
            if kind is None and self.modifier_rank is not None:
                lost += [unit.name] if adopt(unit, self.modifier_rank) else []
                continue
            if unit.held > 1:
                continue
            changed += [unit.name] if kind is None and is_changed(unit) else []
            unit.versions = unit.written()
        super().__exit__(kind)
        if kind is None and self.modifier_rank is not None:
            for p, (name, group) in self.small.items():
                lost += [name] if take(p, self.before[p], group, self.modifier_rank) else []
        if changed:
            raise RuntimeError(
                f"GatheredParameters: parameters of {', '.join(changed)} were written, which is lost without "
                "modifier_rank: say whose changes are kept, modifier_rank=0 for rank 0's"
            )
        if lost:
            raise RuntimeError(
                f"GatheredParameters(modifier_rank={self.modifier_rank}): parameters of {', '.join(lost)} were written "
                f"here, which is lost: rank {self.modifier_rank}, whose changes are kept, has made none. Write there"
            )


def is_changed(unit: Unit) -> bool:
    """Whether what is gathered was written, and not taken back, as far as this rank's shard tells.

    What was taken back but for rounding (a few units in the last place of the largest) is dropped with a warning.
    """
    kept, seen = unit.now(), unit.shard(unit.full)
    writes = sum(unit.written()) - sum(unit.versions)
    if torch.equal(kept.view(torch.uint8), seen.view(torch.uint8)):  # NaN is equal to itself
        return writes == 1
    if writes < 2 or not unit.dtype.is_floating_point:
        return True
    rounding = 4 * torch.finfo(unit.dtype).eps * float(kept.abs().max())
    if torch.allclose(kept, seen, rtol=0, atol=rounding):
        warnings.warn(
            f"GatheredParameters: what was written to parameters of {unit.name} was taken back but for rounding, which "
            "is dropped; if it was a change, say modifier_rank=0",
            stacklevel=4,
        )
        return False
    return True


def whole_ones(params: Iterable[nn.Parameter]) -> dict[nn.Parameter, tuple[str, Group]]:
    """Those that ZeRO-3 keeps whole: their names, and the ranks that have them."""
    stages = {p: stage_of(p) for p in params if unit_of(p) is None}
    kept = {p: stage for p, stage in stages.items() if stage is not None and stage.manages_all}
    return {p: (stage.name_of(p), stage.experts.get(p, stage.group)) for p, stage in kept.items()}


@torch.no_grad()
def take(p: nn.Parameter, before: Tensor, group: Group, root: int) -> bool:
    """Let p be what rank `root` has made of it; whether this rank has written and that one has not. A collective.

    What is the same already is not written: a graph that was recorded with it goes on.
    """
    theirs = p.detach().clone(memory_format=torch.contiguous_format)
    group.broadcast(theirs.view(-1), root, tag="start")
    before, mine, now = (t.contiguous().view(-1).view(torch.uint8) for t in (before, p.detach(), theirs))
    if differs := not torch.equal(now, mine):
        p.data.copy_(theirs)
    return differs and torch.equal(now, before)


def adopt(unit: Unit, root: int) -> bool:
    """Take over what rank `root` has. Whether this rank has written and that one has not, as its shard tells.

    Ranks that all write, each its own draws, are right.
    """
    if unit.group.rank == root or unit.written() == unit.versions:
        unit.adopt(root)
        return False
    before, mine = (t.view(torch.uint8).clone() for t in (unit.now(), unit.shard(unit.full)))
    unit.adopt(root)
    after = unit.shard(unit.full).view(torch.uint8)
    return torch.equal(after, before) and not torch.equal(after, mine)


def _subclasses(cls: type) -> set[type]:
    children: list[type] = cls.__subclasses__()
    return {cls}.union(*map(_subclasses, children))
