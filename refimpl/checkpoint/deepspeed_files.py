"""What a ZeRO checkpoint of DeepSpeed holds, stages 1 to 3, parameter by parameter.

    mp_rank_00_model_states.pt                          stages 1, 2: names and shapes by group, buffers, frozen weights
    zero_pp_rank_R_mp_rank_00_model_states.pt           stage 3: the same, frozen weights in pieces
    [bf16_]zero_pp_rank_R_mp_rank_00_optim_states.pt    rank R's fp32 weights and moments, flat

Stages 1, 2: the ranks' partitions of a group, laid end to end, hold its parameters one behind the other, each followed
by its alignment padding. Stage 3: every parameter is cut by itself into N pieces of ceil(numel / N); rank R has the
R-th piece of each, in order, all groups and sub-groups end to end; the padding is at the end of the last piece.
DeepSpeed's own readers: deepspeed/utils/zero_to_fp32.py (weights alone) and deepspeed/checkpoint/ds_to_universal.py.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from refimpl.checkpoint import manifest, unpickle
from refimpl.checkpoint.errors import CheckpointError, naming
from refimpl.checkpoint.find import checked_tag, named_by

OPTIM = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_00_optim_states\.pt")
OF_PARTS = re.compile(r"layer_.*\.pt|.*exp.*\.pt|.*mp_rank_(?!00)\d+_.*\.pt")  # of pipelines, experts, tensor ranks
IN_PARTS = "of a model in parts (tensor, pipeline, experts), not read here"
WEIGHTS = "The weights are in its *_model_states.pt: refimpl.checkpoint.unpickle.load(file) reads each"


@dataclass(frozen=True)
class Flat:
    """One parameter, trained: its group, and where its elements are among the ranks' flat tensors."""

    shape: tuple[int, ...]
    group: int
    at: int  # element of the group (stages 1, 2), or of each rank's everything (stage 3)


