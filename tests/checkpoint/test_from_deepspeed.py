"""What DeepSpeed 0.19 itself has written is read, every weight and moment, and refused by name if it asks for more."""

import importlib.util
import io
import os
import pickle
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import worlds
from anywhere import joined, mine
from torch import Tensor, nn

import refimpl
from refimpl.checkpoint import unpickle
from refimpl.checkpoint.errors import CheckpointError
from refimpl.checkpoint.export import weights
from refimpl.checkpoint.find import given
from refimpl.checkpoint.folder import Folder
from refimpl.checkpoint.from_deepspeed import import_folder, scaler_of

HERE = Path(__file__).parent / "deepspeed_written"
KINDS = [f"zero{stage}-{section}" for stage in (1, 2, 3) for section in ("fp32", "bf16")]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("deepspeed")
    found = importlib.util.find_spec("deepspeed")  # tests/deepspeed is seen too, a folder without an origin
    if found is not None and found.origin is not None:  # what the one that is installed here writes
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", HERE / "write.py", folder]
        subprocess.run(command, check=True, env=os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"})
        return folder
    with tarfile.open(HERE / "written.tar.xz") as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # Python 3.11.2, Debian's, has none
        archive.extractall(folder)
    return folder


def net() -> nn.Module:
    """The model of write.py, which cannot be imported without DeepSpeed."""
    source = (HERE / "write.py").read_text()
    scope: dict[str, Any] = {"torch": torch, "nn": nn, "__name__": "net"}
    exec(source[source.index("class Net") : source.index("def write")], scope)
    return scope["Net"]()


def optimizer(model: nn.Module, **how: Any) -> torch.optim.Optimizer:
    matrices = [p for p in model.parameters() if p.ndim > 1 and p.requires_grad]
    vectors = [p for p in model.parameters() if p.ndim < 2 and p.requires_grad]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.01, **how)


def batch(step: int, rank: int) -> Tensor:
    return torch.tensor([step, 2 * rank + 1])


def settings(stage: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 10}},
    }


def trained(steps: int, folder: Path | None, stage: int) -> dict[str, Tensor]:
    """By refimpl, from the beginning or from what was imported; this rank's parts."""
    model = net()
    engine = refimpl.initialize(model=model, optimizer=optimizer(model), config=settings(stage))[0]
    if folder is not None:
        _, client = engine.load_checkpoint(folder)
        assert client == {"epoch": 4, "best": (0.5, None)}
        assert (engine.global_steps, engine.global_samples, engine.lr_scheduler.last_batch_iteration) == (3, 12, 2)
    for step in range(engine.global_steps, steps):
        engine.backward(engine(batch(step, engine.group.rank)))
        engine.step()
    return mine(engine)


def close(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.allclose(a[n].float(), b[n].float(), rtol=1e-4, atol=1e-6) for n in a)


@pytest.mark.parametrize("kind", KINDS)
def test_every_weight_as_deepspeed_reads_it(kind: str, written: Path, tmp_path: Path) -> None:
    assert import_folder(written / kind, tmp_path / "out") == tmp_path / "out/global_step3"
    expected = torch.load(written / kind / "expected.pt", weights_only=True)
    with Folder(*given(tmp_path / "out")) as opened:
        opened.check()
        found = dict(weights(opened, torch.float32))
        assert opened.about["dtype"] == ("bfloat16" if kind.endswith("bf16") else "float32")
    assert found.keys() == net().state_dict().keys()
    lost = {"frozen.weight", "frozen.bias"} if "zero1" in kind else set()
    assert found.keys() - expected.keys() == lost, "by DeepSpeed's own script, of stage 1"
    assert all(torch.equal(found[name], expected[name].float()) for name in expected)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.endswith("fp32")])
