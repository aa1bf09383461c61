"""The whole model's weights in one file, written from any stage and read into any stage and world size.

The file holds what `model.state_dict()` names, in the model's dtype: a tied weight under each of its names, nothing of
the optimizer, no padding. Reading is a pass over the file on every rank; a stage-3 rank gathers one unit at a time.
DeepSpeed: `save_16bit_model` and `load_module_state_dict` in deepspeed/runtime/engine.py.
"""

import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from refimpl.engine import atomic
from refimpl.engine.errors import CheckpointError, naming, together
from refimpl.engine.state import TrainingState
from refimpl.zero.init import GatheredParameters
from refimpl.zero.unit import unit_of


def frozen_names(module: nn.Module) -> set[str]:
    """Every name of every parameter that is not trained."""
    return {name for name, p in module.named_parameters(remove_duplicate=False) if not p.requires_grad}


def whole_weights(engine: TrainingState, exclude_frozen: bool) -> dict[str, Tensor] | None:
    """The weights by name on rank 0, None elsewhere. Collective."""
    weights = engine.stage.full_state_dict()
    left_out = frozen_names(engine.module) if exclude_frozen else set()
    return None if weights is None else {name: w for name, w in weights.items() if name not in left_out}


def write(path: Path, weights: dict[str, Tensor], safetensors: bool) -> None:
    path.touch()
    mode = path.stat().st_mode
    if safetensors:
        save_file(unshared(weights), path)
        path.chmod(mode)  # safetensors lets nobody else read it
    else:
        with path.open("wb") as file:  # ours, because torch's own does not tell that the disk is full
            torch.save(weights, file)


def unshared(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tied weights twice, each under its own name: safetensors wants no two names on one memory."""
    seen: set[int] = set()
    result = {}
    for name, weight in weights.items():
        result[name] = weight.clone() if weight.data_ptr() in seen else weight.contiguous()
        seen.add(weight.data_ptr())
    return result


def save_16bit_model(engine: TrainingState, save_dir: Path, filename: str, exclude_frozen: bool) -> bool:
    """Write the whole weights to one file, as safetensors if its name ends so. Collective.

    False, and nothing is written, in stage 3 without zero_optimization.stage3_gather_16bit_weights_on_model_save.
    CheckpointError on every rank if rank 0 cannot write it; a file of that name is then as it was.
    """
    zero = engine.config.zero_optimization
    if zero.stage == 3 and not zero.stage3_gather_16bit_weights_on_model_save:
        if engine.group.rank == 0:
            key = "zero_optimization.stage3_gather_16bit_weights_on_model_save"
            warnings.warn(f"save_16bit_model wrote nothing: set {key} to true", stacklevel=3)
        return False
    weights = whole_weights(engine, exclude_frozen)
    together(engine.group, lambda: None if weights is None else _write_16bit(engine, weights, save_dir / filename))
    return True


def _write_16bit(engine: TrainingState, weights: dict[str, Tensor], path: Path) -> None:
    dtype = engine.config.dtype
    cast = {name: w.to(dtype) if w.is_floating_point() else w for name, w in weights.items()}
    with naming(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic.write_file(path, lambda part: write(part, cast, path.suffix == ".safetensors"))


def check_fits(engine: TrainingState, path: Path, left_out: list[str], strict: bool) -> None:
    """CheckpointError if the weights in the file are not those of the model.

    strict: no weight may be missing but those that the save has `left_out`, and none may be too many.
    """
    with naming(path), safe_open(path, "pt") as file:
        there = {name: list(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    here = {name: list(w.shape) for name, w in engine.module.state_dict(keep_vars=True).items()}
    both = [name for name in here if name in there]
    wrong = [f"{name} is {there[name]} there, {here[name]} here" for name in both if there[name] != here[name]]
    if strict:
        wrong += [f"{name} is not in the file" for name in here if name not in there and name not in left_out]
        wrong += [f"{name} is not in the model" for name in there if name not in here]
    if wrong:
        more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        remedy = "Build the model that was saved" + (", or set load_module_strict=False" if strict else "")
        raise CheckpointError(f"{path}: these are not this model's weights: {'; '.join(wrong[:5])}{more}. {remedy}")


def read(engine: TrainingState, path: Path) -> None:
    """The weights of the file into the model, those that it has. Collective; `check_fits` comes first."""
    here = engine.module.state_dict(keep_vars=True)
    units = dict.fromkeys(unit for p in engine.module.parameters() if (unit := unit_of(p)) is not None)
    with naming(path), safe_open(path, "pt") as file, torch.no_grad():
        known = [name for name in file.keys() if name in here]  # noqa: SIM118
        for name in known:
            if unit_of(here[name]) is None:
                here[name].copy_(file.get_tensor(name))
        for unit in units:
            with GatheredParameters(unit.params, modifier_rank=0):
                if engine.group.rank == 0:
                    for name in known:
                        if unit_of(here[name]) is unit:
                            here[name].copy_(file.get_tensor(name))


def read_with(engine: TrainingState, path: Path, load: Callable[..., object]) -> None:
    """load(src=the file's weights by name, dst=the model) on every rank, the model's parameters whole. Collective.

    In stage 3 what rank 0 has made of the parameters is kept.
    """
    with GatheredParameters(engine.module, modifier_rank=0), torch.no_grad():
        together(engine.group, lambda: load(src=load_file(path), dst=engine.module))
