"""Whole fp32 weights from a checkpoint of any stage, without the ranks that wrote it. DeepSpeed: utils/zero_to_fp32.py.

`model.safetensors` of a checkpoint has every weight whole, in the training dtype; after training in 16 bits the fp32
masters lie cut in the ranks' files and are put together here.
"""

import json
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from refimpl.engine.errors import CheckpointError
from refimpl.engine.resume import rank_file
from refimpl.engine.weights import unshared


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | Path, tag: str | None = None, exclude_frozen_parameters: bool = False, lazy_mode: bool = False
) -> dict[str, Tensor]:
    """The model's weights and buffers by name, fp32, on the CPU. `tag`: by default what the file `latest` says.

    CheckpointError names the file that is missing. NotImplementedError for `lazy_mode`.
    """
    if lazy_mode:
        raise NotImplementedError("zero_to_fp32: lazy_mode: not implemented; leave it out")
    folder = _folder(Path(checkpoint_dir), tag)
    about = json.loads((folder / "checkpoint.json").read_text())
    rounded = load_file(folder / "model.safetensors")
    files = [
        torch.load(folder / rank_file(r), map_location="cpu", weights_only=True) for r in range(about["world_size"])
    ]
    exact = dict(_masters(about["layout"], files))
    frozen = set(files[0]["untrained"])
    if exclude_frozen_parameters:
        rounded = {name: weight for name, weight in rounded.items() if name not in frozen}
    result = {}
    for name, weight in rounded.items():
        result[name] = weight.float() if weight.is_floating_point() else weight
        if name in exact:
            result[name] = exact[name]
        elif name not in frozen:  # tied: its master is saved under another of its names
            same = [n for n in exact if rounded[n].shape == weight.shape and torch.equal(rounded[n], weight)]
            result[name] = exact[same[0]] if same else result[name]
    return result


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | Path,
    output_dir: str | Path,
    max_shard_size: str | None = None,
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write the fp32 weights to `output_dir`: one file, pytorch_model.bin, or model.safetensors if asked for."""
    state = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag, exclude_frozen_parameters)
    folder = Path(output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    if safe_serialization:
        save_file(unshared(state), folder / "model.safetensors", metadata={"format": "pt"})
    else:
        torch.save(state, folder / "pytorch_model.bin")


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: str | Path, tag: str | None = None
) -> nn.Module:
    """Load the fp32 weights into `model`, which becomes an ordinary one on the CPU; returns it."""
    model = model.cpu()
    model.load_state_dict(get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag), strict=False)
    return model


def _folder(directory: Path, tag: str | None) -> Path:
    latest = directory / "latest"
    if tag is None and not latest.is_file():
        raise CheckpointError(f"{latest}: no such file; pass tag=..., or the folder that save_checkpoint was given")
    folder = directory / (latest.read_text().strip() if tag is None else tag)
    if not (folder / "checkpoint.json").is_file():
        raise CheckpointError(f"{folder / 'checkpoint.json'}: no such file; is this a checkpoint of refimpl?")
    return folder


def _masters(layout: list[list[str]], files: list[dict[str, Any]]) -> Iterator[tuple[str, Tensor]]:
    """Every trained parameter, fp32, under one of its names, cut out of the ranks' buffers laid end to end."""
    for index, bucket in enumerate(layout):
        parts = [file["stage"]["masters"][index] for file in files]
        # Stage 0 has all of it on every rank; the others' shards may be followed by padding.
        sizes = [(entry.rsplit(" [", 1)[0], json.loads("[" + entry.rsplit(" [", 1)[1])) for entry in bucket]
        whole = files[0]["stage"]["stage"] == "DDP"
        flat, at = (parts[0] if whole else torch.cat(parts)), 0
        for name, shape in sizes:
            yield name, flat[at : at + prod(shape)].view(shape).clone()
            at += prod(shape)