def test_training_goes_on_from_it_as_if_it_had_been_ours(kind: str, written: Path, tmp_path: Path) -> None:
    """Moments, counts, schedule and groups too: three steps by DeepSpeed and two by us are five by us."""
    import_folder(written / kind, tmp_path)
    loaded = joined(worlds.run(trained, 3, tmp_path, 3, ranks=2))
    assert close(loaded, joined(worlds.run(trained, 3, None, 1, ranks=2)))
    whole = joined(worlds.run(trained, 5, None, 1, ranks=2))
    for stage in (0, 3):
        assert close(joined(worlds.run(trained, 5, tmp_path, stage, ranks=2)), whole)
    assert not close(loaded, whole)


def test_bf16_moments_lie_where_their_weights_do(written: Path, tmp_path: Path) -> None:
    """The three stages trained the same model on the same data."""
    states = []
    for stage in (1, 2, 3):
        import_folder(written / f"zero{stage}-bf16", tmp_path / str(stage))
        states.append(joined(worlds.run(trained, 3, tmp_path / str(stage), 1, ranks=1)))
    for other in states[1:]:
        assert all(torch.allclose(other[n].float(), states[0][n].float(), rtol=0.02, atol=1e-3) for n in other)
    assert states[0]["exp_avg embed.weight"].abs().max() > 0.01


class Evil:
    def __init__(self, do: Callable[..., object], *args: object) -> None:
        self.do, self.args = do, args

    def __reduce__(self) -> Any:
        return self.do, self.args


@pytest.mark.parametrize(
    ("evil", "name"),
    [
        (Evil(exec, "open('owned', 'w')"), "builtins.exec"),
        (Evil(getattr, "x", "upper"), "builtins.getattr"),
        (Evil(Path, "owned"), "pathlib"),
        (Evil(torch.load, "owned"), "torch.serialization.load"),
        (io.BytesIO(), "_io.BytesIO"),
    ],
)
def test_what_asks_for_more_is_refused_by_name(
    evil: Any, name: str, written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"module": {}, "payload": evil}, tmp_path / "evil.pt")
    with pytest.raises(CheckpointError, match=rf"evil.pt: asks for {name}"):
        unpickle.load(tmp_path / "evil.pt")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["evil.pt"]


def test_a_bare_pickle_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "old.pt").write_bytes(pickle.dumps({"module": {}}))
    with pytest.raises(CheckpointError, match=r"old.pt: cut short, or not written by torch.save"):
        unpickle.load(tmp_path / "old.pt")


class Runs(torch.nn.Module):
    """A module whose TorchScript runs when it is loaded."""

    @torch.jit.export
    def __getstate__(self) -> int:
        return 1

    @torch.jit.export
    def __setstate__(self, state: int) -> None:
        print("it runs")
        self.training = True


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit:FutureWarning")  # its class from torch 2.14 on
def test_a_torchscript_program_is_not_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """`torch.load` hands what looks like one to `torch.jit.load`, whatever unpickler it is given."""
    torch.jit.save(torch.jit.script(Runs()), tmp_path / "evil.pt")
    with pytest.raises(CheckpointError, match=r"evil.pt: a TorchScript program, no checkpoint"):
        unpickle.load(tmp_path / "evil.pt")
    assert not capfd.readouterr().out


def copy(written: Path, to: Path) -> Path:
    for file in (written / "zero2-fp32").rglob("*"):
        if file.is_file():
            target = to / file.relative_to(written / "zero2-fp32")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(file.read_bytes())
    return to / "global_step3"


@pytest.mark.parametrize(
    ("key", "value"), [("shared_params", None), ("param_shapes", {"embed.weight": torch.Size([7, 5])}), ("module", 7)]
)
def test_another_layout_is_named(key: str, value: Any, written: Path, tmp_path: Path) -> None:
    """As older versions and other programs have it."""
    file = copy(written, tmp_path / "ds") / "mp_rank_00_model_states.pt"
    torch.save(unpickle.load(file) | {key: value}, tmp_path / "new")  # the tensors are still in the old one
    (tmp_path / "new").rename(file)
    with pytest.raises(CheckpointError, match=r"global_step3: not laid out as by DeepSpeed 0.19 \(.*Error"):
        import_folder(tmp_path / "ds", tmp_path / "out")
    assert not list((tmp_path / "out").glob("*"))


