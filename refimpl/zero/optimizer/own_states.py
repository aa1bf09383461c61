"""Optimizer state that each rank has of other parameters: of an optimizer that shares its work out among the ranks.

Keller Jordan's Muon steps every Nth matrix on each of N ranks, and sends what came out; it keeps momentum of those
alone, 4/N bytes a parameter. It trains in stage 0 (see tried.py). A checkpoint cuts state as it cuts the parameter,
each rank writing its 1/N of both, which would lose nearly all of it here: such state is written whole, by whoever has
it, and only as many ranks can go on with it. DeepSpeed saves rank 0's.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from refimpl.zero.portable import fresh_state

if TYPE_CHECKING:
    from refimpl.zero.optimizer.slices import Slice
    from refimpl.zero.stage import Stage


def own_states(stage: "Stage") -> dict[str, dict[str, Any]]:
    """This rank's state, by the parameter's name, of all that the ranks have unlike state of. A collective."""
    if stage.update.slices.kind.asks_once:  # of which every rank takes every step
        return {}
    mine = {name: dict(stage.optimizer.state.get(s.param, {})) for name, s, _ in whole_slices(stage)}
    keys = {name: sorted(state) for name, state in mine.items()}
    said = stage.group.all_gather_object(keys)
    return {name: state for name, state in mine.items() if any(one.get(name, keys[name]) != keys[name] for one in said)}


def put_own_states(stage: "Stage", states: Mapping[str, Mapping[str, Any]]) -> None:
    """The inverse of `own_states`."""
    for name, s, index in whole_slices(stage):
        if state := states.get(name):
            options = stage.optimizer.param_groups[index]
            stage.optimizer.state[s.param] = fresh_state(state, s.param, options, passing=False)


def whole_slices(stage: "Stage") -> "list[tuple[str, Slice, int]]":
    """(name, slice, group) of every parameter that an optimizer has whole."""
    of = stage.update.slices.of
    return [(stage.names[s.whole], s, b.group_index) for b, slices in of.items() for s in slices if s.whole is not None]
