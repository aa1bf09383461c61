"""Checkpoints: each rank writes its own shards, rank 0 the whole weights, and `latest` says which one is complete.

    save_dir/latest                        the tag of the last complete checkpoint, written when all ranks are done
    save_dir/<tag>/checkpoint.json         world size, stage, dtype, layout, which a resume must match; counters
    save_dir/<tag>/rank00000.pt            one a rank: `stage.state_dict()`, the schedule, the rank's client_state
    save_dir/<tag>/model.safetensors       the model's weights, whole, under their names, for everybody else

Files are loaded without unpickling code (`weights_only`). Going on with another number of ranks or another stage is an
error that names both. DeepSpeed's counterpart: `save_checkpoint` in deepspeed/runtime/engine.py, which writes a pickle
a rank and no whole weights.
"""

import json
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.utils._pytree import tree_map_only

from refimpl.zero.unit import unit_of

if TYPE_CHECKING:
    from refimpl.engine.engine import Engine

COUNTERS = ("global_steps", "micro_steps", "global_samples")


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read as asked; the message names the file and the remedy."""


def save(
    engine: "Engine", save_dir: Path, tag: str | float | None, client_state: Mapping[str, Any], save_latest: bool
) -> bool:
    """Write a checkpoint of every rank under `save_dir/tag`, by default `global_step<n>`. Collective; returns True."""
    tag = agreed_tag(engine, f"global_step{engine.global_steps}" if tag is None else str(tag))
    folder, first = save_dir / tag, engine.group.rank == 0
    folder.mkdir(parents=True, exist_ok=True)
    if first:
        (folder / "checkpoint.json").unlink(missing_ok=True)  # what is there is being overwritten
    scheduler = engine.lr_scheduler
    mine = {
        "stage": tree_map_only(Tensor, compact, engine.stage.state_dict()),
        "untrained": {name: compact(tensor) for name, tensor in untrained(engine).items()},
        "lr_scheduler": None if scheduler is None else scheduler.state_dict(),
        "client_state": dict(client_state),
    }
    write_rank_file(folder / rank_file(engine.group.rank), mine)
    weights = engine.stage.full_state_dict()
    if weights is not None:
        write(folder / "model.safetensors", lambda path: save_file(unshared(weights), path))
    engine.group.barrier()  # what follows says that every rank has written its file
    if first:
        about = identity(engine) | {name: getattr(engine, name) for name in COUNTERS} | {"layout": layout(engine)}
        write(folder / "checkpoint.json", lambda path: path.write_text(json.dumps(about, indent=2)))
        if save_latest:
            write(save_dir / "latest", lambda path: path.write_text(tag))
    engine.group.barrier()  # no rank may look for it before it is there
    return True


def load(engine: "Engine", load_dir: Path, tag: str | float | None) -> tuple[str | None, dict[str, Any] | None]:
    """Restore the checkpoint `tag`, by default the one that `latest` names: (its path, this rank's client_state).

    (None, None) and a warning when `load_dir` has no `latest`: a fresh start, as in DeepSpeed. CheckpointError for a
    tag that is not there, another world size, another stage or another dtype.
    """
    latest = load_dir / "latest"
    if tag is None and not latest.is_file():
        warnings.warn(f"{load_dir} has no checkpoint: no file `latest`; nothing is loaded", stacklevel=3)
        return None, None
    folder = load_dir / (latest.read_text().strip() if tag is None else str(tag))
    about_file = folder / "checkpoint.json"
    if not about_file.is_file():
        tags = sorted(path.parent.name for path in load_dir.glob("*/checkpoint.json"))
        raise CheckpointError(f"{about_file}: no such file; complete checkpoints in {load_dir}: {', '.join(tags)}")
    about = json.loads(about_file.read_text())
    differences = [
        f"{name} {about[name]} there, {here} here" for name, here in identity(engine).items() if about[name] != here
    ]
    if differences:
        raise CheckpointError(
            f"{folder}: cannot go on from it: {'; '.join(differences)}. Run with the same setting, or take the whole "
            "weights from model.safetensors"
        )
    if about["layout"] != layout(engine):
        raise CheckpointError(
            f"{folder}: cannot go on from it: its flat buffers hold other parameters than here. The model, the "
            "optimizer's groups, reduce_bucket_size, or stage 3's thresholds and leaf modules have changed"
        )
    mine = torch.load(folder / rank_file(engine.group.rank), map_location="cpu", weights_only=True)
    engine.stage.load_state_dict(mine["stage"])
    for name, tensor in untrained(engine).items():
        tensor.copy_(mine["untrained"][name])
    if engine.lr_scheduler is not None and mine["lr_scheduler"] is not None:
        engine.lr_scheduler.load_state_dict(mine["lr_scheduler"])
    for name in COUNTERS:
        setattr(engine, name, about[name])
    return str(folder), mine["client_state"]


def save_16bit_model(engine: "Engine", save_dir: Path, filename: str) -> bool:
    """Write the whole weights to one file, as safetensors if its name ends so. Collective.

    False, and nothing is written, in stage 3 without zero_optimization.stage3_gather_16bit_weights_on_model_save.
    """
    zero = engine.config.zero_optimization
    if zero.stage == 3 and not zero.stage3_gather_16bit_weights_on_model_save:
        if engine.group.rank == 0:
            key = "zero_optimization.stage3_gather_16bit_weights_on_model_save"
            warnings.warn(f"save_16bit_model wrote nothing: set {key} to true", stacklevel=3)
        return False
    weights = engine.stage.full_state_dict()
    if weights is not None:
        dtype = engine.config.dtype
        weights = {name: w.to(dtype) if w.is_floating_point() else w for name, w in weights.items()}
        save_dir.mkdir(parents=True, exist_ok=True)
        path = save_dir / filename
        if path.suffix == ".safetensors":
            write(path, lambda part: save_file(unshared(weights), part))
        else:
            write(path, lambda part: torch.save(weights, part))
    engine.group.barrier()
    return True


def identity(engine: "Engine") -> dict[str, Any]:
    """What a run must have in common with the one that it continues."""
    return {
        "world_size": engine.group.size,
        "stage": engine.zero_optimization_stage(),
        "dtype": str(engine.config.dtype).removeprefix("torch."),
    }


def layout(engine: "Engine") -> list[list[str]]:
    """Which parameters, of which shape, lie in which flat buffer, in order: what a shard's elements mean."""
    names = engine.stage.names
    return [[f"{names[p]} {list(p.shape)}" for p in bucket.params] for bucket in engine.stage.buckets]


def untrained(engine: "Engine") -> dict[str, Tensor]:
    """What the stage's own state leaves out: this rank's buffers, and frozen parameters, or its shards of them."""
    frozen = {}
    for name, p in engine.module.named_parameters():
        unit = unit_of(p)
        if not p.requires_grad:
            frozen[name] = p.data if unit is None else unit.mine
    return frozen | dict(engine.module.named_buffers())


def agreed_tag(engine: "Engine", tag: str) -> str:
    """Rank 0's tag. When another rank names another one: nothing, a warning or an error, as `tag_validation` says."""
    tags = engine.group.all_gather_object(tag)
    check = engine.config.checkpoint.tag_validation
    if check != "IGNORE" and len(set(tags)) > 1:
        said = ", ".join(f"rank {rank}: {name!r}" for rank, name in enumerate(tags))
        if check == "FAIL":
            raise CheckpointError(f"the ranks name different checkpoint tags: {said}; name one on all ranks")
        if engine.group.rank == 0:
            warnings.warn(f"the ranks name different checkpoint tags: {said}; rank 0's is taken", stacklevel=4)
    return str(tags[0])


def rank_file(rank: int) -> str:
    return f"rank{rank:05d}.pt"


def write_rank_file(path: Path, content: dict[str, Any]) -> None:
    """Write a rank's file, and read its client_state back: what cannot be loaded must fail now, not at the resume."""
    write(path, lambda part: torch.save(content, part))
    try:
        torch.load(path, map_location="meta", weights_only=True)
    except UnpicklingError as error:
        path.unlink()
        raise CheckpointError(
            f"{path}: client_state (or the schedule's state) holds something else than tensors, numbers, strings, "
            "None, lists, tuples and dictionaries of them"
        ) from error


def write(path: Path, content: Any) -> None:
    """content(temporary path), then rename: a file that has its name is whole."""
    part = path.with_name(path.name + ".part")
    content(part)
    os.replace(part, path)


def compact(tensor: Tensor) -> Tensor:
    """A tensor with a storage of its own: torch.save would write all of the flat buffer that a shard is cut from."""
    return tensor.clone() if tensor.untyped_storage().nbytes() != tensor.nbytes else tensor


def unshared(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tied weights twice, each under its own name: safetensors wants no two names on one memory."""
    seen: set[int] = set()
    result = {}
    for name, weight in weights.items():
        result[name] = weight.clone() if weight.data_ptr() in seen else weight.contiguous()
        seen.add(weight.data_ptr())
    return result
