"""Whole fp32 weights out of a checkpoint of any stage, in a process that knows nothing of the ranks."""

import json
import os
import resource
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
import worlds
from foreign import run_python
from safetensors.torch import load_file
from torch import Tensor, nn

import refimpl.deepspeed as deepspeed
from refimpl import launch
from refimpl.checkpoint.errors import CheckpointError
from refimpl.deepspeed.utils.zero_to_fp32 import (
    convert_zero_checkpoint_to_fp32_state_dict,
    convert_zero_checkpoint_to_state_dict,
    get_fp32_state_dict_from_zero_checkpoint,
    load_state_dict_from_zero_checkpoint,
)
from refimpl.deepspeed.utils.zero_to_fp32 import main as zero_to_fp32
from refimpl.deepspeed.utils.zero_to_torch import main as zero_to_torch


class Tied(nn.Module):
    """Tied weights, a frozen layer, a buffer, odd sizes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.middle, self.head = nn.Embedding(11, 7), nn.Linear(7, 7), nn.Linear(7, 11, bias=False)
        self.head.weight = self.embed.weight
        self.middle.bias.requires_grad_(False)
        self.register_buffer("scale", torch.tensor([1.5]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.middle(self.embed(x)) * self.scale  # buffers stay in fp32
        return self.head(hidden.to(self.embed.weight.dtype)).float().square().mean()


def save(stage: int, folder: str, extra: dict[str, Any]) -> dict[str, torch.Tensor]:
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, "reduce_bucket_size": 60},
    }
    engine = deepspeed.initialize(model=Tied(), config=config | extra)[0]
    for _ in range(3):
        engine.backward(engine(torch.arange(4) + engine.group.rank))
        engine.step()
    engine.save_checkpoint(folder)
    whole = {name: deepspeed.utils.safe_get_full_fp32_param(p) for name, p in engine.module.named_parameters()}
    return {name: p for name, p in whole.items() if p is not None}


@pytest.mark.parametrize("extra", [{}, {"bf16": {"enabled": True}}])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_weight_in_full_precision(
    stage: int, extra: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = worlds.run(save, stage, str(tmp_path / "ck"), extra, ranks=3)[0]
    state = get_fp32_state_dict_from_zero_checkpoint(tmp_path / "ck")
    assert state.keys() == {"embed.weight", "middle.weight", "middle.bias", "head.weight", "scale"}
    assert all(tensor.dtype == torch.float32 for tensor in state.values())
    for name in ("embed.weight", "middle.weight"):
        assert state[name].equal(expected[name]), name
    assert state["head.weight"].data_ptr() == state["embed.weight"].data_ptr()
    assert state["scale"].item() == 1.5
    without = get_fp32_state_dict_from_zero_checkpoint(tmp_path / "ck", exclude_frozen_parameters=True)
    assert "middle.bias" not in without
    model = load_state_dict_from_zero_checkpoint(Tied(), tmp_path / "ck", tag="global_step3")
    assert model.head.weight.equal(expected["embed.weight"])
    convert_zero_checkpoint_to_fp32_state_dict(tmp_path / "ck", tmp_path / "out")
    written = torch.load(tmp_path / "out" / "pytorch_model.bin", weights_only=True)
    assert written["middle.weight"].equal(expected["middle.weight"])
    assert written["head.weight"].data_ptr() == written["embed.weight"].data_ptr()
    monkeypatch.setattr("sys.argv", ["zero_to_fp32.py", str(tmp_path / "ck"), str(tmp_path / "by hand")])
    runpy.run_path(str(tmp_path / "ck" / "zero_to_fp32.py"), run_name="__main__")
    assert os.access(tmp_path / "ck" / "zero_to_fp32.py", os.X_OK), "transformers' tests run it by its name"
    assert (tmp_path / "by hand" / "pytorch_model.bin").read_bytes() == (
        tmp_path / "out" / "pytorch_model.bin"
    ).read_bytes()
    lazy = get_fp32_state_dict_from_zero_checkpoint(tmp_path / "ck", lazy_mode=True)
    assert all(lazy[name].contiguous().equal(weight) for name, weight in state.items())
    convert_zero_checkpoint_to_fp32_state_dict(tmp_path / "ck", tmp_path / "small", max_shard_size="200")
    index = json.loads((tmp_path / "small/pytorch_model.bin.index.json").read_text())["weight_map"]
    assert all(torch.load(tmp_path / "small" / f, weights_only=True)[n].equal(state[n]) for n, f in index.items())
    convert_zero_checkpoint_to_fp32_state_dict(tmp_path / "ck", tmp_path / "out", safe_serialization=True)
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == state.keys()


def test_the_command_takes_deepspeeds_arguments(tmp_path: Path) -> None:
    worlds.run(save, 2, str(tmp_path / "ck"), {}, ranks=2)
    state = get_fp32_state_dict_from_zero_checkpoint(tmp_path / "ck")
    command = ["-m", "refimpl.as_deepspeed", "-m", "deepspeed.utils.zero_to_fp32"]
    run_python(*command, str(tmp_path / "ck"), str(tmp_path / "a"))
    zero_to_fp32([f"{tmp_path}/ck/global_step3", f"{tmp_path}/b", "--safe_serialization", "-d"])
    zero_to_fp32([f"{tmp_path}/ck", f"{tmp_path}/c", "--max_shard_size", "200", "-t", "global_step3"])
    zero_to_fp32([f"{tmp_path}/ck", f"{tmp_path}/d", "--exclude_frozen_parameters"])
    pickled = [torch.load(tmp_path / f"{folder}/pytorch_model.bin", weights_only=True) for folder in "ad"]
    for written in (pickled[0], load_file(tmp_path / "b/model.safetensors")):
        assert written.keys() == state.keys()
        assert all(written[name].equal(state[name]) for name in state)
    assert state.keys() - pickled[1].keys() == {"middle.bias"}
    assert (tmp_path / "c/pytorch_model.bin.index.json").is_file()
    with pytest.raises(SystemExit, match=r"zero_to_fp32: .*nonsense"):
        zero_to_fp32([f"{tmp_path}/ck", f"{tmp_path}/e", "--tag", "nonsense"])
    with pytest.raises(SystemExit, match="'5 parrots' is not a size"):
        zero_to_fp32([f"{tmp_path}/ck", f"{tmp_path}/e", "--max_shard_size", "5 parrots"])


def test_weights_in_another_dtype(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounded once, from fp32; what is tied stays one tensor, and a file is as large as what it holds then."""
    worlds.run(save, 2, str(tmp_path / "ck"), {}, ranks=3)
    state = get_fp32_state_dict_from_zero_checkpoint(tmp_path / "ck")
    size = 4 * sum(t.numel() for name, t in state.items() if name != "head.weight") - 1  # one byte too few for fp32
    convert_zero_checkpoint_to_state_dict(tmp_path / "ck", tmp_path / "a", dtype="bfloat16", max_shard_size=size)
    script = str(tmp_path / "ck" / "zero_to_torch.py")
    monkeypatch.setattr(
        "sys.argv", [script, f"{tmp_path}/ck", f"{tmp_path}/b", "--dtype", "fp16", "--safe_serialization"]
    )
    runpy.run_path(script, run_name="__main__")
    convert_zero_checkpoint_to_state_dict(tmp_path / "ck", tmp_path / "c", torch.float32)
    written = torch.load(tmp_path / "a/pytorch_model.bin", weights_only=True)
    assert written["head.weight"].data_ptr() == written["embed.weight"].data_ptr()
    assert all(written[name].equal(t.bfloat16()) for name, t in state.items())
    half = load_file(tmp_path / "b/model.safetensors")
    assert all(half[name].equal(t.half()) for name, t in state.items())
    full = torch.load(tmp_path / "c/pytorch_model.bin", weights_only=True)
    assert all(full[name].equal(t) for name, t in state.items())
    convert_zero_checkpoint_to_state_dict(tmp_path / "ck", tmp_path / "d", max_shard_size=size)
    assert (tmp_path / "d/pytorch_model.bin.index.json").is_file()
    for wrong in ("int8", "parrot"):
        with pytest.raises(SystemExit, match=f"zero_to_torch: .*{wrong}"):
            zero_to_torch([f"{tmp_path}/ck", f"{tmp_path}/d", "--dtype", wrong])


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="latest"):
        get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="nonsense"):
        get_fp32_state_dict_from_zero_checkpoint(tmp_path, tag="nonsense")
    worlds.run(save, 1, str(tmp_path), {}, ranks=2)
    rank1 = tmp_path / "global_step3" / "rank00001.safetensors"
    content = bytearray(rank1.read_bytes())
    content[-200] ^= 1
    rank1.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"rank00001\.safetensors"):
        get_fp32_state_dict_from_zero_checkpoint(tmp_path)


