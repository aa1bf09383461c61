"""What a checkpoint holds beside tensors of the model's size, put into the engine: all of it, or nothing.

Counters, schedule, options of the optimizer's groups, loss scale, random numbers, position in the data: each says what
was saved, what is here, and what puts either in. When one rank cannot take one of them, or cannot read the weights that
follow, every rank has its own back; the weights are not touched before. Bytes: a few KB a rank, most of it the random
generators' states.
"""

import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from refimpl.checkpoint import random_state
from refimpl.checkpoint.errors import CheckpointError, naming, together
from refimpl.checkpoint.folder import Folder, notes_file
from refimpl.engine.saving.contents import COUNTERS, options, param_groups
from refimpl.engine.state import TrainingState
from refimpl.zero.optimizer.counted import counted, put_counted

SCHEDULED = ("lr", "initial_lr", "betas", "momentum")  # what a schedule writes into the optimizer's groups


@dataclass(frozen=True)
class Wanted:
    """Which parts of a checkpoint to load; the arguments of `Engine.load_checkpoint`."""

    strict: bool = True
    optimizer: bool = True
    scheduler: bool = True
    module_only: bool = False
    custom: Callable[..., object] | None = None
    random: bool = True

    @property
    def weights_alone(self) -> bool:
        """Not the state of the optimizer, nor what goes with it."""
        return self.module_only or not self.optimizer


def own_rank(engine: TrainingState, folder: Folder) -> int:
    """The rank whose buffers and client_state this one takes."""
    return engine.axes.world.rank if engine.axes.world.rank < folder.ranks else 0


@dataclass(frozen=True)
class Put:
    """One of the small states: what was saved, what is here, and what puts either into the engine."""

    put: Callable[[Any], object]
    saved: Any
    here: Any


@contextmanager
def small_states(engine: TrainingState, folder: Folder, wanted: Wanted) -> Iterator[None]:
    """They are in the engine in the block, and stay when it succeeds; after a CheckpointError all ranks have theirs.

    Such an error is every rank's: when one cannot take a state, and what is raised in the block.
    """
    todo: list[Put] = []

    def put() -> None:
        with naming(folder.path / notes_file(own_rank(engine, folder))):
            todo.extend(to_put(engine, folder, wanted))
            for each in todo:
                each.put(each.saved)

    try:
        together(engine.axes.world, put)
        yield
    except CheckpointError:
        for each in todo:
            each.put(each.here)
        raise


def to_put(engine: TrainingState, folder: Folder, wanted: Wanted) -> Iterator[Put]:
    """The small states to load, in order: the schedule writes rates, and the groups' own come after."""
    scheduler, own, about = engine.lr_scheduler, own_rank(engine, folder), folder.about
    if not wanted.module_only:
        counters = {name: getattr(engine, name) for name in COUNTERS}
        yield Put(vars(engine).update, {name: about[name] for name in COUNTERS}, counters)
        skipped = partial(setattr, engine.stage.update, "skipped_steps")
        yield Put(skipped, int(folder.value(0, "skipped_steps")), engine.stage.skipped_steps)
        if scheduler is not None and wanted.scheduler:
            state = folder.value(own, "lr_scheduler")
            yield Put(partial(put_schedule, engine), state, deepcopy(scheduler.state_dict()))
    if not wanted.weights_alone:
        yield from to_train(engine, folder, wanted)


def to_train(engine: TrainingState, folder: Folder, wanted: Wanted) -> Iterator[Put]:
    """What only a run that goes on takes: the groups' settings, loss scale, random numbers, position in the data."""
    own, rank = own_rank(engine, folder), engine.axes.world.rank
    scaler = engine.stage.scaler
    keep = SCHEDULED if engine.lr_scheduler is not None and not wanted.scheduler else ()
    yield Put(partial(put_groups, engine, keep), saved_groups(engine, folder), deepcopy(options(engine)))
    if engine.optimizer is not None:
        beside = folder.value(0, "counted") or {}
        yield Put(partial(put_counted, engine.optimizer), beside, counted(engine.optimizer))
    if scaler is not None and (scale := folder.value(0, "scaler")) is not None:
        yield Put(scaler.load_state_dict, scale, scaler.state_dict())
    draws_on = not wanted.random or rank >= folder.ranks or trainer_has_its_own(folder)
    if not draws_on and (state := folder.value(rank, "random")) is not None:
        device = engine.group.device
        yield Put(partial(random_state.put, device=device), state, random_state.get(device))
    data = folder.value(0, "data")  # a rank in mid-pipeline reads none
    if data is not None and "taken" not in data:
        data = folder.value(own, "data")
    if data is not None and engine.axes.world.size != folder.ranks and "taken" not in data:
        warnings.warn(f"{folder.path}: a stream's position is each rank's own: it begins anew", stacklevel=8)
        data = None
    yield Put(engine.go_on_with_data, data, engine.data_state())


def trainer_has_its_own(folder: Folder) -> bool:
    """Whether transformers' Trainer left its random states beside the checkpoint.

    It puts them back only behind its sampler, which must draw, in every rank, what it drew when the epoch began.
    """
    return any(folder.path.parent.glob("rng_state*.pth"))


def saved_groups(engine: TrainingState, folder: Folder) -> list[dict[str, Any]]:
    """The options of the optimizer's groups that this rank takes; a pipeline's stages have their own."""
    groups: list[dict[str, Any]] = folder.value(own_rank(engine, folder), "groups")
    return groups if len(groups) == len(param_groups(engine)) else folder.value(0, "groups")


def put_groups(engine: TrainingState, keep: Collection[str], groups: list[dict[str, Any]]) -> None:
    """The options of the optimizer's groups, but for those to keep."""
    for group, saved in zip(param_groups(engine), groups, strict=True):
        for key, value in saved.items():
            if key not in keep:
                set_option(group, key, value)


def set_option(group: dict[str, Any], key: str, value: Any) -> None:
    """An option of an optimizer's group; a learning rate that is a tensor stays the tensor that others look at."""
    if isinstance(group.get(key), int | float) and isinstance(value, str | list | dict):
        raise TypeError(f"{key} of a parameter group is {value!r}")
    if isinstance(group.get(key), Tensor):
        group[key].fill_(value)
    else:
        group[key] = value


def put_schedule(engine: TrainingState, state: dict[str, Any]) -> None:
    """The schedule's state, and the rates it stands at: torch's schedules do not write them when they are loaded."""
    scheduler: Any = engine.lr_scheduler
    scheduler.load_state_dict(state)
    if hasattr(scheduler, "get_last_lr"):
        # A group that was added since the schedule's last step has no rate there.
        for group, rate in zip(param_groups(engine), scheduler.get_last_lr(), strict=False):
            set_option(group, "lr", rate)
