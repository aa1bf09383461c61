"""A ZeRO checkpoint of DeepSpeed written anew as one of ours: weights, moments, schedule, counters, client_state.

The new one has one rank's files and is loaded at any number of ranks and any stage. One parameter is in memory at a
time. DeepSpeed's files hold no random state, no position in the data, and not the optimizer's kind: a load asks for
none.
"""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from math import prod
from pathlib import Path
from typing import Any

from torch import Tensor

from refimpl.checkpoint import atomic, unpickle
from refimpl.checkpoint.deepspeed_files import Written, given
from refimpl.checkpoint.errors import CheckpointError, naming
from refimpl.checkpoint.find import checked_tag
from refimpl.checkpoint.place import Place
from refimpl.checkpoint.tensors import Entry, Writer, entry
from refimpl.checkpoint.tree import encode
from refimpl.checkpoint.write import begin, finish, write_notes

OWN = {
    "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "frozen_param_fragments",
    "shared_params", "lr_scheduler", "data_sampler", "random_ltd", "sparse_tensor_module_names", "skipped_steps",
    "global_steps", "global_samples", "micro_steps", "dp_world_size", "mp_world_size", "num_experts", "ds_config",
    "ds_version", "checkpoint_parallel_dimensions", "ds_autoep_layers", "autoep_layers", "universal_checkpoint_info",
}  # fmt: skip


def import_folder(folder: Path, out: Path) -> Path:
    """Write what DeepSpeed has written to `folder` anew as out/<tag>, and `latest`; the new checkpoint.

    It has one rank, and is loaded at any number and stage. CheckpointError names what is missing, damaged or not read,
    and an out/<tag> that is there already.
    """
    path, tag = given(folder)
    id_ = atomic.new_id()
    target = out / checked_tag(tag, str(path))
    new = atomic.unfinished(target, id_)
    with naming(target):
        if os.path.lexists(target):
            raise CheckpointError(f"{target}: is there already; move it away, or choose another folder")
    with ExitStack() as held, laid_out(path):
        source = Written(path)
        begin(target, new, held)
        try:
            tensors, notes = notes_of(source)
            frozen = source.frozen()
            digest = write_tensors(source, new, frozen, tensors)
            write_notes(new, digest, {"save": {"id": id_, "rank": 0}} | notes)
            finish(target, new, {"id": id_} | about(source, frozen), save_latest=True)
        except Exception:
            atomic.discard(new)
            raise
    return target


@contextmanager
def laid_out(path: Path) -> Iterator[None]:
    """What is not where DeepSpeed lays it becomes a CheckpointError about `path`."""
    try:
        yield
    except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
        raise CheckpointError(
            f"{path}: not laid out as by DeepSpeed 0.19 ({type(error).__name__}: {error}): of another version "
            "or program, or edited; load it with what wrote it, and save it with that DeepSpeed"
        ) from error


def write_tensors(source: Written, new: Path, frozen: dict[str, Tensor], rest: dict[str, Tensor]) -> dict[str, Any]:
    """The one rank's tensors, one parameter at a time."""
    entries: dict[str, Entry] = {f"weight/{name}": (w.dtype, (w.numel(),)) for name, w in frozen.items()}
    for name, flat in source.trained.items():
        for key in ["weight", *(key for key, value in source.states(name).items() if value is None)]:
            entries[f"{key}/{name}"] = source.flats(0, key)[0].dtype, (prod(flat.shape),)
    buffers = {f"buffer/{name}": source.model["module"][name] for name in source.model["buffer_names"]}
    others = rest | buffers | {f"weight/{name}": w.reshape(-1) for name, w in frozen.items()}
    path = new / "rank00000.safetensors"
    with naming(path):
        with Writer(path, entries | {name: entry(t) for name, t in others.items()}) as file:
            for full in file.names:
                key, _, name = full.partition("/")
                file.put(others[full] if full in others else source.value(name, key))
        atomic.sync(path)
    return file.digest


def notes_of(source: Written) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What is no tensor, and the tensors in it."""
    tensors: dict[str, Tensor] = {}
    states = {
        name: {
            key: "cut" if value is None else [encode(value, f"{key}/{name}", tensors)]
            for key, value in source.states(name).items()
        }
        for name in source.trained
    }
    groups = source.base(0)["param_groups"]
    plain = {
        "groups": [{k: v for k, v in group.items() if k != "params"} for group in groups],
        "skipped_steps": source.model.get("skipped_steps", 0),
        "scaler": scaler_of(source.optim[0].get("loss_scaler")),
        "lr_scheduler": source.model.get("lr_scheduler"),
        "random": None,
        "data": None,
        "extra_state": {},
        "client_state": {k: v for k, v in source.model.items() if k not in OWN},
    }
    return tensors, {"state": states} | {name: encode(value, name, tensors) for name, value in plain.items()}


def scaler_of(shell: Any) -> dict[str, Any] | None:
    """fp16's loss scale, as our scalers keep it."""
    there = vars(shell) if isinstance(shell, unpickle.Shell) else {}
    if "cur_scale" not in there:
        return None
    good = there.get("cur_iter", 0) - there.get("last_overflow_iter", -1) - 1
    return {"scale": float(there["cur_scale"]), "left": there.get("cur_hysteresis", 1), "good_steps": max(0, good)}


def about(source: Written, frozen: dict[str, Tensor]) -> dict[str, Any]:
    """The manifest. The optimizer's kind is not said there, so that a load does not ask for it."""
    model, config = source.model, source.model.get("ds_config") or {}
    module, steps = model["module"], int(model.get("global_steps", 0))
    dtypes = {name: str(w.dtype).removeprefix("torch.") for name, w in module.items() if isinstance(w, Tensor)}
    places = {n: Place(f.shape, dtypes[n], 0, max(1, prod(f.shape)), f.group, True) for n, f in source.trained.items()}
    places |= {n: Place(tuple(w.shape), dtypes[n], 0, max(1, w.numel()), None, False) for n, w in frozen.items()}
    low = [d for n, d in dtypes.items() if n in places and d in ("bfloat16", "float16")]
    return {
        "world_size": 1,
        "stage": source.stage,
        "dtype": low[0] if low else "float32",
        "optimizer": None,
        "parameter_groups": len(source.base(0)["param_groups"]),
        "global_steps": steps,
        "micro_steps": int(model.get("micro_steps", steps * config.get("gradient_accumulation_steps", 1))),
        "global_samples": int(model.get("global_samples", 0)),
        "scheduler": config.get("scheduler", {}).get("type"),
        "parameters": {name: place.as_json() for name, place in places.items()},
        "tied": dict(model["shared_params"]),
        "buffers": {n: {"shape": list(module[n].shape), "persistent": True} for n in model["buffer_names"]},
        "order": list(dtypes),
        "apart": [],
        "left_out": [],
        "from": f"DeepSpeed {model.get('ds_version', 'unknown')}, {source.ranks} ranks",
    }
