"""What a checkpoint must have in common with the run that goes on from it, and how its parts get back into the engine.

A shard means something only beside the same shards: world size, stage, dtype, optimizer and the layout of the flat
buffers must be those of the save. The whole weights go into any of them. Everything that can be known to fail is
checked first, on every rank: an engine that could not be resumed is as it was.
DeepSpeed: `_load_checkpoint` in deepspeed/runtime/engine.py, which finds out while it loads.
"""

import re
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from refimpl.engine import manifest, weights
from refimpl.engine.errors import CheckpointError, naming, together
from refimpl.engine.state import TrainingState
from refimpl.zero.unit import unit_of

WEIGHTS = "model.safetensors"
RANK_FILE = re.compile(r"rank\d{5,}\.pt")
SCHEDULED = ("lr", "initial_lr", "betas", "momentum")  # what a schedule writes into the optimizer's groups


@dataclass(frozen=True)
class Wanted:
    """Which parts of a checkpoint to load; the arguments of `Engine.load_checkpoint`."""

    strict: bool = True
    optimizer: bool = True
    scheduler: bool = True
    module_only: bool = False
    custom: Callable[..., object] | None = None

    @property
    def weights_alone(self) -> bool:
        """Weights from model.safetensors, not from shards."""
        return self.module_only or not self.optimizer


def param_groups(engine: TrainingState) -> list[dict[str, Any]]:
    """The optimizer's groups; none in an engine without one."""
    return [] if engine.optimizer is None else engine.optimizer.param_groups


def rank_file(rank: int) -> str:
    return f"rank{rank:05d}.pt"


def checked_tag(tag: str, who: str) -> str:
    """`tag`, if it can be the name of a folder; CheckpointError otherwise."""
    plain = tag.isprintable() and tag == tag.strip() and not tag.startswith(".") and "/" not in tag
    if not tag or not plain or tag == "latest":
        raise CheckpointError(
            f"{who}: {tag!r} is no tag: it must be a plain name, without '/', without '.' or a blank at its beginning, "
            "and not 'latest'"
        )
    return tag


def find(load_dir: Path, tag: str | None) -> tuple[Path, dict[str, Any]] | None:
    """The folder of a checkpoint, and its manifest; None if no tag is asked for and there is no file `latest`."""
    latest = load_dir / "latest"
    with naming(load_dir):
        there = manifest.complete(load_dir) if load_dir.exists() else []
    complete = f"complete checkpoints in {load_dir}: {', '.join(there) or 'none'}"
    who = "load_checkpoint"
    if tag is None:
        if (load_dir / manifest.NAME).is_file():
            raise CheckpointError(f"{load_dir}: is a checkpoint itself; pass its parent, and tag={load_dir.name!r}")
        if not latest.exists():
            return None
        with naming(latest):
            tag, who = latest.read_text().strip(), str(latest)
        if not tag:
            raise CheckpointError(f"{latest}: is empty; write a tag into it, or pass one; {complete}")
    with naming(load_dir / checked_tag(tag, who)):
        folder = manifest.folder_of(load_dir, tag)
        file = folder / manifest.NAME
        if not file.is_file():
            named = "" if who == "load_checkpoint" else f" ({latest} names it)"
            raise CheckpointError(f"{file}: no such file{named}; {complete}")
    return folder, manifest.read(file)


def identity(engine: TrainingState) -> dict[str, Any]:
    """What a run must have in common with the one that it continues."""
    return {
        "world_size": engine.group.size,
        "stage": engine.config.zero_optimization.stage,
        "dtype": str(engine.config.dtype).removeprefix("torch."),
        "optimizer": type(engine.optimizer).__name__,
        "parameter_groups": len(param_groups(engine)),
    }


def layout(engine: TrainingState) -> list[list[str]]:
    """Which parameters, of which shape, lie in which flat buffer, in order: what a shard's elements mean."""
    names = engine.stage.names
    return [[f"{names[p]} {list(p.shape)}" for p in bucket.params] for bucket in engine.stage.buckets]


def schedule(engine: TrainingState) -> str | None:
    """The kind of the learning rate's schedule."""
    return None if engine.lr_scheduler is None else type(engine.lr_scheduler).__name__


def untrained(engine: TrainingState, exclude_frozen: bool = False) -> dict[str, Tensor]:
    """What the stage's own state leaves out: this rank's buffers, and frozen parameters, or its shards of them."""
    frozen = {}
    for name, p in engine.module.named_parameters():
        unit = unit_of(p)
        if not p.requires_grad and not exclude_frozen:
            frozen[name] = p.data if unit is None else unit.now()
    return frozen | dict(engine.module.named_buffers())


