"""Whole weights out of a folder alone: exact, in files that torch and the library load, with a few pieces of memory."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import worlds
from anywhere import Late, begin
from safetensors.torch import load_file
from torch import Tensor
from training import Net

from refimpl.checkpoint import atomic, export, folder, tensors
from refimpl.checkpoint.errors import CheckpointError
from refimpl.checkpoint.find import given
from refimpl.checkpoint.folder import Folder
from refimpl.measure.memory import MemoryMeter


def everything(out: Path) -> dict[str, Tensor]:
    """As Hugging Face's libraries read it: by the index, if there is one."""
    index = out / "model.safetensors.index.json"
    if not index.exists():
        return load_file(out / "model.safetensors")
    where = json.loads(index.read_text())["weight_map"]
    loaded = {file: load_file(out / file) for file in set(where.values())}
    assert sum(map(len, loaded.values())) == len(where)
    return {name: loaded[file][name] for name, file in where.items()}


def test_a_clean_up_that_fails_too_hides_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a disk that is mounted read-only, where a file that is not there cannot be deleted either."""
    worlds.run(begin, 1, 700, "fp32", tmp_path / "ck", ranks=1)

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with Folder(*given(tmp_path / "ck")) as opened, monkeypatch.context() as patch:
        patch.setattr(export, "write_shard", refuse)
        patch.setattr(Path, "unlink", refuse)
        with pytest.raises(CheckpointError, match=r"out/model.safetensors: Read-only file system; .* save elsewhere"):
            export.export(opened, tmp_path / "out", torch.float32)


@pytest.mark.parametrize(
    ("stage", "section", "most"),
    [(1, "fp32", "2KB"), (2, "bf16", "5GB"), (3, "fp32", "5GB"), (3, "bf16", "2KB")],
)
def test_every_weight_and_its_masters(stage: int, section: str, most: str, tmp_path: Path) -> None:
    parts = worlds.run(begin, stage, 700, section, tmp_path / "ck", ranks=3)
    model = Late()
    with Folder(*given(tmp_path / "ck")) as opened:
        files = export.export(opened, tmp_path / "fp32", torch.float32, export.size_of(most))
        export.export(opened, tmp_path / "model", None, export.size_of(most))
    exact, rounded = everything(tmp_path / "fp32"), everything(tmp_path / "model")
    assert list(exact.keys() ^ model.state_dict().keys()) == []
    for name, p in model.named_parameters():
        saved = torch.cat([part[name] for part in parts if name in part]).view(p.shape)
        assert torch.equal(exact[name], saved.float())
        assert rounded[name].dtype == (torch.bfloat16 if section == "bf16" else torch.float32)
        assert torch.equal(rounded[name], saved.to(rounded[name].dtype))
    model.load_state_dict(exact)
    assert torch.equal(model.head.weight, exact["embed.weight"])
    sizes = [path.stat().st_size for path in files]
    largest = 4 * max(p.numel() for p in model.parameters())
    assert (len(sizes) > 1) == (most == "2KB")
    assert most == "5GB" or max(sizes) < max(2000, largest) + 2000, "the header comes on top"


def test_the_index_is_hugging_faces(tmp_path: Path) -> None:
    worlds.run(begin, 1, 700, "fp32", tmp_path / "ck", ranks=2)
    with Folder(*given(tmp_path / "ck")) as opened:
        export.export(opened, tmp_path / "out", torch.float32, 3000)
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    files = sorted(path.name for path in (tmp_path / "out").glob("model-*"))
    n = len(files)
    assert files == [f"model-{i:05d}-of-{n:05d}.safetensors" for i in range(1, n + 1)]
    assert index["metadata"]["total_size"] == sum(w.nbytes for w in everything(tmp_path / "out").values())
    assert set(index["weight_map"]) == set(Net().state_dict())


def test_memory_is_a_few_pieces_whatever_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worlds.run(begin, 3, 700, "bf16", tmp_path / "ck", ranks=2)
    for module in (export, folder, tensors):
        monkeypatch.setattr(module, "PIECE", 64)
    monkeypatch.setattr(folder, "OPEN", 1)
    meter = MemoryMeter(dict)
    with Folder(*given(tmp_path / "ck")) as opened, meter:
        export.export(opened, tmp_path / "out", torch.float32)
        assert len(opened._readers) == 1, "of two ranks' files one at a time"
        assert opened.read_bytes > sum(reader.read_bytes for reader in opened._readers.values())
    assert meter.peak["other"] + meter.peak["activations"] <= 4 * 64 * 4
    assert len(everything(tmp_path / "out")) == len(Net().state_dict())


def test_weights_that_are_there_are_not_replaced(tmp_path: Path) -> None:
    worlds.run(begin, 0, 700, "fp32", tmp_path / "ck", ranks=1)
    with Folder(*given(tmp_path / "ck")) as opened:
        export.export(opened, tmp_path / "out", None)
        with pytest.raises(CheckpointError, match=r"has model.safetensors already; move it away"):
            export.export(opened, tmp_path / "out", None)


@pytest.mark.parametrize("when", ["while it wrote", "while it named"])
def test_what_a_killed_export_has_left_is_cleared(when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worlds.run(begin, 1, 700, "fp32", tmp_path / "ck", ranks=1)
    out, most = tmp_path / "out", 3000
    named: list[Path] = []

    def killed(folder: Folder, path: Path, shard: Any) -> None:
        path.write_bytes(b"half of it")
        raise KeyboardInterrupt

    def cut_short(part: Path, path: Path) -> None:
        if named:
            raise KeyboardInterrupt
        named.append(path)
        part.rename(path)

    with Folder(*given(tmp_path / "ck")) as opened:
        with monkeypatch.context() as patch:
            if when == "while it wrote":
                patch.setattr(export, "write_shard", killed)
            else:
                patch.setattr(atomic.os, "replace", cut_short)
            with pytest.raises(KeyboardInterrupt):
                export.export(opened, out, torch.float32, most)
        (out / ".mine").write_text("kept")
        assert any(".refimpl-" in path.name for path in out.iterdir())
        assert all(path.exists() for path in named)
        files = export.export(opened, out, torch.float32, most)
    assert len(files) > 2
    assert set(out.iterdir()) == {out / ".mine", out / "model.safetensors.index.json", *files}
    assert set(everything(out)) == set(Net().state_dict())


def test_of_weights_that_do_not_fit_none_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next export, when there is room, would refuse to replace them."""
    worlds.run(begin, 1, 700, "fp32", tmp_path / "ck", ranks=2)
    real = export.write_shard

    def full(opened: Folder, path: Path, shard: Any) -> None:
        real(opened, path, shard)
        if "model-00003" in path.name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with Folder(*given(tmp_path / "ck")) as opened:
        with monkeypatch.context() as patch:
            patch.setattr(export, "write_shard", full)
            with pytest.raises(
                CheckpointError, match=r"model-00003-of-0000\d.safetensors: No space left on device; free"
            ):
                export.export(opened, tmp_path / "out", torch.float32, 3000)
        assert not list((tmp_path / "out").iterdir())
        export.export(opened, tmp_path / "out", torch.float32, 3000)
    assert set(everything(tmp_path / "out")) == set(Net().state_dict())


@pytest.mark.parametrize(
    ("text", "size"), [("5GB", 5 * 10**9), ("1.5 MiB", 3 << 19), ("100kb", 10**5), (17, 17), ("9", 9), (1e17, 10**17)]
)
def test_sizes(text: Any, size: int) -> None:
    assert export.size_of(text) == size


def test_a_tensor_that_is_too_large_has_a_file_of_its_own() -> None:
    large, small = (torch.float32, (9,)), (torch.float32, (2,))
    shards = export.in_shards({"a": large, "b": small, "c": small, "d": small, "e": large}, 16)
    assert [list(shard) for shard in shards] == [["a"], ["b", "c"], ["d"], ["e"]]


@pytest.mark.parametrize("text", ["", "GB", "-1MB", "five", "0", 0, -5])
def test_what_is_no_size(text: Any) -> None:
    with pytest.raises(ValueError, match="is not a size such as 5GB"):
        export.size_of(text)
