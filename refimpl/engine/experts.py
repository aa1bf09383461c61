"""Experts of a model on their ranks: which parameters they are, and which ranks have the same ones.

A parameter is an expert's if it says so, as DeepSpeed's do: see `parallel/expert/marks.py`. A layer that needs the
ranks themselves has a method `use_expert_ranks`.
DeepSpeed: deepspeed/moe/utils.py, `is_moe_param`; deepspeed/utils/groups.py, `_create_expert_and_data_parallel`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from torch import nn
from torch.optim import Optimizer

from refimpl.checkpoint.place import Portion
from refimpl.comm.axes import Axes, expert_groups
from refimpl.comm.group import Group
from refimpl.engine.configuration.keys import ConfigError
from refimpl.model.moe import layers
from refimpl.optim.one_bit_lamb import OneBitLamb
from refimpl.parallel.expert.auto import autoep, expert_portions
from refimpl.parallel.expert.marks import is_expert, name_of, ranks_of
from refimpl.parallel.expert.swap import mark_again, sharing
from refimpl.zero.experts import apart
from refimpl.zero.gather.unit import unit_of

SAME_NAME = "same_name_elsewhere"  # on an expert's parameter whose name another rank has for another expert


@dataclass
class ExpertRanks:
    """Groups of `axes` by how many ranks share the experts: (those that do, those that have the same experts)."""

    axes: Axes
    made: dict[int, tuple[Group, Group]] = field(default_factory=dict)

    def __call__(self, size: int) -> tuple[Group, Group]:
        """A collective when it is asked for the first time. ConfigError if the ranks do not divide by `size`."""
        if size not in self.made:
            try:
                self.made[size] = expert_groups(self.axes.replicas, size)
            except ValueError as error:
                raise ConfigError(str(error)) from None
        return self.made[size]

    @property
    def widest(self) -> Axes:
        """The axes, with the most ranks that share experts."""
        if not self.made:
            return self.axes
        expert, same = self.made[max(self.made)]
        return replace(self.axes, expert=expert, expert_data=same)


def deal_out(model: nn.Module, ranks: ExpertRanks, size: int) -> None:
    """Every mixture's experts to `size` ranks, in place. A collective. ConfigError where that cannot be."""
    ranks(size)
    somewhere = any(ranks.axes.model.all_gather_object(bool(layers(model))))
    if somewhere and not layers(model):
        return  # other pipeline stages have them
    dealt = layers(model) and all(sharing(layer) for layer in layers(model))
    if not dealt and any(unit_of(p) is not None for p in model.parameters()):
        raise ConfigError(
            f"expert_parallel.autoep_size = {size}: {type(model).__name__} was built in zero.Init, in shards, and "
            "experts are dealt out whole: build it without"
        )
    try:
        autoep(model, ranks.widest)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"expert_parallel.autoep_size = {size}: {error}") from None


def same_experts(model: nn.Module, ranks: ExpertRanks) -> dict[nn.Parameter, Group]:
    """The ranks that have each expert's parameter. A collective. ConfigError for one that does not say how many do."""
    for module in model.modules():
        if callable(use := getattr(module, "use_expert_ranks", None)):
            use(ranks)
    mark_again(model)
    found: dict[nn.Parameter, Group] = {}
    for name, p in model.named_parameters():
        if is_expert(p):
            size = ranks_of(getattr(p, "group_name", ""))
            if size is None:
                raise ConfigError(
                    f"{name} has allreduce = False, as an expert's parameter, and group_name = "
                    f"{getattr(p, 'group_name', None)!r}: it must be 'ep_size_N', with N ranks sharing the experts"
                )
            if (unit := unit_of(p)) is not None and unit.group.size != ranks(size)[1].size:
                raise ConfigError(f"{name} was built in zero.Init, which gives all ranks one expert: build it without")
            found[p] = ranks(size)[1]
    name_apart(model, ranks)
    return found


def name_apart(model: nn.Module, ranks: ExpertRanks) -> None:
    """Mark what has one name for other experts on other ranks: by its name alone nobody can tell it. A collective."""
    sliced = expert_portions(model)
    for size in sorted(ranks.made):
        mine = {n: p for n, p in model.named_parameters() if is_expert(p) and p.group_name == name_of(size)}  # type: ignore[attr-defined]
        sharing_them = ranks(size)[0]
        said = sharing_them.all_gather_object(list(mine))
        elsewhere = {name for rank, names in enumerate(said) if rank != sharing_them.rank for name in names}
        for name, p in mine.items():
            setattr(p, SAME_NAME, name in elsewhere and p not in sliced)


def refuse_stacks(model: nn.Module, optimizer: Optimizer | None) -> None:
    """ConfigError for a stack of experts of which each rank has some, where the optimizer asks about all of it.

    To Muon a stack of matrices is many.
    """
    if optimizer is None or not (getattr(optimizer, "layerwise", False) or isinstance(optimizer, OneBitLamb)):
        return
    parts, names = expert_portions(model), {p: name for name, p in model.named_parameters()}
    for group in optimizer.param_groups:
        muon = group.get("use_muon")  # None: of another optimizer
        for p in group["params"]:
            if p in parts and (muon is None or (muon and p.ndim < 3)):
                raise ConfigError(
                    f"optimizer.type {type(optimizer).__name__}: {names[p]} is a stack of experts, to it one layer, "
                    "of which each rank has a part: set expert_parallel.autoep_size to 1, or "
                    f"{'mark it, parameter.use_muon = False' if muon else 'take AdamW'}"
                )


def expert_parts(
    model: nn.Module, experts: Mapping[nn.Parameter, Group], replicas: Group
) -> dict[nn.Parameter, tuple[Portion, tuple[int, ...]]]:
    """What of an expert's parameter this rank has, where others have more under its name; and the whole one's shape.

    experts: the ranks that have the same ones.
    """
    found: dict[nn.Parameter, tuple[Portion, tuple[int, ...]]] = {}
    for p, same in experts.items():
        if getattr(p, SAME_NAME, False):
            rank = replicas.rank % (replicas.size // same.size)
            found[p] = Portion(None, ((rank, rank + 1),)), tuple(p.shape)
    for p, (dim, first, count, total) in expert_portions(model).items():
        found[p] = Portion(dim, ((first, first + count),)), (*p.shape[:dim], total, *p.shape[dim + 1 :])
    return found


def refuse_unlike(model: nn.Module, experts: Mapping[nn.Parameter, Group], group: Group) -> None:
    """ConfigError for experts of which some ranks of `group` train a part and others another one. A collective."""
    mine = {path: sorted({p.requires_grad for p in module.parameters()}) for path, module, _ in apart(model, experts)}
    for rank, theirs in enumerate(group.all_gather_object(mine)):
        if unlike := [path for path in mine if theirs.get(path, mine[path]) != mine[path]]:
            raise ConfigError(
                f"zero_optimization.stage = 3: {unlike[0]} has frozen experts on some ranks alone (here, or on rank "
                f"{rank} of those that share them), and all ranks gather alike: use stage 2, or freeze all of them"
            )
