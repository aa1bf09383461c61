"""A rank's experts under DeepSpeed's names: `deepspeed_experts`, copies of one module.

DeepSpeed counts them from 0 on every rank while it trains, and among all experts in the files that it writes. Here they
are counted among all from the moment that the rank's place is known (`place`): one name then means one expert on every
rank, in checkpoints of any number of ranks. Loaded are all three: the rank's own names, DeepSpeed's, counted from 0,
and a whole layer's, of which each rank takes its part. Positions (`deepspeed_experts[0]`) count from 0.

DeepSpeed: deepspeed/moe/experts.py; `_save_moe_checkpoint` in deepspeed/runtime/engine.py.
"""

import copy
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from refimpl.model.experts import in_sources
from refimpl.parallel.expert.marks import mark, ranks_of


class Numbered(nn.ModuleList):
    """Modules named from `first` on; positions are from 0."""

    def __init__(self, modules: Iterable[nn.Module] = (), first: int = 0) -> None:
        super().__init__()
        self._modules.update({str(first + i): module for i, module in enumerate(modules)})

    def __getitem__(self, place: int | slice) -> Any:
        modules = list(self)
        return modules[place] if isinstance(place, int) else Numbered(modules[place])


class Experts(nn.Module):
    """`num_local_experts` copies of `expert`, marked as DeepSpeed marks them."""

    def __init__(self, expert: nn.Module, num_local_experts: int = 1, expert_group_name: str | None = None) -> None:
        """`expert_group_name`: "ep_size_N", where N ranks share the layer's experts."""
        super().__init__()
        self.deepspeed_experts = Numbered(copy.deepcopy(expert) for _ in range(num_local_experts))
        self.num_local_experts = num_local_experts
        self.ranks = ranks_of(expert_group_name) or 1
        self.placed = self.ranks == 1
        mark(self.deepspeed_experts, expert_group_name)
        self.register_load_state_dict_pre_hook(_own_names)  # type: ignore[no-untyped-call]

    def place(self, rank: int) -> None:
        """This rank is number `rank` of those that share the layer's experts. Renames them."""
        self.deepspeed_experts = Numbered(self.deepspeed_experts, rank * self.num_local_experts)
        self.placed = True

    def forward(self, inputs: Tensor, sizes: Sequence[Sequence[int]] | None = None) -> Tensor:
        """inputs [sources, experts, C, M], or, with `sizes[source][expert]`, rows [R, M] in that order -> the same."""
        experts = list(self.deepspeed_experts)
        if sizes is not None:
            return in_sources(inputs, sizes, lambda rows, number: experts[number](rows))
        sources, count, capacity, _ = inputs.shape
        return self(inputs.flatten(0, 2), [[capacity] * count] * sources).view_as(inputs)  # type: ignore[no-any-return]


def _own_names(experts: Experts, state: dict[str, Any], prefix: str, *others: Any) -> None:
    """Before loading: entries of this rank's experts get its names, others are left out."""
    under = f"{prefix}deepspeed_experts."
    found: dict[int, dict[str, Any]] = {}
    for key in [key for key in state if key.startswith(under)]:
        number, _, rest = key.removeprefix(under).partition(".")
        if number.isdigit():
            found.setdefault(int(number), {})[rest] = state[key]
    mine = [int(name) for name in experts.deepspeed_experts._modules]
    local = list(range(len(mine)))
    if sorted(found) == list(range(experts.ranks * len(mine))):
        if not experts.placed:
            raise RuntimeError(
                f"{under}: all {len(found)} experts are given, and which {len(mine)} of them are this rank's is not "
                "known yet: load them after deepspeed.initialize, or call set_deepspeed_parallelism first"
            )
        chosen = dict(zip(mine, mine, strict=True))
    elif sorted(found) == local:
        chosen = dict(zip(mine, local, strict=True))
    else:
        return  # strict loading says what is missing
    for given in [key for key in state if key.startswith(under)]:
        del state[given]
    for name, source in chosen.items():
        state.update({f"{under}{name}.{rest}": value for rest, value in found[source].items()})