def test_what_alignment_puts_between_parameters_is_left_out(written: Path, tmp_path: Path) -> None:
    """As with DeepSpeed's `parameter_alignment`: here five elements behind the first parameter, which has 35."""
    folder = copy(written, tmp_path / "ds")
    import_folder(folder, tmp_path / "plain")
    files = sorted(folder.glob("*_optim_states.pt"))
    saved = [unpickle.load(file)["optimizer_state_dict"] for file in files]
    holders = [
        [(optim["single_partition_of_fp32_groups"], 0) for optim in saved],
        *([(optim["base_optimizer_state"]["state"][0], key) for optim in saved] for key in ("exp_avg", "exp_avg_sq")),
    ]
    for parts in holders:
        flat = torch.cat([holder[key] for holder, key in parts])
        padded = torch.cat([flat[:35], torch.full((5,), torch.nan), flat[35:]])
        for (holder, key), part in zip(parts, padded.split(33), strict=True):
            holder[key] = part.clone()
    for file, optim in zip(files, saved, strict=True):
        for key in ("loss_scaler", "param_slice_mappings"):  # of classes that only DeepSpeed's own files may name
            optim.pop(key)
        said = {"param_alignment_paddings": [[5, 0], [0]]}
        torch.save({"optimizer_state_dict": optim | said}, tmp_path / "new")  # the tensors are still in the old one
        (tmp_path / "new").rename(file)
    import_folder(folder, tmp_path / "aligned")
    plain, aligned = (Folder(*given(tmp_path / out)) for out in ("plain", "aligned"))
    with plain, aligned:
        found = dict(weights(aligned, torch.float32))
        assert all(torch.equal(found[name], weight) for name, weight in weights(plain, torch.float32))
        for key in ("exp_avg", "exp_avg_sq"):
            for name in ("embed.weight", "middle.weight"):
                values = [torch.zeros(plain.places[name].numel) for _ in range(2)]
                for opened, value in zip((plain, aligned), values, strict=True):
                    opened.fill(key, name, 0, value)
                assert torch.equal(*values)


def test_a_group_without_state_leaves_the_others_theirs(written: Path, tmp_path: Path) -> None:
    folder = copy(written, tmp_path / "ds")
    import_folder(folder, tmp_path / "whole")
    for file in folder.glob("*_optim_states.pt"):
        saved = unpickle.load(file)
        saved["optimizer_state_dict"]["base_optimizer_state"]["state"].pop(0)
        for key in ("loss_scaler", "param_slice_mappings"):  # of classes that only DeepSpeed's own files may name
            saved["optimizer_state_dict"].pop(key)
        torch.save(saved, tmp_path / "new")  # the tensors are still in the old one
        (tmp_path / "new").rename(file)
    import_folder(folder, tmp_path / "part")
    moments = []
    for out in ("whole", "part"):
        with Folder(*given(tmp_path / out)) as opened:
            opened.fill("exp_avg", "middle.bias", 0, values := torch.zeros(opened.places["middle.bias"].numel))
            moments.append(values)
    assert torch.equal(*moments)
    assert moments[0].any()