class Written:
    """A folder that DeepSpeed has written, opened. CheckpointError if it is not whole, or of a kind not read here."""

    def __init__(self, folder: Path) -> None:
        self.path = folder
        with naming(folder):
            found = {name: OPTIM.fullmatch(name) for name in sorted(p.name for p in folder.iterdir())}
        ranks = {int(match[1]): folder / name for name, match in found.items() if match is not None}
        if odd := [name for name in found if OF_PARTS.fullmatch(name)]:
            raise CheckpointError(
                f"{folder / odd[0]}: {IN_PARTS}. {WEIGHTS}: put them together, load before initialize; a pipeline "
                "begins from its own by engine.load_checkpoint(folder, load_module_only=True)"
            )
        if "offloaded_tensors" in found:
            raise CheckpointError(
                f"{folder}/offloaded_tensors: optimizer state as DeepSpeed swaps it to NVMe, not read here. Load it "
                "with DeepSpeed and write the weights by save_16bit_model"
            )
        if not ranks:
            raise CheckpointError(f"{folder}: no *_optim_states.pt: no ZeRO checkpoint of DeepSpeed. {hint(found)}")
        self.optim = [loaded(ranks[r], "optimizer_state_dict")["optimizer_state_dict"] for r in sorted(ranks)]
        first = self.optim[0]
        if first.get("ds_zero_partition_groups"):  # AutoEP: the experts' are cut over other ranks than the rest
            raise CheckpointError(f"{ranks[min(ranks)]}: {IN_PARTS}. Write its weights with DeepSpeed")
        self.stage = int(first.get("zero_stage", 0))
        count = first["partition_count"]
        self.ranks = max(count) if isinstance(count, list) else int(count)
        missing = set(range(self.ranks)) - set(ranks)
        files = sum(match is not None for match in found.values())  # two of one rank: of runs in two precisions
        if missing or files != self.ranks:
            raise CheckpointError(
                f"{folder}: {files} *_optim_states.pt, {self.ranks} ranks wrote it; bring back those of rank "
                f"{', '.join(map(str, sorted(missing))) or 'none: there are too many'}"
            )
        names = ["mp_rank_00_model_states.pt"]
        if self.stage == 3:
            names = [f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" for rank in range(self.ranks)]
        self.models = [loaded(folder / name, "module", "param_shapes") for name in names]
        self.model = self.models[0]
        self.trained = dict(self._lay_out())

    def _lay_out(self) -> Iterator[tuple[str, Flat]]:
        at = 0
        paddings = self.optim[0].get("param_alignment_paddings")
        for group, shapes in enumerate(self.model["param_shapes"]):
            at = at if self.stage == 3 else 0
            for i, (name, shape) in enumerate(shapes.items()):
                yield name, Flat(tuple(shape), group, at)
                at += -(-prod(shape) // self.ranks) if self.stage == 3 else prod(shape)
                at += paddings[group][i] if paddings is not None and self.stage < 3 else 0

    def value(self, name: str, key: str) -> Tensor:
        """A trained parameter's fp32 weight (key "weight"), or a state of it, in its shape."""
        flat = self.trained[name]
        numel = prod(flat.shape)
        parts = []
        begin, end = flat.at, flat.at + numel
        if self.stage == 3:
            end = begin + -(-numel // self.ranks)
            parts = [cut(self.flats(rank, key), begin, end) for rank in range(self.ranks)]
        else:
            for rank in range(self.ranks):
                mine = self.flats(rank, key)[flat.group]
                parts.append(cut([mine], max(begin, 0), max(end, 0)))
                begin, end = begin - mine.numel(), end - mine.numel()
        whole = torch.cat(parts)[:numel]
        if whole.numel() != numel:
            raise CheckpointError(f"{self.path}: {key} of {name} has {whole.numel()} of {numel} elements")
        return whole.view(flat.shape)

    def flats(self, rank: int, key: str) -> list[Tensor]:
        """A rank's flat tensors, one a group (or sub-group, in stage 3); empty where one has no such state."""
        saved = self.optim[rank]
        if key == "weight":
            flats: list[Tensor] = saved["fp32_flat_groups" if self.stage == 3 else "single_partition_of_fp32_groups"]
            return flats
        states = self.base(rank)["state"]
        return [states.get(i, {}).get(key, torch.empty(0, device="cpu")) for i in range(max(states, default=-1) + 1)]

    def base(self, rank: int) -> dict[str, Any]:
        """What the optimizer inside DeepSpeed's said of itself."""
        base = self.optim[rank]["optimizer_state_dict" if self.stage == 3 else "base_optimizer_state"]
        if not isinstance(base, Mapping):
            raise CheckpointError(
                f"{self.path}: its optimizer state is that of an elastic checkpoint (DeepSpeed before 0.3.17); save it "
                "with a newer DeepSpeed first"
            )
        return dict(base)

    def states(self, name: str) -> dict[str, Any]:
        """A trained parameter's state by key: None for what is cut like the weight, or the value."""
        state = self.base(0)["state"].get(0 if self.stage == 3 else self.trained[name].group, {})
        return {k: None if isinstance(v, Tensor) and v.ndim else v for k, v in state.items()}

    def frozen(self) -> dict[str, Tensor]:
        """The weights that are not trained, whole."""
        module, buffers = self.model["module"], set(self.model["buffer_names"])
        if self.stage < 3:
            known = buffers | self.trained.keys() | self.model["shared_params"].keys()
            return {name: w for name, w in module.items() if name not in known and isinstance(w, Tensor)}
        shapes = self.model.get("frozen_param_shapes") or {}
        parts = [model["frozen_param_fragments"] or {} for model in self.models]
        return {
            name: torch.cat([part[name].reshape(-1) for part in parts])[: prod(shape)].view(tuple(shape))
            for name, shape in shapes.items()
        }


def loaded(path: Path, *keys: str) -> dict[str, Any]:
    """The dictionary in a file. CheckpointError if it holds something else, or one without these keys."""
    content = unpickle.load(path)
    has = content if isinstance(content, Mapping) else {}
    if missing := [key for key in keys if key not in has]:
        raise CheckpointError(
            f"{path}: has no {missing[0]}: not what DeepSpeed 0.19 writes under this name; bring back the file that "
            "was saved"
        )
    return dict(has)


def cut(flats: list[Tensor], begin: int, end: int) -> Tensor:
    """Elements [begin, end) of tensors laid end to end, as far as they go."""
    parts = []
    for flat in flats:
        if begin < flat.numel() and end > 0:
            parts.append(flat[max(begin, 0) : max(end, 0)])
        begin, end = begin - flat.numel(), end - flat.numel()
    return torch.cat(parts) if parts else torch.empty(0, device="cpu")


def hint(names: Iterable[str]) -> str:
    """What to do with a folder of these files, which is no checkpoint of stages 1 to 3."""
    if manifest.NAME in names:
        return "It is refimpl's own: load_checkpoint reads it as it is"
    if any(name.endswith("_model_states.pt") for name in names):
        return WEIGHTS
    if any(name.startswith("pytorch_model") for name in names):
        return "It has weights alone: torch.load(file, weights_only=True) reads them"
    return "Pass the folder of a checkpoint of stages 1 to 3"


def given(folder: Path) -> tuple[Path, str]:
    """The folder that holds DeepSpeed's files, and its tag: the path itself, or what `latest` in it names."""
    with naming(folder):
        if any(folder.glob("*_states.pt")):
            return folder, folder.name
        latest = folder / "latest"
        universal = (folder / "latest_universal").is_file() and not latest.is_file()
        if universal or (folder / "zero/optimizer_state.pt").is_file():
            raise CheckpointError(
                f"{folder}: made by DeepSpeed's ds_to_universal: import the checkpoint that it was made of; what is "
                "imported is loaded at any stage and number of ranks as it is"
            )
        if not latest.is_file():
            names = [path.name for path in folder.iterdir()]
            raise CheckpointError(f"{folder}: no *_optim_states.pt and no latest. {hint(names)}")
        tag = checked_tag(named_by(latest), str(latest))
    return folder / tag, tag
