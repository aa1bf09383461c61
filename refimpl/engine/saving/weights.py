"""The model's weights: whole in one file for everybody else, and those of a checkpoint back into the model.

The file holds what `model.state_dict()` names, in the dtypes that it has there (buffers are not rounded to 16 bits): a
tied weight under each of its names, what a module's `get_extra_state` gives, nothing of the optimizer, no padding.
DeepSpeed: `save_16bit_model` and `load_module_state_dict` in deepspeed/runtime/engine.py.
"""

import warnings
from collections import ChainMap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from refimpl.checkpoint import atomic, export, manifest, tensors
from refimpl.checkpoint.errors import CheckpointError, naming, together
from refimpl.checkpoint.folder import Folder
from refimpl.checkpoint.place import Portion
from refimpl.comm.group import Group
from refimpl.engine.saving.contents import extra_states, first_names, frozen_names
from refimpl.engine.saving.whole import portions
from refimpl.engine.state import TrainingState
from refimpl.parallel.swap import join_parts
from refimpl.zero.gather.saved import every_name
from refimpl.zero.init import GatheredParameters


def whole_weights(engine: TrainingState, exclude_frozen: bool) -> dict[str, Any] | None:
    """The whole model's weights by name on rank 0, None elsewhere. Collective."""
    parts = portions(engine)
    if apart := [engine.stage.names[p] for p, (portion, _) in parts.items() if portion.dim is None]:
        raise CheckpointError(
            f"{apart[0]}: the model itself has split it over ranks: only the model can put its parts together"
        )
    weights = engine.stage.full_state_dict()
    if weights is None or engine.axes.across.rank > 0:
        return None
    left_out = frozen_names(engine.module) if exclude_frozen else set()
    weights = {name: w for name, w in weights.items() if name not in left_out}
    slices = {
        engine.saved_name(name): portion
        for name, p in every_name(engine.module)
        if p in engine.stage.experts and (portion := parts.get(p, (None,))[0]) is not None
    }
    if engine.axes.model.size == 1:
        return from_all(engine.axes.expert, weights, slices)
    whole = {engine.saved_name(name): w for name, w in join_parts(engine.module, weights).items()}
    if engine.axes.tensor.rank > 0:
        return None
    for others in engine.axes.pipeline.all_gather_object(slices):
        slices |= others
    of_stages = from_all(engine.axes.pipeline, whole)
    return None if of_stages is None else from_all(engine.axes.expert, of_stages, slices)


def from_all(
    group: Group, weights: dict[str, Any], slices: Mapping[str, Portion] | None = None
) -> dict[str, Any] | None:
    """Every rank's weights on rank 0 of `group`, None elsewhere. Sends each once; what has come is at the host.

    slices: the names of which each rank has a part; ranks in the order of their parts.
    """
    others = {name: state for name, state in weights.items() if not isinstance(state, Tensor)}
    mine = {
        name: (tuple(w.shape), w.dtype, (slices or {}).get(name)) for name, w in weights.items() if name not in others
    }
    said, more = zip(*group.all_gather_object((mine, others)), strict=True)
    here = {(name, part) for name, (_, _, part) in said[0].items()}
    pieces: dict[str, list[Tensor]] = {}
    for rank, names in enumerate(said[1:], 1):
        for name, (shape, dtype, part) in names.items():
            if (name, part) in here:
                continue
            here.add((name, part))
            if group.rank == rank:
                group.send(weights[name].to(group.device).contiguous(), 0, tag="whole weights")
            elif group.rank == 0:
                received = torch.empty(shape, dtype=dtype, device=group.device)
                group.recv(received, rank, tag="whole weights")
                own = [weights[name].cpu()] if name in weights else []
                pieces.setdefault(name, own).append(received.cpu())
    for name, found in pieces.items():
        part = (slices or {}).get(name)
        weights[name] = found[0] if part is None or part.dim is None else torch.cat(found, part.dim)
    return dict(ChainMap(weights, *more)) if group.rank == 0 else None


def write(path: Path, weights: dict[str, Any]) -> None:
    """As safetensors, which hold tensors alone (CheckpointError for anything else), or as torch.save writes."""
    if path.name.partition(".refimpl-")[0].endswith(".safetensors"):
        for key, w in weights.items():
            if not isinstance(w, Tensor):
                raise CheckpointError(f"{key} is a {type(w).__name__}, which safetensors cannot hold: save as .bin")
        tensors.write(path, weights, {"format": "pt"})
    else:
        with path.open("wb") as file:  # ours, because torch's own does not tell that the disk is full
            torch.save(weights, file)