def in_folder(out: Path) -> dict[str, Tensor] | None:
    """What Hugging Face's libraries find: one file, or those that the index names; None if neither is there."""
    if (whole := out / "pytorch_model.bin").is_file():
        return dict(torch.load(whole, weights_only=True))
    if not (index := out / "pytorch_model.bin.index.json").is_file():
        return None
    files = json.loads(index.read_text())["weight_map"]
    return {name: torch.load(out / file, weights_only=True)[name] for name, file in files.items()}


def same(a: dict[str, Tensor] | None, b: dict[str, Tensor]) -> bool:
    return a is not None and a.keys() == b.keys() and all(a[name].equal(b[name]) for name in a)


@pytest.mark.parametrize("most", ["200", "1GB"])
@pytest.mark.parametrize(("module", "call", "at", "old"), [(torch, "save", 3, True), (os, "replace", 3, False)])
def test_what_is_killed_over_an_earlier_one_leaves_no_mixture(
    module: Any, call: str, at: int, old: bool, most: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, real, calls = tmp_path / "out", getattr(module, call), []
    for name, rate in (("one", 0.5), ("two", 1.0)):
        save(0, str(tmp_path / name), {"optimizer": {"type": "SGD", "params": {"lr": rate}}})
    one, two = (get_fp32_state_dict_from_zero_checkpoint(tmp_path / name) for name in ("one", "two"))
    convert_zero_checkpoint_to_fp32_state_dict(tmp_path / "one", out, max_shard_size=most)
    assert same(in_folder(out), one)

    def killed(*args: Any) -> None:
        calls.append(args)
        if len(calls) == at:
            raise KeyboardInterrupt
        real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(module, call, killed)
        with pytest.raises(KeyboardInterrupt):
            convert_zero_checkpoint_to_fp32_state_dict(tmp_path / "two", out, max_shard_size="200")
    found = in_folder(out)
    assert same(found, one) if old else found is None
    convert_zero_checkpoint_to_fp32_state_dict(tmp_path / "two", out, max_shard_size="200")
    assert same(in_folder(out), two)
    assert not [path for path in out.iterdir() if ".refimpl-" in path.name]


def full(checkpoint: Path, out: Path) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, resource.RLIM_INFINITY))
    with pytest.raises(CheckpointError, match=r"out/pytorch_model\.bin: File too large; raise the limit"):
        convert_zero_checkpoint_to_fp32_state_dict(checkpoint, out)
    assert not list(out.iterdir())


def test_a_disk_that_is_full_says_what_to_do(tmp_path: Path) -> None:
    save(0, str(tmp_path / "ck"), {})
    launch.run(full, tmp_path / "ck", tmp_path / "out", ranks=1)


def test_a_parameter_of_no_elements_is_written_and_read_lazily_too(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    model.none = nn.Parameter(torch.empty(0, 5))
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "Adam"}}
    deepspeed.initialize(model=model, config=config)[0].save_checkpoint(tmp_path)
    lazy = get_fp32_state_dict_from_zero_checkpoint(tmp_path, lazy_mode=True)
    assert lazy["none"].contiguous().shape == (0, 5)
    convert_zero_checkpoint_to_fp32_state_dict(tmp_path, tmp_path / "out")
    written = torch.load(tmp_path / "out" / "pytorch_model.bin", weights_only=True)
    assert written["none"].shape == (0, 5)
    assert written["weight"].equal(model.weight)