def checked(engine: TrainingState, folder: Path, about: dict[str, Any], wanted: Wanted) -> dict[str, Any]:
    """The content of this rank's file, or of rank 0's if it has none, after every check. Changes nothing.

    The ranks share the files between them, so that each is read once.
    """
    if not wanted.weights_alone:
        check_same(engine, folder, about)
    if not wanted.module_only and wanted.scheduler and schedule(engine) not in (None, about["scheduler"]):
        raise CheckpointError(
            f"{folder}: its schedule is {about['scheduler']}, here {schedule(engine)}; use the same, or keep the one "
            "here with load_lr_scheduler_states=False"
        )
    rank, files = engine.group.rank, list(about["files"])
    mine = rank_file(rank if rank < about["world_size"] else 0)
    manifest.check(folder, about["files"], dict.fromkeys([mine, *files[rank :: engine.group.size]]))
    path = folder / mine
    with naming(path):
        content: dict[str, Any] = torch.load(
            path, map_location="cpu", weights_only=True, mmap=wanted.weights_alone or None
        )
        if content["save"]["id"] != about["id"] or rank_file(content["save"]["rank"]) != mine:
            raise CheckpointError(f"{path}: belongs to another save or rank; bring back the file that was saved")
    if wanted.weights_alone:  # then the shards were only mapped, and what is kept must not be
        kept = {name: content[name] for name in ("lr_scheduler", "client_state")}
        weights.check_fits(engine, folder / WEIGHTS, about["left_out"], wanted.strict and wanted.custom is None)
        return {name: tree_map_only(Tensor, Tensor.clone, value) for name, value in kept.items()}
    check_parts(engine, path, content, about["left_out"], wanted.strict)
    return content


def check_same(engine: TrainingState, folder: Path, about: dict[str, Any]) -> None:
    """CheckpointError says how the saving run differs from this one, if it does."""
    differences = [
        f"{name} {about[name]} there, {here} here" for name, here in identity(engine).items() if about[name] != here
    ]
    if differences:
        raise CheckpointError(
            f"{folder}: cannot go on from it: {'; '.join(differences)}. Run with the same setting, or load the weights "
            "alone with load_module_only=True"
        )
    if about["layout"] != layout(engine):
        raise CheckpointError(
            f"{folder}: cannot go on from it: its flat buffers hold other parameters than here. The model, the "
            "optimizer's groups, reduce_bucket_size, or stage 3's thresholds and leaf modules have changed; load the "
            "weights alone with load_module_only=True"
        )


def check_parts(engine: TrainingState, path: Path, content: dict[str, Any], left_out: list[str], strict: bool) -> None:
    """CheckpointError if the rank's file lacks a buffer or frozen weight of the model, or has it in another shape."""
    here, there = untrained(engine), content["untrained"]
    both = [name for name in here if name in there]
    wrong = [f"{name} has another shape" for name in both if here[name].shape != there[name].shape]
    if strict:
        wrong += [f"{name} is not there" for name in here if name not in there and name not in left_out]
        wrong += [f"{name} is not in the model" for name in there if name not in here]
    if wrong:
        raise CheckpointError(f"{path}: {'; '.join(wrong)}. Build the model that was saved")


def restore(engine: TrainingState, folder: Path, mine: dict[str, Any], wanted: Wanted) -> None:
    """What was `checked` into the engine. Collective."""
    scheduler, groups = engine.lr_scheduler, param_groups(engine)
    if scheduler is not None and wanted.scheduler and not wanted.module_only:
        restore_schedule(engine, folder, mine["lr_scheduler"])
    rates = [{key: group[key] for key in SCHEDULED if key in group} for group in groups]
    if wanted.custom is not None:
        weights.read_with(engine, folder / WEIGHTS, wanted.custom)
    elif wanted.weights_alone:
        weights.read(engine, folder / WEIGHTS)
    else:
        with naming(folder / rank_file(engine.group.rank)):
            engine.stage.load_state_dict(mine["stage"])
        for name, tensor in untrained(engine).items():
            if name in mine["untrained"]:
                tensor.copy_(mine["untrained"][name])
        if scheduler is not None and not wanted.scheduler:  # the schedule goes on from here, not from there
            for group, rate in zip(param_groups(engine), rates, strict=True):
                group.update(rate)


def restore_schedule(engine: TrainingState, folder: Path, state: dict[str, Any]) -> None:
    """The saved schedule, and the rates it stands at. If any rank's fails, all have theirs back."""
    scheduler: Any = engine.lr_scheduler
    before = deepcopy(scheduler.state_dict())

    def go_on() -> None:
        with naming(folder / rank_file(engine.group.rank)):
            scheduler.load_state_dict(state)

    try:
        together(engine.group, go_on)
    except CheckpointError:
        scheduler.load_state_dict(before)
        raise
    if hasattr(scheduler, "get_last_lr"):  # torch's do not write them when they are loaded
        for group, rate in zip(param_groups(engine), scheduler.get_last_lr(), strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
