"""Whole weights out of a checkpoint, without ranks, piece by piece: a few MB of memory for a model of any size.

    out/model.safetensors                       if all of it fits into one file, else
    out/model-00001-of-00003.safetensors ...    files of at most `most` bytes (or one larger tensor)
    out/model.safetensors.index.json            which name is in which file, as Hugging Face's libraries lay it out

They hold what `model.state_dict()` names, a tied weight under each of its names: torch's own `load_state_dict` takes
them. fp32 is what the masters hold; the model's own dtype is what they were rounded to. DeepSpeed: zero_to_fp32.py,
which maps the ranks' files and has one file's tensors in memory at a time.
"""

import json
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from refimpl.checkpoint import atomic, manifest
from refimpl.checkpoint.errors import CheckpointError, naming
from refimpl.checkpoint.folder import Folder
from refimpl.checkpoint.place import dtype_named
from refimpl.checkpoint.tensors import PIECE, Entry, Writer

Fill = Callable[[Path], object]  # writes a file


def entries(folder: Folder, dtype: torch.dtype | None, exclude_frozen: bool = False) -> dict[str, Entry]:
    """Dtype and shape of every weight and buffer by name, in the model's order. dtype: of floats; None: the model's."""
    result: dict[str, Entry] = {}
    for name in folder.about["order"]:
        known = folder.canonical(name)
        if known in folder.places:
            place = folder.places[known]
            if exclude_frozen and not place.trained:
                continue
            own, shape = dtype_named(place.dtype), place.shape
        elif known in folder.about["buffers"]:
            own, shape = folder.with_buffer(known).entry(f"buffer/{known}")
        else:
            continue  # left out by the save, or what a module keeps beside its tensors
        result[name] = (dtype if dtype is not None and own.is_floating_point else own), shape
    return result


def pieces(folder: Folder, name: str, entry: Entry) -> Iterator[Tensor]:
    """The elements of one of `entries`, in order, flat: a few MB at a time."""
    dtype = entry[0]
    known = folder.canonical(name)
    if known not in folder.places:
        yield folder.with_buffer(known).tensor(f"buffer/{known}").reshape(-1).to(dtype)
        return
    numel = folder.places[known].numel
    for begin in range(0, numel, PIECE):
        out = torch.empty(min(PIECE, numel - begin), dtype=dtype, device="cpu")
        folder.fill("weight", known, begin, out)
        yield out


