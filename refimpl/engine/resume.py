"""Loading: a checkpoint of any stage, world size, bucket size and dtype into the engine that is here.

Every rank reads the elements that it holds here, out of the files that have them, straight into their memory: no rank
ever holds a whole copy, and nothing is sent. What must be the same is what a state means: the parameters' names and
shapes, the optimizer's kind and number of groups, the schedule's kind. Everything that can be known to fail is checked
first, on every rank: an engine that could not be resumed is as it was. What nobody could know, a disk that fails
between check and read, is an error on every rank too: there is no memory for a second copy of what is overwritten, so
the engine then refuses to compute, step or save until a load has gone through.

Per rank and so of the same number of ranks alone: random states, buffers, client_state, what compression owes. A rank
that the saving run did not have takes rank 0's client_state and buffers and keeps its random state. The position in the
data is counted over all ranks and goes anywhere.
DeepSpeed: `_load_checkpoint` in deepspeed/runtime/engine.py, for the same world size; for another one a checkpoint is
converted first (ds_to_universal.py) and loaded with checkpoint.load_universal, which is what every load does here.
"""

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from refimpl.checkpoint import manifest
from refimpl.checkpoint.errors import CheckpointError, naming, together
from refimpl.checkpoint.find import find
from refimpl.checkpoint.folder import Folder
from refimpl.checkpoint.place import Portion
from refimpl.engine.checkpoint import wait
from refimpl.engine.saving import layer_files, weights
from refimpl.engine.saving.contents import identity, param_groups, schedule
from refimpl.engine.saving.small_states import Wanted, own_rank, saved_groups, small_states
from refimpl.engine.saving.whole import portions_by_name
from refimpl.engine.state import TrainingState
from refimpl.offload.homes import Host
from refimpl.parallel.autotp import common_numbers
from refimpl.zero import portable
from refimpl.zero.gather.saved import every_name
from refimpl.zero.optimizer.own_states import put_own_states
from refimpl.zero.portable import restore
from refimpl.zero.stage import Stage


@dataclass(frozen=True)
class CheckpointSource:
    """A checkpoint for `zero.portable.restore`."""

    folder: Folder
    portions: Mapping[str, Portion] = field(default_factory=dict)  # of what this rank has a part of

    def fill(self, key: str, name: str, begin: int, out: Tensor) -> None:
        self.folder.fill(key, name, begin, out, self.portions.get(name))

    def state(self, name: str) -> Mapping[str, Any]:
        return self.folder.state(name, portable.Cut)


def load(
    engine: TrainingState, load_dir: Path, tag: str | float | None, wanted: Wanted
) -> tuple[str | None, dict[str, Any] | None]:
    """Restore the checkpoint `tag`, by default the one that `latest` names: (its path, this rank's client_state).

    (None, None) and a warning when `load_dir` has no `latest`: a fresh start, as in DeepSpeed. CheckpointError, on
    every rank and before anything has changed, for a checkpoint that is not there, damaged or of something else. Where
    the ranks are out of step: what has parted them.
    """
    if wanted.custom is not None and not wanted.weights_alone:
        raise ValueError("custom_load_fn: its weights do not fit the saved optimizer; add load_optimizer_states=False")
    engine.stage.group.patience.refuse_lost()
    wait(engine)
    tag = None if tag is None else str(tag)
    if wanted.module_only and (path := layer_files.load(engine, load_dir, tag, wanted.strict)) is not None:
        return str(path), {}
    found = together(engine.axes.world, lambda: find(load_dir, tag))
    seen = engine.axes.world.all_gather_object(None if found is None else f"{found[0].name} of save {found[1]['id']}")
    if len(set(seen)) > 1:
        said = ", ".join(f"rank {rank}: {name or 'none'}" for rank, name in enumerate(seen))
        raise CheckpointError(f"{load_dir}: the ranks see different checkpoints: {said}; use a folder that all share")
    if found is None:
        there = ", ".join(manifest.complete(load_dir)) if load_dir.is_dir() else ""
        hint = f"; complete checkpoints there: {there}; pass one as tag" if there else ""
        warnings.warn(f"{load_dir} has no checkpoint: no file `latest`; nothing is loaded{hint}", stacklevel=3)
        return None, None
    with Folder(*found) as folder:
        names = {  # a state_dict of its own need not name every parameter
            *engine.module.state_dict(keep_vars=True),
            *dict(every_name(engine.module)),
        }
        here = engine.axes.model.all_gather_object([engine.saved_name(name) for name in names])
        known = {name for part in engine.axes.expert.all_gather_object(here) for names in part for name in names}
        client_state = together(engine.axes.world, lambda: check(engine, folder, wanted, known))
        go_on(engine, folder, wanted)
        return str(folder.path), client_state


def check(engine: TrainingState, folder: Folder, wanted: Wanted, known: set[str]) -> dict[str, Any]:
    """CheckpointError if something is damaged or does not fit. The ranks share the files, so that each is read once.

    known: the names of the whole model's weights. Returns this rank's client_state.
    """
    engine.stage.parked.refuse()
    with naming(folder.path / manifest.NAME):
        check_kinds(engine, folder, wanted)
        own = own_rank(engine, folder)
        folder.check(dict.fromkeys([own, *range(engine.axes.world.rank, folder.ranks, engine.axes.world.size)]))
        if not wanted.weights_alone:
            check_muon(engine, folder)
        client_state: dict[str, Any] = folder.value(own, "client_state")
        weights.check_fits(engine, folder, wanted.strict and wanted.custom is None, known)
    if wanted.custom is not None and engine.axes.model.size > 1:
        raise CheckpointError("custom_load_fn: this rank has a part of the model; load without it")
    return client_state


