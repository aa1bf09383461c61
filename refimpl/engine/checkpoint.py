"""Checkpoints: each rank writes its own shards, rank 0 the whole weights, and `latest` says which one to go on from.

    save_dir/latest                        the tag of the last complete checkpoint, written when all ranks are done
    save_dir/<tag>/checkpoint.json         world size, stage, dtype, layout, which a resume must match; counters; size
                                           and checksum of every file, see refimpl/engine/manifest.py
    save_dir/<tag>/rank00000.pt            one a rank: `stage.state_dict()`, the schedule, the rank's client_state
    save_dir/<tag>/model.safetensors       the model's weights, whole, under their names, for everybody else

A save writes a folder beside <tag> and renames it when every rank's file is on the disk (refimpl/engine/atomic.py), so
a checkpoint that is replaced stays whole until its successor is; the disk must have room for both. A load checks every
file before it changes anything in the engine, and changes nothing on the disk; see refimpl/engine/resume.py for what
must fit. Files are loaded without unpickling code (`weights_only`). DeepSpeed's counterpart: `save_checkpoint` in
deepspeed/runtime/engine.py, which writes into the folder itself, without checksums: a pickle a rank, no whole weights.
"""

import os
import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from refimpl.engine import atomic, manifest, resume, weights
from refimpl.engine.errors import CheckpointError, naming, together
from refimpl.engine.resume import RANK_FILE, WEIGHTS, Wanted, identity, layout, rank_file, untrained
from refimpl.engine.state import TrainingState

COUNTERS = ("global_steps", "micro_steps", "global_samples")


def save(
    engine: TrainingState,
    save_dir: str | Path,
    tag: str | float | None,
    client_state: Mapping[str, Any],
    save_latest: bool,
    exclude_frozen: bool,
) -> bool:
    """Write a checkpoint of every rank under `save_dir/tag`, by default `global_step<n>`. Collective; returns True.

    CheckpointError on every rank if one cannot write its part: what was there before is there still.
    """
    if not save_dir:
        raise ValueError(f"save_checkpoint: save_dir is {save_dir!r}; name a folder")
    group, save_dir = engine.group, Path(save_dir)
    tag = agreed_tag(engine, f"global_step{engine.global_steps}" if tag is None else str(tag))
    id_ = str(group.all_gather_object(atomic.new_id())[0])
    folder, new = save_dir / tag, atomic.unfinished(save_dir / tag, id_)
    with ExitStack() as held:
        try:
            together(group, lambda: begin(folder, new, held) if group.rank == 0 else None)
            mine = together(group, lambda: write_rank_file(engine, new, id_, client_state, exclude_frozen))
            files = {rank_file(rank): about for rank, about in enumerate(group.all_gather_object(mine))}
            whole = weights.whole_weights(engine, exclude_frozen)
            about = {"id": id_} | about_engine(engine) | {"files": files, "left_out": []}
            if exclude_frozen:
                about["left_out"] = sorted(weights.frozen_names(engine.module))
            together(group, lambda: None if whole is None else finish(folder, new, about, whole, save_latest))
        except Exception:
            if group.rank == 0:
                atomic.discard(new, manifest.NAME)
            raise
    return True


def begin(folder: Path, new: Path, held: ExitStack) -> None:
    """Rank 0: clear what killed saves have left in the parent folder, hold it, and make the folder to write into."""
    save_dir = folder.parent
    with naming(save_dir):
        if not save_dir.is_dir():
            save_dir.mkdir(parents=True)
            atomic.sync(save_dir.parent)
        held.enter_context(atomic.hold(save_dir, manifest.NAME, ours))
    with naming(folder):
        if os.path.lexists(folder) and not (folder / manifest.NAME).is_file() and any(folder.iterdir()):
            raise CheckpointError(
                f"{folder}: something else than a checkpoint (it has no {manifest.NAME}); move it away, or choose "
                "another tag"
            )
        new.mkdir()


def write_rank_file(
    engine: TrainingState, new: Path, id_: str, client_state: Mapping[str, Any], exclude_frozen: bool
) -> dict[str, Any]:
    """Write this rank's file; its size and checksum. Reads it back: what cannot be loaded must fail now."""
    rank, scheduler = engine.group.rank, engine.lr_scheduler
    path = new / rank_file(rank)
    with naming(path):
        content = {
            "save": {"id": id_, "rank": rank},
            "stage": tree_map_only(Tensor, compact, engine.stage.state_dict()),
            "untrained": {name: compact(tensor) for name, tensor in untrained(engine, exclude_frozen).items()},
            "lr_scheduler": None if scheduler is None else scheduler.state_dict(),
            "client_state": dict(client_state),
        }
        with path.open("xb") as file:  # ours, because torch's own does not tell that the disk is full
            torch.save(content, file)
        try:
            torch.load(path, map_location="meta", weights_only=True)
        except UnpicklingError as error:
            raise CheckpointError(
                f"{path}: client_state (or the schedule's state) holds something else than tensors, numbers, strings, "
                "None, lists, tuples and dictionaries of them"
            ) from error
        atomic.sync(path)
        return manifest.digest(path)


