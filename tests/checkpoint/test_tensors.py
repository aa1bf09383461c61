"""Our safetensors files are the library's and the other way round; pieces are what whole reads give."""

import json
import os
from pathlib import Path

import pytest
import safetensors.torch
import torch

from refimpl.checkpoint import folder
from refimpl.checkpoint.errors import CheckpointError
from refimpl.checkpoint.manifest import digest
from refimpl.checkpoint.tensors import NAMES, Reader, Writer, entry, write

TENSORS = {
    **{str(dtype): torch.arange(7).to(dtype) for dtype in NAMES},
    "scalar": torch.tensor(2.5),
    "empty": torch.zeros(0, 3),
    "strided": torch.arange(12.0).view(3, 4).t(),
    "every second": torch.arange(9.0)[::2],
    "conjugate": torch.tensor([1 + 2j, 3 - 4j]).conj(),  # two that are lazy: their memory has the other sign
    "negative": torch._neg_view(torch.arange(3.0)),
    "names may hold / and ü": torch.ones(1, 1, 1, dtype=torch.bfloat16),
}


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    raw = [t.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*raw)


def test_the_library_reads_what_we_write(tmp_path: Path) -> None:
    assert write(tmp_path / "f", TENSORS) == digest(tmp_path / "f")
    loaded = safetensors.torch.load_file(tmp_path / "f")
    assert loaded.keys() == TENSORS.keys()
    assert all(equal(loaded[name], tensor) for name, tensor in TENSORS.items())
    with Reader(tmp_path / "f") as file:
        for name, about in file._header.items():
            assert (file._begin + about["data_offsets"][0]) % TENSORS[name].itemsize == 0, "aligned, to be mapped"


def test_we_read_what_the_library_writes(tmp_path: Path) -> None:
    given = {name: t.resolve_conj().resolve_neg().contiguous() for name, t in TENSORS.items()}
    safetensors.torch.save_file(given, tmp_path / "f", {"a": "b"})
    with Reader(tmp_path / "f") as file:
        assert file._header.keys() == TENSORS.keys()
        assert all(equal(file.tensor(name), tensor) for name, tensor in TENSORS.items())


def test_a_header_may_name_its_tensors_in_any_order(tmp_path: Path) -> None:
    write(tmp_path / "f", {"w": torch.ones(3), "v": torch.zeros(2)})
    raw = (tmp_path / "f").read_bytes()
    begin = 8 + int.from_bytes(raw[:8], "little")
    text = json.dumps(dict(reversed(json.loads(raw[8:begin]).items()))).encode()
    (tmp_path / "f").write_bytes(len(text).to_bytes(8, "little") + text + raw[begin:])
    with Reader(tmp_path / "f") as file:
        assert equal(file.tensor("w"), torch.ones(3))
        assert equal(file.tensor("v"), torch.zeros(2))


def test_a_piece_reads_its_own_bytes_alone(tmp_path: Path) -> None:
    whole = torch.randn(1000)
    with Writer(tmp_path / "f", {"w": entry(whole), "v": entry(whole)}) as file:
        for name in file.names:
            for piece in torch.split(whole if name == "w" else -whole, 333):
                file.put(piece)
    out = torch.full((2000,), 7.0)
    with Reader(tmp_path / "f") as file:
        file.read("w", 10, out[5:25])
        assert file.read_bytes == 20 * 4
        with pytest.raises(CheckpointError, match="f: w ends before element 1010"):
            file.read("w", 990, torch.empty(20))
    assert torch.equal(out[5:25], whole[10:30])
    assert out[:5].eq(7).all()
    assert out[25:].eq(7).all()


def test_another_dtype_is_read_by_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder, "PIECE", 3)
    write(tmp_path / "f", {"w": torch.arange(20.0)})
    out = torch.empty(11, dtype=torch.bfloat16)
    with Reader(tmp_path / "f") as file:
        folder.read_into(file, "w", 5, out)
    assert out.tolist() == list(range(5, 16))


def test_what_was_announced_must_be_put(tmp_path: Path) -> None:
    with (
        pytest.raises(ValueError, match="8 bytes were announced"),
        Writer(tmp_path / "f", {"w": (torch.float32, (2,))}),
    ):
        pass


@pytest.mark.parametrize("keep", [0, 7, 8, 20, -1])
def test_a_file_cut_short_is_named(keep: int, tmp_path: Path) -> None:
    write(tmp_path / "f", {"w": torch.ones(9)})
    (tmp_path / "f").write_bytes((tmp_path / "f").read_bytes()[:keep])
    with pytest.raises(CheckpointError, match="f: "):
        Reader(tmp_path / "f")


def test_a_file_cut_short_while_it_is_read_is_named(tmp_path: Path) -> None:
    write(tmp_path / "f", {"w": torch.ones(9)})
    with Reader(tmp_path / "f") as file:
        os.truncate(tmp_path / "f", (tmp_path / "f").stat().st_size - 4)
        with pytest.raises(CheckpointError, match="f: ends inside w; bring back"):
            file.tensor("w")


def test_a_header_that_lies_is_refused(tmp_path: Path) -> None:
    for text in (
        b"[]",
        b"{",
        b'{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}',
        b'{"w":{"dtype":"P","shape":[]}}',
        b'{"v":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"w":{"dtype":"U8","shape":[3],"data_offsets":[1,4]}}',
    ):
        (tmp_path / "f").write_bytes(len(text).to_bytes(8, "little") + text + b"1234")
        with pytest.raises(CheckpointError, match="f: "):
            Reader(tmp_path / "f")
