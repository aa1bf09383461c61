"""Experts of a model on their ranks: which parameters they are, and which ranks have the same ones.

A parameter is an expert's if it says so, as DeepSpeed's do: `allreduce = False`, and `group_name = "ep_size_4"`, by how
many ranks share the experts of its layer. A layer that needs the ranks themselves has a method `use_expert_ranks`.
DeepSpeed: deepspeed/moe/utils.py, `is_moe_param`; deepspeed/utils/groups.py, `_create_expert_and_data_parallel`.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass, field

from torch import Tensor, nn

from refimpl.comm.axes import Axes, expert_groups
from refimpl.comm.group import Group
from refimpl.engine.keys import ConfigError
from refimpl.parallel.expert.auto import autoep
from refimpl.zero.unit import unit_of


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
        return Axes(**(vars(self.axes) | {"expert": expert, "expert_data": same}))


def is_expert(p: Tensor) -> bool:
    """Whether p belongs to an expert that not all ranks have."""
    return getattr(p, "allreduce", True) is False


def deal_out(model: nn.Module, ranks: ExpertRanks, size: int) -> None:
    """Every mixture's experts to `size` ranks, in place. A collective. ConfigError where that cannot be."""
    ranks(size)
    try:
        autoep(model, ranks.widest)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"expert_parallel.autoep_size = {size}: {error}") from None


def same_experts(model: nn.Module, ranks: ExpertRanks) -> dict[nn.Parameter, Group]:
    """The ranks that have each expert's parameter. A collective. ConfigError for one that does not say how many do."""
    for module in model.modules():
        if callable(use := getattr(module, "use_expert_ranks", None)):
            use(ranks)
    found: dict[nn.Parameter, Group] = {}
    for name, p in model.named_parameters():
        if is_expert(p):
            size = re.fullmatch(r"ep_size_(\d+)", str(getattr(p, "group_name", "")))
            if size is None:
                raise ConfigError(
                    f"{name} has allreduce = False, as an expert's parameter, and group_name = "
                    f"{getattr(p, 'group_name', None)!r}: it must be 'ep_size_N', with N ranks sharing the experts"
                )
            if unit_of(p) is not None and int(size[1]) > 1:
                raise ConfigError(f"{name} was built in zero.Init, which gives all ranks one expert: build it without")
            found[p] = ranks(int(size[1]))[1]
    return found


def leaves_of_experts(model: nn.Module, experts: Collection[nn.Parameter]) -> tuple[str, ...]:
    """Paths of the modules that have experts' parameters and no others: ZeRO-3 gathers each whole.

    Which of its experts a rank uses is up to its tokens, and all ranks that have them must gather alike.
    """
    found: list[str] = []
    for path, module in model.named_modules():
        params = list(module.parameters())
        if params and all(p in experts for p in params) and not path.startswith(tuple(f"{leaf}." for leaf in found)):
            found.append(path)
    return tuple(found)
