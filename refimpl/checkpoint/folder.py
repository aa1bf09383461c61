"""One checkpoint, opened: any elements of any parameter, read from whichever ranks' files have them.

    checkpoint.json             the manifest; "parameters": where each one's elements lie, see place.py
    rank00000.safetensors       weight/NAME, exp_avg/NAME, ...: this rank's elements, flat, [n]; buffer/NAME: whole
    rank00000.json              what is no tensor; "state": what of a parameter's optimizer state is not cut

A weight is saved once, by one rank, in the widest precision there is (the fp32 master). Buffers are each rank's own.
"""

import json
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from refimpl.checkpoint import manifest
from refimpl.checkpoint.errors import CheckpointError, naming
from refimpl.checkpoint.place import Place, Portion
from refimpl.checkpoint.tensors import PIECE, Reader
from refimpl.checkpoint.tree import decode
from refimpl.ranks.flock import shared

OPEN = 64  # files of ranks at a time
REPLACED = "another save has taken its place, or somebody has moved it, while it was read; load it again"


def rank_file(rank: int) -> str:
    return f"rank{rank:05d}.safetensors"


def notes_file(rank: int) -> str:
    return f"rank{rank:05d}.json"


class Folder:
    """A checkpoint for reading; in a `with` block nobody prunes it.

    `about` is its manifest, `read_bytes` how much of the tensors has been read.
    """

    def __init__(self, path: Path, about: dict[str, Any]) -> None:
        with naming(path / manifest.NAME):  # a seal says that nobody has changed it, not who has written it
            self.path, self.about, self.ranks = path, about, int(about["world_size"])
            files, ranks = about["files"], range(min(self.ranks, len(about["files"])))
            if not ranks or set(files) != {of(rank) for rank in ranks for of in (rank_file, notes_file)}:
                raise CheckpointError(f"{path / manifest.NAME}: its files are not two of each of {self.ranks} ranks")
            self.places = {name: Place.of_json(place) for name, place in about["parameters"].items()}
            for place in self.places.values():
                place.refuse_odd(self.ranks)
        self._readers: dict[int, Reader] = {}
        self._notes: dict[int, dict[str, Any]] = {}
        self._closed_bytes = 0
        self._held: int | None = None
        self._last: tuple[Any, Tensor] = None, torch.empty(0, device="cpu")

    def reader(self, rank: int) -> Reader:
        """A rank's tensors. CheckpointError if the file is not there or not whole."""
        if rank not in self._readers:
            if len(self._readers) == OPEN:
                oldest = self._readers.pop(next(iter(self._readers)))
                self._closed_bytes += oldest.read_bytes
                oldest.close()
            path = self.path / rank_file(rank)
            with naming(path):
                self._readers[rank] = Reader(path)
            self._refuse_replaced()
        return self._readers[rank]

    def _refuse_replaced(self) -> None:
        """CheckpointError if the folder of this name is no longer the one that was opened: its files are of another."""
        with suppress(FileNotFoundError):
            if self._held is None or os.path.samestat(os.fstat(self._held), os.stat(self.path)):
                return
        raise CheckpointError(f"{self.path}: {REPLACED}")

    def with_buffer(self, name: str, rank: int = 0) -> Reader:
        """A rank's tensors, or those of the first that has this buffer: another pipeline stage's are not there."""
        ranks = self.about["buffers"][name].get("ranks", [rank])
        return self.reader(rank if rank in ranks else ranks[0])

    def notes(self, rank: int) -> dict[str, Any]:
        """A rank's JSON, as it is in the file. CheckpointError if it belongs to another save or rank."""
        if rank not in self._notes:
            path = self.path / notes_file(rank)
            with naming(path):
                notes = json.loads(path.read_bytes())
                self._refuse_replaced()
                if notes["save"] != {"id": self.about["id"], "rank": rank}:
                    raise CheckpointError(
                        f"{path}: belongs to another save or rank; bring back the file that was saved"
                    )
            self._notes[rank] = notes
        return self._notes[rank]

    def value(self, rank: int, name: str) -> Any:
        """What a rank's JSON has under `name`, with its tensors; None if it has nothing."""
        with naming(self.path / notes_file(rank)):
            return decode(self.notes(rank).get(name), self.reader(rank).tensor)

    def check(self, ranks: Iterable[int] | None = None) -> None:
        """CheckpointError names the files of these ranks (default: all) that are not what the save wrote, or says."""
        ranks = list(range(self.ranks) if ranks is None else ranks)
        names = [of(rank) for rank in ranks for of in (rank_file, notes_file)]
        try:
            manifest.check(self.path, self.about["files"], names)
        except CheckpointError as error:
            self._refuse_replaced()
            if manifest.read(self.path / manifest.NAME)["id"] != self.about["id"]:  # before it was opened
                raise CheckpointError(f"{self.path}: {REPLACED}") from error
            raise
        for rank in ranks:
            self._check_contents(rank)

    def _check_contents(self, rank: int) -> None:
        """CheckpointError if a rank's files do not hold what the manifest says, or what nobody could go on with."""
        reader = self.reader(rank)
        with naming(reader.path):
            for name, whole in self.places.items():
                first = self.first(name)
                if first == rank:
                    self.state(name, lambda dtype: None)
                states = self.notes(first)["state"].get(name, {})
                keys = ["weight", *(key for key, value in states.items() if value == "cut")]
                for place in whole.parts or (whole,):
                    files = self.files(place)
                    begin, end = place.held(files.index(rank), len(files)) if rank in files else (0, 0)
                    for key in keys if begin < end else ():
                        expect(reader, f"{key}/{name}", [end - begin])
                    if begin < end and reader.entry(f"weight/{name}")[0].is_floating_point != place.is_floating:
                        raise CheckpointError(f"{reader.path}: weight/{name} is no {place.dtype}")
            for name, buffer in self.about["buffers"].items():
                if rank in buffer.get("ranks", range(self.ranks)):
                    expect(reader, f"buffer/{name}", buffer["shape"])

    # Parameters.

    def canonical(self, name: str) -> str:
        """The name under which a parameter is saved, of all that it is known by."""
        return str(self.about["tied"].get(name, name))

    def first(self, name: str) -> int:
        """The rank whose file has what is not cut."""
        place = self.places[name].parts[0] if self.places[name].parts else self.places[name]
        return self.files(place)[place.first(len(self.files(place)))]

    def files(self, place: Place) -> Sequence[int]:
        """The ranks whose files a place is in."""
        return place.ranks or range(self.ranks)

    def entry(self, key: str, name: str) -> torch.dtype:
        """The dtype in which a parameter's "weight", or a state of it, is saved."""
        name = self.canonical(name)
        rank = self.first(name)
        with naming(self.path / rank_file(rank)):
            return self.reader(rank).entry(f"{key}/{name}")[0]

    def fill(self, key: str, name: str, begin: int, out: Tensor, portion: Portion | None = None) -> None:
        """Elements from `begin` on of a parameter's "weight", or of its state `key`, into out [n], in out's dtype.

        portion: they are those of this part of it.
        """
        name = self.canonical(name)
        place = self.places[name]
        if portion is not None:
            found = next((part for part in place.parts if portion.is_of(part)), None)
        else:
            found = None if place.parts else place
        if found is not None:
            self._fill(key, name, found, begin, out)
        else:
            flat = self._joined(key, name, portion).view(-1)
            out.copy_(flat[begin : begin + out.numel()])

    def _fill(self, key: str, name: str, place: Place, begin: int, out: Tensor) -> None:
        files = self.files(place)
        for index, first, last in place.pieces(begin, begin + out.numel(), len(files)):
            held = place.held(index, len(files))[0]
            with naming(self.path / rank_file(files[index])):
                read_into(self.reader(files[index]), f"{key}/{name}", first - held, out[first - begin : last - begin])

    def _joined(self, key: str, name: str, portion: Portion | None) -> Tensor:
        """A parameter put together from its parts, or another part of it: one at a time is kept."""
        if self._last[0] != (key, name, portion):
            whole = torch.empty(self.places[name].shape, dtype=self.entry(key, name), device="cpu")
            for part in self.places[name].parts:
                if part.dim is None:
                    raise CheckpointError(
                        f"{self.path}: {name} was split over ranks by the model itself: load it with as many of them"
                    )
                flat = torch.empty(part.numel, dtype=whole.dtype, device="cpu")
                self._fill(key, name, part, 0, flat)
                lengths = [end - start for start, end in part.spans]
                pieces = flat.view(part.shape).split(lengths, part.dim)  # type: ignore[no-untyped-call]
                for (start, end), piece in zip(part.spans, pieces, strict=True):
                    whole.narrow(part.dim, start, end - start).copy_(piece)
            if not self.places[name].parts:
                self._fill(key, name, self.places[name], 0, whole.view(-1))
            self._last = (key, name, portion), whole if portion is None else portion.of(whole)
        return self._last[1]

    def state(self, name: str, cut: Callable[[torch.dtype], Any]) -> dict[str, Any]:
        """A parameter's optimizer state by key: `cut(dtype)` for what `fill` reads, or the value itself."""
        name = self.canonical(name)
        rank = self.first(name)
        saved = self.notes(rank)["state"].get(name, {})
        tensor = self.reader(rank).tensor
        return {
            key: cut(self.entry(key, name)) if value == "cut" else decode(value[0], tensor)
            for key, value in saved.items()
        }

    @property
    def read_bytes(self) -> int:
        return self._closed_bytes + sum(reader.read_bytes for reader in self._readers.values())

    def __enter__(self) -> "Folder":
        with suppress(OSError):  # of a folder that has just gone `check` tells, to all ranks
            self._held = shared(self.path)
        return self

    def __exit__(self, *_: object) -> None:
        for reader in self._readers.values():
            reader.close()
        self._readers.clear()
        if self._held is not None:
            os.close(self._held)
            self._held = None


def expect(reader: Reader, name: str, shape: list[int]) -> None:
    """CheckpointError if a tensor has another shape than the manifest says."""
    if list(reader.entry(name)[1]) != shape:
        raise CheckpointError(f"{reader.path}: {name} is {list(reader.entry(name)[1])}, the manifest says {shape}")


def read_into(reader: Reader, name: str, begin: int, out: Tensor) -> None:
    """Elements of a tensor into out [n]; straight into its memory where that has the saved dtype."""
    dtype = reader.entry(name)[0]
    if out.dtype == dtype and out.device.type == "cpu" and out.is_contiguous():
        reader.read(name, begin, out)
        return
    room = torch.empty(min(PIECE, out.numel()), dtype=dtype, device="cpu")
    for at in range(0, out.numel(), PIECE):
        piece = room[: min(PIECE, out.numel() - at)]
        reader.read(name, begin + at, piece)
        out[at : at + piece.numel()].copy_(piece)