def finish(folder: Path, new: Path, about: dict[str, Any], whole: dict[str, Tensor], save_latest: bool) -> None:
    """Rank 0, when every rank has written its file: the weights, the manifest, the name, and last `latest`."""
    path = new / WEIGHTS
    with naming(path):
        weights.write(path, whole, safetensors=True)
        atomic.sync(path)
    about["files"][WEIGHTS] = manifest.digest(path)
    with naming(new / manifest.NAME):
        manifest.write(new / manifest.NAME, about)
        atomic.sync(new / manifest.NAME)
        atomic.sync(new)
    with naming(folder):
        atomic.replace_folder(new, folder, manifest.NAME, ours)
    if save_latest:
        latest = folder.parent / "latest"
        with naming(latest):
            atomic.write_file(latest, lambda part: part.write_text(folder.name))


def load(
    engine: TrainingState, load_dir: Path, tag: str | float | None, wanted: Wanted
) -> tuple[str | None, dict[str, Any] | None]:
    """Restore the checkpoint `tag`, by default the one that `latest` names: (its path, this rank's client_state).

    (None, None) and a warning when `load_dir` has no `latest`: a fresh start, as in DeepSpeed. CheckpointError, on
    every rank and before anything has changed, for a checkpoint that is not there, damaged or of another setting.
    A rank that the saving run did not have gets rank 0's client_state.
    """
    if wanted.custom is not None and not wanted.weights_alone:
        raise ValueError("custom_load_fn: its weights do not fit the saved optimizer; add load_optimizer_states=False")
    found = together(engine.group, lambda: resume.find(load_dir, None if tag is None else str(tag)))
    seen = engine.group.all_gather_object(None if found is None else f"{found[0].name} of save {found[1]['id']}")
    if len(set(seen)) > 1:
        said = ", ".join(f"rank {rank}: {name or 'none'}" for rank, name in enumerate(seen))
        raise CheckpointError(f"{load_dir}: the ranks see different checkpoints: {said}; use a folder that all share")
    if found is None:
        there = ", ".join(manifest.complete(load_dir))
        hint = f"; complete checkpoints there: {there}; pass one as tag" if there else ""
        warnings.warn(f"{load_dir} has no checkpoint: no file `latest`; nothing is loaded{hint}", stacklevel=3)
        return None, None
    folder, about = found
    mine = together(engine.group, lambda: resume.checked(engine, folder, about, wanted))
    resume.restore(engine, folder, mine, wanted)
    if not wanted.module_only:
        for name in COUNTERS:
            setattr(engine, name, about[name])
    return str(folder), mine["client_state"]


def about_engine(engine: TrainingState) -> dict[str, Any]:
    """What the manifest says of a run."""
    counters = {name: getattr(engine, name) for name in COUNTERS}
    return identity(engine) | counters | {"scheduler": resume.schedule(engine), "layout": layout(engine)}


def agreed_tag(engine: TrainingState, tag: str) -> str:
    """Rank 0's tag. When another rank names another one: nothing, a warning or an error, as `tag_validation` says."""
    tags = engine.group.all_gather_object(tag)
    check = engine.config.checkpoint.tag_validation
    if check != "IGNORE" and len(set(tags)) > 1:
        said = ", ".join(f"rank {rank}: {name!r}" for rank, name in enumerate(tags))
        if check == "FAIL":
            raise CheckpointError(f"the ranks name different checkpoint tags: {said}; name one on all ranks")
        if engine.group.rank == 0:
            warnings.warn(f"the ranks name different checkpoint tags: {said}; rank 0's is taken", stacklevel=4)
    return resume.checked_tag(str(tags[0]), "save_checkpoint")


def ours(name: str) -> bool:
    """Whether a save writes a file of this name; what else lies in a checkpoint is somebody else's."""
    return name in (manifest.NAME, WEIGHTS) or RANK_FILE.fullmatch(name) is not None


def compact(tensor: Tensor) -> Tensor:
    """A tensor with a storage of its own: torch.save would write all of the flat buffer that a shard is cut from."""
    return tensor.clone() if tensor.untyped_storage().nbytes() != tensor.nbytes else tensor
