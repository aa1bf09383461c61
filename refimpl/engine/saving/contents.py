"""What of a run goes into its checkpoint: this rank's tensors by name, and beside them its notes, which become JSON.

    weight/NAME     this rank's elements of a parameter, [n], fp32 where there are masters
    exp_avg/NAME    the same of the optimizer's state, whatever its keys are
    buffer/NAME     this rank's buffer, whole
    compression...  what was not sent yet on this rank, if something travels compressed

Bytes: 12 a parameter with AdamW, in fp32 and bf16 alike (weights of low precision are the rounded masters), each once,
so 12 Psi / N a rank, also in stage 0, where every rank has everything.
"""

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import Any

from torch import Tensor, nn

from refimpl.checkpoint import random_state
from refimpl.checkpoint.errors import CheckpointError
from refimpl.checkpoint.tensors import NAMES, Later
from refimpl.checkpoint.tree import encode
from refimpl.engine.saving.whole import joined, portions
from refimpl.engine.state import TrainingState
from refimpl.optim.travelling import MASK
from refimpl.zero.gather.saved import every_buffer, every_name, named_tensors
from refimpl.zero.optimizer.counted import counted
from refimpl.zero.portable import parts, place_of

COUNTERS = ("global_steps", "micro_steps", "global_samples")


def about_engine(engine: TrainingState, exclude_frozen: bool) -> dict[str, Any]:
    """What the manifest says of a run: the same on every rank of a replica. A collective of them."""
    counters = {name: getattr(engine, name) for name in COUNTERS}
    mine = joined(engine.axes.model.all_gather_object(about_rank(engine, exclude_frozen)))
    parts = engine.axes.expert.all_gather_object(mine)
    return identity(engine) | counters | {"scheduler": schedule(engine)} | joined(parts)


def about_rank(engine: TrainingState, exclude_frozen: bool) -> dict[str, Any]:
    """What this rank and its replicas have of the whole model."""
    stage, module, saved = engine.stage, engine.module, engine.saved_name
    left_out = {saved(name) for name in frozen_names(module)} if exclude_frozen else set()
    elsewhere, split, named = counted_elsewhere(engine), portions(engine), named_tensors(module)
    order = [saved(name) for name in named]
    alone = engine.axes.model.size == engine.axes.expert.size == 1
    parameters: dict[str, Any] = {}
    for p, name in stage.names.items():
        if name in left_out or p in elsewhere:
            continue
        shards = stage.experts.get(p, stage.group).ranks
        ranks = () if len(shards) == engine.axes.world.size else tuple(shards)
        place = replace(place_of(stage, p), ranks=ranks)
        if p in split:
            portion, shape = split[p]
            part = replace(place, dim=portion.dim, spans=portion.spans)
            place = replace(place, shape=shape, at=0, of=prod(shape), ranks=(), parts=(part,))
        parameters[name] = place.as_json()
    buffers = first_names(engine)
    first = stage.names | buffers
    every = (*every_name(module), *every_buffer(module).items(), *named.items())
    aliases = {saved(name): first[tensor] for name, tensor in every if isinstance(tensor, Tensor) and tensor in first}
    aliases |= {stage.names[p]: name for p, name in engine.copies().items()}
    where = {} if alone else {"ranks": [engine.axes.world.rank]}
    return {
        "parameters": parameters,
        "tied": {a: name for a, name in aliases.items() if a != name and name not in left_out},
        "buffers": {
            name: {"shape": list(b.shape), "persistent": name in order, **where} for b, name in buffers.items()
        },
        "order": order,
        "apart": [stage.names[p] for p in stage.update.slices.apart],
        "left_out": list(left_out),
    }


def first_names(engine: TrainingState) -> dict[Tensor, str]:
    """Each buffer, and what it is called in the whole model: the first of its names."""
    return {b: engine.saved_name(name) for name, b in reversed(every_buffer(engine.module).items())}


def counted_elsewhere(engine: TrainingState) -> frozenset[nn.Parameter]:
    """What another rank of this replica saves."""
    beyond = engine.stage.update.beyond
    return frozenset() if beyond is None else frozenset(filter(beyond.counts_none_of, engine.stage.names))