def test_what_is_missing_damaged_or_of_another_kind_is_named(written: Path, tmp_path: Path) -> None:
    folder = copy(written, tmp_path / "ds")
    one = folder / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    content = one.read_bytes()

    def refused(match: str) -> None:
        with pytest.raises(CheckpointError, match=match):
            import_folder(tmp_path / "ds", tmp_path / "out")
        assert not list((tmp_path / "out").glob("*"))

    one.write_bytes(content[:-200])
    refused(r"zero_pp_rank_1_mp_rank_00_optim_states.pt: damaged or cut short")
    flipped = bytearray(content)
    flipped[len(content) // 2] ^= 1
    one.write_bytes(flipped)
    refused(r"zero_pp_rank_1_mp_rank_00_optim_states.pt: damaged, the checksum of .* differs")
    torch.save([1], one)
    refused(r"zero_pp_rank_1_mp_rank_00_optim_states.pt: has no optimizer_state_dict: not what DeepSpeed")
    one.unlink()
    refused(r"1 \*_optim_states.pt, 2 ranks wrote it; bring back those of rank 1")
    one.write_bytes(content)
    (folder / "mp_rank_00_model_states.pt").rename(folder / "away")
    refused(r"mp_rank_00_model_states.pt: No such file")
    (folder / "away").rename(folder / "mp_rank_00_model_states.pt")
    for name in (
        "layer_00-model_states.pt",
        "layer_0_expert_1_mp_rank_00_model_states.pt",
        "expp_rank_0_mp_rank_00_optim_states.pt",
        "mp_rank_01_model_states.pt",
        "zero_pp_rank_0_mp_rank_01_optim_states.pt",
    ):
        (folder / name).touch()
        refused(rf"{name}: of a model in parts .*not read here. The weights are in its \*_model_states.pt: refimpl")
        (folder / name).unlink()
    (folder / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt").write_bytes(content)
    refused(r"3 \*_optim_states.pt, 2 ranks wrote it; bring back those of rank none: there are too many")
    (folder / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    (folder / "offloaded_tensors").mkdir()
    refused(r"offloaded_tensors: optimizer state as DeepSpeed swaps it to NVMe, not read here")
    (folder / "offloaded_tensors").rmdir()
    apart = unpickle.load(one)
    torch.save(apart | {"optimizer_state_dict": {"ds_zero_partition_groups": [{"sub_group": 0}]}}, tmp_path / "apart")
    first = folder / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    whole = first.read_bytes()
    (tmp_path / "apart").rename(first)
    refused(r"rank_0_mp_rank_00_optim_states.pt: of a model in parts")
    first.write_bytes(whole)
    (tmp_path / "ds/latest").unlink()
    refused(r"ds: no \*_optim_states.pt and no latest")
    (tmp_path / "ds/latest_universal").touch()
    refused(r"ds: made by DeepSpeed's ds_to_universal: import the checkpoint that it was made of")
    (tmp_path / "ds/latest_universal").unlink()
    (tmp_path / "ds/zero").mkdir()
    (tmp_path / "ds/zero/optimizer_state.pt").touch()
    refused(r"ds: made by DeepSpeed's ds_to_universal: import the checkpoint that it was made of")
    import_folder(folder, tmp_path / "out")
    with pytest.raises(CheckpointError, match=r"out/global_step3: is there already"):
        import_folder(folder, tmp_path / "out")
    for name in ("zero_pp_rank_0_mp_rank_00_optim_states.pt", "zero_pp_rank_1_mp_rank_00_optim_states.pt"):
        (folder / name).unlink()
    with pytest.raises(CheckpointError, match=r"no \*_optim_states.pt: no ZeRO .*The weights are in its"):
        import_folder(folder, tmp_path / "another")
    with pytest.raises(CheckpointError, match=r"It is refimpl's own: load_checkpoint reads it"):
        import_folder(tmp_path / "out", tmp_path / "another")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/pytorch_model.bin").touch()
    with pytest.raises(CheckpointError, match=r"It has weights alone: torch.load"):
        import_folder(tmp_path / "bin", tmp_path / "another")
    engine = refimpl.initialize(model=net(), config=settings(0) | {"optimizer": {"type": "AdamW"}})[0]
    with pytest.raises(
        CheckpointError, match=r"this is a checkpoint of DeepSpeed; `refimpl checkpoint import` reads it"
    ):
        engine.load_checkpoint(tmp_path / "ds", tag="global_step3")


def test_a_loss_scale_goes_on_where_it_was() -> None:
    """Overflow in iteration 3, then 4, 5 and 6 without one."""
    scaler = unpickle.Shell()
    vars(scaler).update(cur_scale=1024, cur_iter=7, last_overflow_iter=3, cur_hysteresis=2)
    assert scaler_of(scaler) == {"scale": 1024.0, "left": 2, "good_steps": 3}
    assert scaler_of(None) is None