def save_16bit_model(engine: TrainingState, save_dir: Path, filename: str, exclude_frozen: bool) -> bool:
    """Write the whole weights to one file, as safetensors if its name ends so. Collective.

    False, and nothing is written, in stage 3 without zero_optimization.stage3_gather_16bit_weights_on_model_save.
    CheckpointError on every rank if rank 0 cannot write it; a file of that name is then as it was.
    """
    zero = engine._config.zero_optimization
    if zero.stage == 3 and not zero.stage3_gather_16bit_weights_on_model_save:
        if engine.axes.world.rank == 0:
            key = "zero_optimization.stage3_gather_16bit_weights_on_model_save"
            warnings.warn(f"save_16bit_model wrote nothing: set {key} to true", stacklevel=3)
        return False
    weights = whole_weights(engine, exclude_frozen)
    together(engine.axes.world, lambda: None if weights is None else _write_16bit(weights, save_dir / filename))
    return True


def _write_16bit(weights: dict[str, Any], path: Path) -> None:
    at_host = {name: w.cpu() if isinstance(w, Tensor) else w for name, w in weights.items()}
    with naming(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic.hold(path.parent, manifest.NAME, manifest.ours):  # what a killed one has left is as large
            atomic.write_file(path, lambda part: write(part, at_host))


def check_fits(engine: TrainingState, folder: Folder, strict: bool, known: set[str]) -> None:
    """CheckpointError if what was saved are not the weights of the model, of which `known` are all names.

    strict: no weight may be missing but those that the save has left out, and none may be too many.
    """
    about = folder.about
    there = {name: list(place.shape) for name, place in folder.places.items()}
    there |= {name: buffer["shape"] for name, buffer in about["buffers"].items() if buffer["persistent"]}
    there |= {alias: there[name] for alias, name in about["tied"].items() if name in there}
    state = engine.module.state_dict(keep_vars=True)
    shapes = {p: shape for p, (_, shape) in portions(engine).items()}
    here = {engine.saved_name(n): list(shapes.get(w, w.shape)) for n, w in state.items() if isinstance(w, Tensor)}  # type: ignore[call-overload]
    both = [name for name in here if name in there]
    wrong = [f"{name} is {there[name]} there, {here[name]} here" for name in both if there[name] != here[name]]
    if strict:
        wrong += [f"{name} is not in the file" for name in here if name not in there and name not in about["left_out"]]
        wrong += [f"{name} is not in the model" for name in there if name not in known]
    if wrong:
        more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        remedy = "Build the model that was saved" + (", or set load_module_strict=False" if strict else "")
        raise CheckpointError(
            f"{folder.path}: these are not this model's weights: {'; '.join(wrong[:5])}{more}. {remedy}"
        )


def shared_names(engine: TrainingState, folder: Folder) -> list[str]:
    """The model's parameters that the checkpoint has, under whichever of their names."""
    return [name for name in engine.stage.names.values() if name in folder.places or name in folder.about["tied"]]


@torch.no_grad()
def read_buffers(engine: TrainingState, folder: Folder, rank: int) -> None:
    """The buffers that a rank saved, and what modules keep beside them. A cache of another length stays as it is."""
    for buffer, own in first_names(engine).items():
        name = folder.canonical(own)
        if name in folder.about["buffers"]:
            saved = folder.with_buffer(name, rank).tensor(f"buffer/{name}")
            if saved.shape == buffer.shape:  # or `check_fits` has refused it, if it is persistent
                buffer.copy_(saved)
    left = {engine.saved_name(name): engine.module.get_submodule(name) for name in extra_states(engine.module)}
    for there in (rank, *range(folder.ranks)):  # another pipeline stage's are with another rank
        for name, state in folder.value(there, "extra_state").items() if left else ():
            if name in left:
                left.pop(name).set_extra_state(state)


def read_with(engine: TrainingState, folder: Folder, load: Callable[..., object]) -> None:
    """load(src=the saved weights by name, dst=the model) on every rank, the model's parameters whole. Collective.

    Here each rank has a whole copy, which is what such a function wants. In stage 3 what rank 0 has made of the
    parameters is kept.
    """
    with GatheredParameters(engine.module, modifier_rank=0), torch.no_grad():
        together(engine.axes.world, lambda: load(src=dict(export.weights(folder, None)), dst=engine.module))