def weights(folder: Folder, dtype: torch.dtype | None, exclude_frozen: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Every weight and buffer by name, whole; a tied one is the same tensor under each name."""
    made: dict[str, Tensor] = {}
    for name, entry in entries(folder, dtype, exclude_frozen).items():
        known = folder.canonical(name)
        if known not in made:
            made[known] = whole(folder, name, entry)
        yield name, made[known]


def whole(folder: Folder, name: str, entry: Entry) -> Tensor:
    """One of `entries`, in one tensor."""
    dtype, shape = entry
    made = torch.empty(shape, dtype=dtype, device="cpu")
    at = 0
    for piece in pieces(folder, name, entry):
        made.view(-1)[at : at + piece.numel()].copy_(piece)
        at += piece.numel()
    return made


def in_shards(entries: dict[str, Entry], most: int) -> list[dict[str, Entry]]:
    """The entries in order, in files of at most `most` bytes; a larger tensor has a file of its own."""
    shards: list[dict[str, Entry]] = [{}]
    size = 0
    for name, (dtype, shape) in entries.items():
        mine = torch.Size(shape).numel() * dtype.itemsize
        if shards[-1] and size + mine > most:
            shards.append({})
            size = 0
        shards[-1][name] = (dtype, shape)
        size += mine
    return shards


def shard_names(count: int, stem: str = "model", suffix: str = ".safetensors") -> list[str]:
    if count == 1:
        return [stem + suffix]
    return [f"{stem}-{i:05d}-of-{count:05d}{suffix}" for i in range(1, count + 1)]


def export(
    folder: Folder, out: Path, dtype: torch.dtype | None, most: int = 5 * 10**9, exclude_frozen: bool = False
) -> list[Path]:
    """Write the weights to the folder `out`; the files. What a killed export has left there is cleared first.

    CheckpointError if there are weights in it already, or if not all can be written: then none of them stay.
    """
    with naming(out):
        out.mkdir(parents=True, exist_ok=True)
        if manifest.is_in(out):
            raise CheckpointError(f"{out}: is a checkpoint, whose files come and go with it; choose another folder")
        there = sorted(path.name for path in out.glob("model*.safetensors*"))
        if there and not cut_short(out, "model.safetensors"):
            raise CheckpointError(f"{out}: has {there[0]} already; move it away, or choose another folder")
    shards = in_shards(entries(folder, dtype, exclude_frozen), most)
    return write_set(out, shards, "model", ".safetensors", partial(write_shard, folder))


def cut_short(out: Path, first: str) -> bool:
    """Whether what is in `out` was left by an export that was killed: its index, named last, has no name yet."""
    with atomic.alone(out) as nobody_exports:
        return bool(nobody_exports and any(out.glob(f".{first}.index.json.refimpl-*")))


def write_set(
    out: Path, shards: list[dict[str, Entry]], stem: str, suffix: str, write: Callable[[Path, dict[str, Entry]], object]
) -> list[Path]:
    """write(path, shard) a file, and the index if they are several; the files.

    None has its name before all are on the disk, and the set that was there goes just before: files of two checkpoints
    under one index would look whole. What a killed one has left is cleared first.
    """
    files = dict(zip(shard_names(len(shards), stem, suffix), shards, strict=True))
    index = f"{stem}{suffix}.index.json"
    fills: dict[str, Fill] = {n: lambda part, shard=shard: write(part, shard) for n, shard in files.items()}  # type: ignore[misc]
    if len(shards) > 1:
        fills[index] = lambda part: part.write_text(json.dumps(index_of(files), indent=2))
    of_set = re.compile(rf"{stem}(-\d{{5}}-of-\d{{5}})?{re.escape(suffix)}")
    with naming(out), atomic.hold(out, manifest.NAME, manifest.ours):
        there = [path for path in out.iterdir() if path.name == index or of_set.fullmatch(path.name)]
        stale = sorted(there, key=lambda path: path.name != index)
        atomic.write_files({out / name: named(out / name, fill) for name, fill in fills.items()}, stale)
    return [out / name for name in files]


def named(path: Path, fill: Fill) -> Fill:
    """`fill`, whose errors are about `path`."""

    def do(part: Path) -> None:
        with naming(path):
            fill(part)

    return do


def write_shard(folder: Folder, path: Path, shard: dict[str, Entry]) -> None:
    with Writer(path, shard, {"format": "pt"}) as file:
        for name in file.names:
            for piece in pieces(folder, name, shard[name]):
                file.put(piece)


def index_of(files: dict[str, dict[str, Entry]]) -> dict[str, Any]:
    """Which file has which name."""
    total = sum(torch.Size(s).numel() * d.itemsize for shard in files.values() for d, s in shard.values())
    weight_map = {name: file for file, shard in files.items() for name in shard}
    return {"metadata": {"total_size": total}, "weight_map": weight_map}


def size_of(text: str | int, least: int = 1) -> int:
    """ "5GB" -> 5_000_000_000 bytes; "500 mb", "1.5GiB", "3k" or a number. ValueError for what is no size."""
    found = re.fullmatch(r"([\d.]+(?:e\+?\d+)?)\s*([kmgt]?)(i?)b?", str(text).strip().lower())
    try:
        size = float(found[1]) * (1024 if found[3] else 1000) ** " kmgt".index(found[2] or " ") if found else -1
        if size >= least:
            return int(size)
    except (ValueError, OverflowError):
        pass
    raise ValueError(f"{text!r} is not a size such as 5GB or 500MB")