def check_kinds(engine: TrainingState, folder: Folder, wanted: Wanted) -> None:
    """CheckpointError if optimizer or schedule are of another kind."""
    about = folder.about
    if not wanted.weights_alone:
        here = identity(engine) | ({"optimizer": None} if about["optimizer"] is None else {})  # an import may not know
        differ = [
            f"{k} {about[k]} there, {here[k]} here" for k in ("optimizer", "parameter_groups") if about[k] != here[k]
        ]
        if differ:
            raise CheckpointError(
                f"{folder.path}: cannot go on from it: {'; '.join(differ)}. Use the same optimizer, or load the "
                "weights alone with load_module_only=True"
            )
    if not wanted.module_only and wanted.scheduler and schedule(engine) not in (None, about["scheduler"]):
        raise CheckpointError(
            f"{folder.path}: its schedule is {about['scheduler']}, here {schedule(engine)}; use the same, or keep the "
            "one here with load_lr_scheduler_states=False"
        )


def check_muon(engine: TrainingState, folder: Folder) -> None:
    """CheckpointError for a parameter that Muon moved there and AdamW would here, or the other way round."""
    here = [group.get("use_muon") for group in param_groups(engine)]
    there = [group.get("use_muon") for group in saved_groups(engine, folder)]
    for p, name in engine.stage.names.items():
        now, place = engine.stage.group_of.get(p), folder.places.get(name)
        if now is None or place is None or (was := place.group) is None:
            continue
        if not there[was] == there[now] == here[now]:
            raise CheckpointError(
                f"{folder.path}: {name} was trained with use_muon={there[was]}, in group {was}, and has "
                f"use_muon={here[now]} here, in group {now}: mark it as it was (parameter.use_muon), in the same "
                "groups, or load the weights alone with load_module_only=True"
            )


class Half(CheckpointError):
    """A load of the weights alone stopped in its middle; `left`: what was torn before, and is not mended by weights."""

    def __init__(self, text: str, left: RuntimeError | None) -> None:
        super().__init__(text)
        self.left = left


def go_on(engine: TrainingState, folder: Folder, wanted: Wanted) -> None:
    """What was checked into the engine. Collective: one message says on which ranks reading has failed."""
    stage, update = engine.stage, engine.stage.update
    stage.catch_up()
    stage.include_thawed()  # what is trained from the next forward on takes its state too
    left = getattr(update.torn, "left", update.torn) if wanted.weights_alone else None
    if not wanted.weights_alone:
        for home in replaced_homes(stage, weights.shared_names(engine, folder)):
            home.renewed()
    with small_states(engine, folder, wanted):
        try:
            if wanted.custom is not None:
                weights.read_with(engine, folder, wanted.custom)
            else:
                owed = together(engine.axes.world, lambda: read(engine, folder, wanted))
                stage.gather()
                if stage.owing is not None and not wanted.weights_alone:
                    stage.owing.load_state_dict(owed)
        except BaseException:
            half = f"{folder.path}: loading it failed in its middle, and this engine has half of it: load a checkpoint"
            update.torn = (
                Half(half, left) if wanted.weights_alone else CheckpointError(f"{half} with its optimizer state")
            )
            raise
        update.torn = left
    if not wanted.weights_alone and engine.axes.tensor.size > 1:
        common_numbers(engine.module, engine.axes.tensor)


def replaced_homes(stage: Stage, names: Iterable[str]) -> list[Host]:
    """The homes of which a checkpoint of these parameters replaces all: what they have lost is no error."""
    there = set(names)
    kept = [p for p, name in stage.names.items() if name not in there]
    some = stage.config.parameter_home if kept else None  # which has the frozen ones too
    return [home for home in stage.config.homes() if home is not some and stage.group_of.keys().isdisjoint(kept)]


def read(engine: TrainingState, folder: Folder, wanted: Wanted) -> dict[str, Any] | None:
    """Weights, state and buffers of this rank; returns what compression still owed on it."""
    source, names = CheckpointSource(folder, portions_by_name(engine)), weights.shared_names(engine, folder)
    restore(engine.stage, source, names, not wanted.weights_alone, folder.about["apart"])
    weights.read_buffers(engine, folder, 0 if wanted.weights_alone else own_rank(engine, folder))
    alike = folder.ranks == engine.axes.world.size
    if not wanted.weights_alone:
        read_own_states(engine, folder, alike)
    owed: dict[str, Any] | None = folder.value(engine.axes.world.rank if alike else 0, "compression")
    return owed if owed is None or alike else owed | {"ranks": folder.ranks}  # others than here, however laid out


def read_own_states(engine: TrainingState, folder: Folder, alike: bool) -> None:
    """What each rank of the saving run had of other parameters; alike: there are as many ranks here."""
    own: dict[str, Any] = folder.value(engine.axes.world.rank if alike else 0, "own_states") or {}
    if alike:
        put_own_states(engine.stage, own)
    elif own:
        warnings.warn(
            f"{folder.path}: its optimizer, {folder.about['optimizer']}, kept state of other parameters on each of "
            f"{folder.ranks} ranks, here are {engine.axes.world.size}: {len(own)} parameters begin without, such as "
            f"{next(iter(own))}",
            stacklevel=7,
        )