def identity(engine: TrainingState) -> dict[str, Any]:
    """What a run is; `resume` says what of it must be the same in the run that goes on."""
    return {
        "world_size": engine.axes.world.size,
        "stage": engine._config.zero_optimization.stage,
        "dtype": str(engine._config.dtype).removeprefix("torch."),
        "optimizer": type(engine.optimizer).__name__,
        "parameter_groups": len(param_groups(engine)),
    }


def contents(
    engine: TrainingState, client_state: Mapping[str, Any], exclude_frozen: bool, own: Mapping[str, dict[str, Any]]
) -> tuple[dict[str, Tensor | Later], dict[str, Any]]:
    """(tensors, notes) of this rank; own: see `own_states`. CheckpointError names what of them cannot be kept."""
    if not isinstance(client_state, Mapping):
        raise CheckpointError(f"client_state is a {type(client_state).__name__}: give a dictionary")
    tensors: dict[str, Tensor | Later] = {}
    noted: dict[str, Tensor] = {}  # inside what becomes JSON
    saved = engine.saved_name
    left_out = {saved(name) for name in frozen_names(engine.module)} if exclude_frozen else set()
    states: dict[str, dict[str, Any]] = {}
    for part in parts(engine.stage):
        if part.name in left_out:
            continue
        tensors[f"weight/{part.name}"] = part.weight
        if part.name in own:
            continue
        tensors |= {f"{key}/{part.name}": value for key, value in part.state.items()}
        rest = {key: [encode(v, f"{key}/{part.name}", noted)] for key, v in part.rest.items()}
        if begins := rest | dict.fromkeys(part.state, "cut"):
            states[part.name] = begins
    tensors |= {f"buffer/{name}": buffer for buffer, name in first_names(engine).items()}
    beside = plain(engine, client_state) | {"own_states": own}
    notes = {"state": states} | {name: encode(value, name, noted) for name, value in beside.items()}
    tensors |= noted
    for name, tensor in tensors.items():
        if tensor.dtype not in NAMES:
            raise CheckpointError(f"{name}: safetensors has no {tensor.dtype}")
    return tensors, notes


def plain(engine: TrainingState, client_state: Mapping[str, Any]) -> dict[str, Any]:
    """What is no tensor of the model's, and what a client gives: small, and not by a parameter's name."""
    scheduler, scaler = engine.lr_scheduler, engine.stage.scaler
    return {
        "groups": options(engine),
        "counted": counted(engine.optimizer),
        "skipped_steps": engine.stage.skipped_steps,
        "scaler": None if scaler is None else scaler.state_dict(),
        "lr_scheduler": None if scheduler is None else dict(scheduler.state_dict()),
        "random": random_state.get(engine.group.device),
        "data": engine.data_state(),
        "compression": None if (owing := engine.stage.owing) is None else owing.state_dict(),
        "extra_state": {engine.saved_name(n): state for n, state in extra_states(engine.module).items()},
        "client_state": dict(client_state),
    }


def extra_states(module: nn.Module) -> dict[str, Any]:
    """What modules keep beside parameters and buffers, by the module's name."""
    own = nn.Module.get_extra_state
    return {name: m.get_extra_state() for name, m in module.named_modules() if type(m).get_extra_state is not own}


def param_groups(engine: TrainingState) -> list[dict[str, Any]]:
    """The optimizer's groups; none in an engine without one."""
    return [] if engine.optimizer is None else engine.optimizer.param_groups


def options(engine: TrainingState) -> list[dict[str, Any]]:
    """What these groups say beside their parameters, and a mask over these."""
    return [{k: v for k, v in group.items() if k not in ("params", MASK)} for group in param_groups(engine)]


def schedule(engine: TrainingState) -> str | None:
    """The kind of the learning rate's schedule."""
    return None if engine.lr_scheduler is None else type(engine.lr_scheduler).__name__


def frozen_names(module: nn.Module) -> set[str]:
    """Every name of every parameter that is not trained."""
    return {name for name, p in every_name(module) if not p.requires_grad}
