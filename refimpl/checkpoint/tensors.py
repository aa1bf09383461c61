"""safetensors files written and read in pieces, so that no tensor need ever be whole in memory.

    8 bytes         n, the length of the header, little-endian
    n bytes         JSON: name -> {"dtype", "shape", "data_offsets": [begin, end)}, and blanks up to a multiple of 8
    the rest        the tensors' bytes, row by row, without gaps

Nothing in it is a program: reading one can give wrong numbers, but cannot run anything. The library `safetensors` reads
these files too; it maps a file whole, or wants every tensor at once, where a piece is enough here. Tensors are laid
down by the size of their elements, the largest first, so that each begins where its dtype may begin.
Format: the safetensors project's README.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from refimpl.checkpoint.errors import CheckpointError, naming

NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8",
    torch.bool: "BOOL", torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
DTYPES = {name: dtype for dtype, name in NAMES.items()}
PIECE = 1 << 18  # elements moved at a time: 1 MB stays in cache between its reading, summing and writing
LONGEST_HEADER = 100 << 20  # bytes; the library refuses more too

Entry = tuple[torch.dtype, tuple[int, ...]]


@dataclass(frozen=True)
class Later:
    """Stands for a tensor that rests elsewhere, and is brought when its turn comes."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    bring: Callable[[], Tensor]


def entry(tensor: Tensor | Later) -> Entry:
    return tensor.dtype, tuple(tensor.shape)


def brought(tensor: Tensor | Later) -> Tensor:
    return tensor.bring() if isinstance(tensor, Later) else tensor


class Writer:
    """A new file of the tensors `entries`, whose values come by `put`, in the order of `names`, in pieces of any size.

    `digest` is the file's size and checksum, known when it is closed: nothing is read back.
    """

    def __init__(self, path: Path, entries: Mapping[str, Entry], metadata: Mapping[str, str] | None = None) -> None:
        self.names = sorted(entries, key=lambda name: -entries[name][0].itemsize)
        header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
        end = 0
        for name in self.names:
            dtype, shape = entries[name]
            begin, end = end, end + prod(shape) * dtype.itemsize
            header[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self.left = end
        self._checksum, self._bytes = hashlib.sha256(), 0
        self._file = path.open("xb")
        self._write(len(text).to_bytes(8, "little") + text)

    def put(self, tensor: Tensor) -> None:
        """The next elements."""
        for piece in torch.split(tensor.detach().reshape(-1), PIECE):
            self._write(bytes_of(piece.cpu().contiguous().resolve_conj().resolve_neg()))
            self.left -= piece.numel() * piece.element_size()

    def _write(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        self._checksum.update(data)
        self._bytes += len(data)

    @property
    def digest(self) -> dict[str, Any]:
        return {"bytes": self._bytes, "sha256": self._checksum.hexdigest()}

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._file.close()
        if kind is None and self.left:
            raise ValueError(f"{self._file.name}: {self.left} bytes were announced and never put")


def write(
    path: Path, tensors: Mapping[str, Tensor | Later], metadata: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """A new file with these tensors; its size and checksum."""
    with Writer(path, {name: entry(t) for name, t in tensors.items()}, metadata) as file:
        for name in file.names:
            file.put(brought(tensors[name]))
    return file.digest


class Reader:
    """A file whose tensors are read piece by piece into memory that is there. `read_bytes` counts what was read."""

    def __init__(self, path: Path) -> None:
        """CheckpointError for what is no safetensors file."""
        self.path, self.read_bytes = path, 0
        self._file: BinaryIO = path.open("rb", buffering=0)
        try:
            self._header, self._begin = header_of(path, self._file)
        except BaseException:
            self._file.close()
            raise

    def entry(self, name: str) -> Entry:
        """Dtype and shape. KeyError for a name that is not in the file."""
        about = self._header[name]
        return DTYPES[about["dtype"]], tuple(about["shape"])

    def read(self, name: str, begin: int, out: Tensor) -> None:
        """Elements from `begin` on, counted row by row, into out: contiguous, on the CPU, of the saved dtype."""
        first, last = self._header[name]["data_offsets"]
        at = first + begin * out.element_size()
        if at + out.nbytes > last:
            raise CheckpointError(f"{self.path}: {name} ends before element {begin + out.numel()}")
        view = bytes_of(out.view(-1))
        with naming(self.path):
            self._file.seek(self._begin + at)
            while len(view):
                count = self._file.readinto(view)  # type: ignore[attr-defined]
                if not count:
                    raise CheckpointError(f"{self.path}: ends inside {name}; bring back the file that was saved")
                view, self.read_bytes = view[count:], self.read_bytes + count

    def tensor(self, name: str) -> Tensor:
        """One tensor, whole."""
        dtype, shape = self.entry(name)
        out = torch.empty(shape, dtype=dtype, device="cpu")
        self.read(name, 0, out)
        return out

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> "Reader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def bytes_of(flat: Tensor) -> memoryview:
    """The memory of flat [n], on the CPU: to be read, and written."""
    array: Any = flat.view(torch.uint8).numpy()
    return memoryview(array)


def header_of(path: Path, file: BinaryIO) -> tuple[dict[str, Any], int]:
    """The header's entries, and where the data begins; CheckpointError for what is no safetensors file."""
    size = path.stat().st_size
    length = int.from_bytes(file.read(8), "little")
    if size < 8 or not 2 <= length <= min(size - 8, LONGEST_HEADER):
        raise CheckpointError(f"{path}: no safetensors file, or cut short; bring back the file that was saved")
    try:
        header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        spans = [(0, 0)]
        for name, about in header.items():
            begin, end = about["data_offsets"]
            if any(type(n) is not int or n < 0 for n in (begin, end, *about["shape"])):
                raise ValueError(f"{name} has a number that is none")
            if end - begin != prod(about["shape"]) * DTYPES[about["dtype"]].itemsize:
                raise ValueError(f"the size of {name}")
            spans.append((begin, end))
        spans.sort()
        if any(before[1] != after[0] for before, after in pairwise(spans)):
            raise ValueError("the tensors overlap, or leave gaps")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path}: its header is damaged ({error}); bring back the file that was saved") from error
    if (said := 8 + length + spans[-1][1]) != size:
        raise CheckpointError(f"{path}: {size} bytes, its header says {said}; it was cut short")
    return header, 8 + length
