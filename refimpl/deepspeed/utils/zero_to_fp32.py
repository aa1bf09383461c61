"""Whole fp32 weights from a checkpoint of any stage, without the ranks that wrote it. DeepSpeed: utils/zero_to_fp32.py.

    python -m refimpl.deepspeed.utils.zero_to_fp32 CHECKPOINT_DIR OUTPUT_DIR [--safe_serialization] [-t TAG] ...

The work is done by refimpl/checkpoint/export.py, piece by piece; `get_fp32_state_dict_from_zero_checkpoint` alone has
all weights in memory, which is what it returns. lazy_mode leaves them on the disk, as in DeepSpeed.
"""

import argparse
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from refimpl.checkpoint import export, find
from refimpl.checkpoint.errors import CheckpointError, naming
from refimpl.checkpoint.folder import Folder
from refimpl.checkpoint.tensors import Entry
from refimpl.deepspeed.absent import absent
from refimpl.engine.configuration.values import DTYPES

get_model_state_file, get_model_state_files, get_optim_files = (
    absent(
        f"deepspeed.utils.zero_to_fp32.{name}",
        "a checkpoint has no pickles; take the weights by get_fp32_state_dict_from_zero_checkpoint(folder), and the "
        "client_state as engine.load_checkpoint returns it",
    )
    for name in ("get_model_state_file", "get_model_state_files", "get_optim_files")
)


class LazyWeight:
    """A weight that is on the disk: `contiguous()` reads it, each time anew."""

    def __init__(self, folder: Folder, name: str, entry: Entry) -> None:
        self._folder, self._name, self._entry = folder, name, entry
        self.dtype, self.shape = entry[0], torch.Size(entry[1])

    def contiguous(self) -> Tensor:
        """The weight, in memory of its own."""
        with self._folder:  # closed again: there may be thousands of these
            return export.whole(self._folder, self._name, self._entry)


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | Path, tag: str | None = None, exclude_frozen_parameters: bool = False, lazy_mode: bool = False
) -> dict[str, Any]:
    """The model's weights and buffers by name, fp32, on the CPU. `tag`: by default what the file `latest` says.

    lazy_mode: each value is read when its `contiguous()` is called. CheckpointError names the file that is missing or
    damaged.
    """
    folder = opened(checkpoint_dir, tag)
    if lazy_mode:
        with folder:
            found = export.entries(folder, torch.float32, exclude_frozen_parameters)
        return {name: LazyWeight(folder, name, entry) for name, entry in found.items()}
    with folder:
        return dict(export.weights(folder, torch.float32, exclude_frozen_parameters))


def opened(checkpoint_dir: str | Path, tag: str | None) -> Folder:
    """The checkpoint, its files checked."""
    found = find.given(Path(checkpoint_dir)) if tag is None else find.find(Path(checkpoint_dir), tag)
    assert found is not None, "a tag that is not there is an error"
    with Folder(*found) as folder:
        folder.check()
    return folder


def convert_zero_checkpoint_to_state_dict(
    checkpoint_dir: str | Path,
    output_dir: str | Path,
    dtype: str | torch.dtype = "fp32",
    max_shard_size: str | int | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write the weights to `output_dir`: pytorch_model.bin, or model.safetensors with `safe_serialization`.

    What is larger than `max_shard_size` (None: nothing is) is written as several files with an index. As pickles they
    take the memory of one file at a time, and replace those that were there; as safetensors a few MB. dtype: of what is
    floating, "fp32", "bf16", "fp16" or torch's own; ValueError for another.
    """
    floats = named(dtype)
    most = export.size_of(max_shard_size) if max_shard_size is not None else 1 << 62
    out = Path(output_dir)
    with opened(checkpoint_dir, tag) as folder:
        if safe_serialization:
            export.export(folder, out, floats, most, exclude_frozen_parameters)
        else:
            shards = export.in_shards(export.entries(folder, floats, exclude_frozen_parameters), most)
            with naming(out):
                out.mkdir(parents=True, exist_ok=True)
            export.write_set(out, shards, "pytorch_model", ".bin", partial(write_pickle, folder))


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | Path,
    output_dir: str | Path,
    max_shard_size: str | int | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """The same in fp32."""
    convert_zero_checkpoint_to_state_dict(
        checkpoint_dir, output_dir, "fp32", max_shard_size, safe_serialization, tag, exclude_frozen_parameters
    )


def named(dtype: str | torch.dtype) -> torch.dtype:
    """The dtype that a name means, DeepSpeed's or torch's."""
    found = DTYPES.get(str(dtype).removeprefix("torch."))
    if found is None:
        raise ValueError(f"dtype is {dtype!r}: weights are written as fp32, bf16 or fp16")
    return found


def write_pickle(folder: Folder, path: Path, shard: Mapping[str, Entry]) -> None:
    made = {folder.canonical(name): export.whole(folder, name, entry) for name, entry in shard.items()}
    with path.open("wb") as file:  # ours, because torch's own does not tell that the disk is full
        torch.save({name: made[folder.canonical(name)] for name in shard}, file)  # tied ones stay one tensor


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: str | Path, tag: str | None = None
) -> nn.Module:
    """Load the fp32 weights into `model`, which becomes an ordinary one on the CPU; returns it."""
    model = model.cpu()
    model.load_state_dict(get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag), strict=False)
    return model


def arguments_of(program: str, what: str) -> argparse.ArgumentParser:
    """DeepSpeed's arguments, which `zero_to_torch` has too."""
    parser = argparse.ArgumentParser(program, description=what)
    parser.add_argument("checkpoint_dir", help="the folder given to save_checkpoint, or a checkpoint in it")
    parser.add_argument("output_dir", help="folder for the weights")
    parser.add_argument("--max_shard_size", default="5GB", help="bytes a file, such as 5GB")
    parser.add_argument("--safe_serialization", action="store_true", help="safetensors instead of pickles")
    parser.add_argument("-t", "--tag", help="which checkpoint; by default what the file latest names")
    parser.add_argument("--exclude_frozen_parameters", action="store_true", help="trained weights alone")
    parser.add_argument("-d", "--debug", action="store_true", help="has no effect")
    return parser


def converted(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> None:
    """Do what the arguments say. Status 1 and one line for what cannot be read or written."""
    options = vars(parser.parse_args(arguments))
    options.pop("debug")
    try:
        convert_zero_checkpoint_to_state_dict(**options)
    except (CheckpointError, ValueError) as reason:
        raise SystemExit(f"{parser.prog}: {reason}") from None


def main(arguments: Sequence[str] | None = None) -> None:
    """The command, with DeepSpeed's arguments."""
    converted(arguments_of("zero_to_fp32", "Whole fp32 weights out of a checkpoint."), arguments)


if __name__ == "__main__":
    main()
