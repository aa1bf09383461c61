"""Which units a model is cut into, and which of its parameters stay whole: the plan that ZeRO-3 starts from.

One unit a module that needs its parameters together (see owners.py), optimizer group, dtype and set of ranks; frozen
ones apart, since no gradient says when backward is through with them, and by group too: they may be thawed. Small
parameters stay on every rank: a gather of a bias costs a message, and saves nothing.
DeepSpeed: `stage3_param_persistence_threshold`, and deepspeed/runtime/zero/parameter_offload.py,
`mark_persistent_parameters`.
"""

from collections.abc import Collection, Mapping

import torch
from torch import nn

from refimpl.comm.group import Group
from refimpl.offload.homes import Host
from refimpl.zero.config import ZeroConfig
from refimpl.zero.flat import ALIGN, round_up
from refimpl.zero.gather.unit import Unit, unit_of, whole
from refimpl.zero.parameter import DATA, Managed, place


def make_units(
    params: list[nn.Parameter],
    owner: dict[nn.Parameter, str],
    first: dict[str, str],
    group_of: Mapping[nn.Parameter, int],
    trained: Collection[nn.Parameter],
    group: Group,
    config: ZeroConfig,
    experts: Mapping[nn.Parameter, Group],
) -> dict[str, list[Unit]]:
    """Units by path of the module that needs them: one a module, optimizer group, dtype, ranks; frozen ones apart.

    `first`: the modules that share their units, by path: that of the first of them (see `joined`).
    """
    together: dict[tuple[str, int, bool, torch.dtype, Group], list[nn.Parameter]] = {}
    for p in params:
        key = (first.get(owner[p], owner[p]), group_of.get(p, -1), p in trained, p.dtype, experts.get(p, group))
        together.setdefault(key, []).append(p)
    units: dict[str, list[Unit]] = {}
    kept = 0  # elements
    for (_, index, is_trained, _, ranks), members in together.items():
        paths = list(dict.fromkeys(owner[p] for p in members))
        name = " to ".join(path or "the model" for path in dict.fromkeys((paths[0], paths[-1])))
        with whole(members):
            unit = Unit(members, ranks, index if is_trained else -1, name, config.dtype)
        unit.is_joined = len(paths) > 1
        kept += unit.mine.numel()
        if config.parameter_home is not None:
            home = config.parameter_home if kept > config.max_in_host else Host()
            unit.shelve(home, round_up(config.sub_group_size, ALIGN), group)
        for path in paths:
            units.setdefault(path, []).append(unit)
    return units


def resident(params: list[nn.Parameter], config: ZeroConfig) -> set[nn.Parameter]:
    """The parameters that stay whole on every rank: small ones, up to a total."""
    chosen: set[nn.Parameter] = set()
    room = config.model_persistence_threshold
    for p in params:
        if p.numel() <= min(config.param_persistence_threshold, room):
            chosen.add(p)
            room -= p.numel()
    make_whole([p for p in params if p in chosen])  # a list: a set's order differs between ranks
    return chosen


def make_whole(params: list[nn.Parameter]) -> None:
    """Parameters that `zero.Init` sharded get data of their own again. A collective, in the order of `params`."""
    with whole(params):
        for p in params:
            if (unit := unit_of(p)) is not None:
                unit.let_go(p)
                del p.zero_unit  # type: ignore[attr-defined]
                place({p: DATA.__get__(p).clone()}, Managed)
