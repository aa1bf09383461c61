"""FLOPs by module: those of the formulas, on whatever stage, and nothing else of the training changes."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from worlds import run

import refimpl
from refimpl.deepspeed.pipe import LayerSpec, PipelineModule
from refimpl.deepspeed.profiling.flops_profiler.profiler import FlopsProfiler, get_model_profile
from refimpl.measure.flops import shortened
from refimpl.measure.running import ALL

B, T, D, HEADS = 2, 6, 8, 2


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.head = Attention(), nn.Linear(D, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.attention(x)))


TOKENS = B * T
PROJECTIONS, SCORES, HEAD = 2 * TOKENS * 4 * D * D, 2 * 2 * B * T * T * D, 2 * TOKENS * 3 * D
PARAMETERS = 4 * D * D + 4 * D + 3 * D + 3


def test_a_models_flops_are_those_of_the_formulas(capsys: pytest.CaptureFixture[str]) -> None:
    model = Model()
    found = get_model_profile(model, (B, T, D), as_string=False)
    total = PROJECTIONS + SCORES + HEAD
    assert found == (total, total // 2, PARAMETERS)
    assert not model.training
    lines = capsys.readouterr().out.splitlines()
    rows = {line.split()[0]: line.split()[1:] for line in lines if line.startswith("Model")}
    assert rows["Model"] == ["Model", f"{PARAMETERS}", f"{total:,}", "100.0%"]
    assert rows["Model.attention"][2] == f"{PROJECTIONS + SCORES:,}"
    assert rows["Model.attention.qkv"] == ["Linear", f"{3 * D * D + 3 * D}", f"{PROJECTIONS * 3 // 4:,}", "51.1%"]
    assert list(rows) == ["Model", "Model.attention", "Model.attention.qkv", "Model.attention.out", "Model.head"]
    assert lines[-1].startswith(
        f"parameters {PARAMETERS}, {total / 2e3:.2f} KMACs, {total / 1e3:.2f} KFLOPs; with backward 3 times"
    )


def test_what_is_shown_can_be_less(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "new" / "flops.txt"
    strings = get_model_profile(
        Model(), (B, T, D), detailed=False, module_depth=1, output_file=str(file), ignore_modules=[Attention]
    )
    assert strings == (f"{HEAD} FLOPS", f"{HEAD // 2} MACs", f"{PARAMETERS}")
    assert not capsys.readouterr().out
    assert [line.split()[0] for line in file.read_text().splitlines() if line.startswith("Model")] == [
        "Model",
        "Model.attention",
    ]


def test_nothing_to_count_is_said() -> None:
    with pytest.raises(ValueError, match="give input_shape, args or kwargs"):
        get_model_profile(Model())
    with pytest.raises(ValueError, match="mode 'train': 'forward' or 'generate'"):
        get_model_profile(Model(), (B, T, D), mode="train")
    profiler = FlopsProfiler(Model())
    profiler.print_model_profile()
    assert profiler.get_total_flops() == 0


def trained(stage: int, profiler: dict[str, Any], file: str) -> dict[str, Tensor]:
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": B,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "flops_profiler": profiler | {"output_file": file},
    }
    engine, *_ = refimpl.initialize(model=Model(), config=config)
    for i in range(6):
        engine.backward(engine(torch.full((B, T, D), 0.1 * i)).square().mean())
        engine.step()
        if engine.axes.world.rank == 0:
            assert Path(file).exists() == (profiler["enabled"] and i >= 2 * profiler.get("profile_step", 1) >= 0)
            assert (engine.flops_profiler is not None) == Path(file).exists()
    return {name: engine.stage.full_parameter(name) for name, _ in engine.module.named_parameters()}


@pytest.mark.parametrize("stage", [0, 3])
def test_an_engine_counts_one_forward_pass_and_trains_as_without(stage: int, tmp_path: Path) -> None:
    results = [run(trained, stage, {"enabled": on}, str(tmp_path / f"flops{on}.txt"), ranks=2) for on in (False, True)]
    assert all(torch.equal(a[name], b[name]) for a, b in zip(*results, strict=True) for name in a)
    text = (tmp_path / "flopsTrue.txt").read_text()
    assert text.startswith("FLOPs at step 1, one forward pass\n")
    assert re.search(rf"\nModel +Model +{PARAMETERS} +{PROJECTIONS + SCORES + HEAD:,} +100.0%\n", text)


def test_step_minus_one_is_no_step(tmp_path: Path) -> None:
    run(trained, 0, {"enabled": True, "profile_step": -1}, str(tmp_path / "flops.txt"), ranks=1)


def piped(file: str) -> None:
    layers = [LayerSpec(nn.Linear, 4, 4), LayerSpec(nn.Linear, 4, 8), LayerSpec(nn.Linear, 8, 2)]
    module = PipelineModule(layers=layers, num_stages=2, loss_fn=F.mse_loss, partition_method=[1, 1, 2])
    config = {
        "train_micro_batch_size_per_gpu": 3,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "flops_profiler": {"enabled": True, "profile_step": 0, "output_file": file},
    }
    engine, *_ = refimpl.initialize(model=module, config=config)
    engine.train_batch(iter([(torch.ones(3, 4), torch.ones(3, 2))] * 2))


def test_a_pipeline_counts_a_step_of_the_first_ranks_stages(tmp_path: Path) -> None:
    """A layer a row, though two are of a class and none is called by the whole; the last with its backward."""
    run(piped, str(tmp_path / "flops.txt"), ranks=2)
    title, _, *rows, last = (tmp_path / "flops.txt").read_text().splitlines()
    assert title == "FLOPs at step 0, forward and backward of 2 micro-batches through this rank's stages"
    first = 2 * 2 * (2 * 3 * 4 * 4)  # the inputs want no gradient: forward, and the weights' gradient
    second = 2 * 3 * (2 * 3 * 4 * 8)
    assert [row.split() for row in rows] == [
        ["PipelineModule.0", "Linear", "20", f"{first}", f"{first / (first + second):.1%}"],
        ["PipelineModule.1", "Linear", "40", f"{second:,}", f"{second / (first + second):.1%}"],
    ]
    assert last == f"parameters 60, {(first + second) // 2} MACs, {shortened(first + second)}FLOPs"


def test_a_module_at_two_places_is_a_row_and_what_a_checkpoint_computes_again_is_its_modules() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
    model.append(model[0])
    product = 2 * 3 * 4 * 4
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    hidden = checkpoint(model[:3], torch.ones(3, 4, requires_grad=True), use_reentrant=True)
    model[3](hidden).sum().backward()
    profiler.stop_profile()
    # Forward and the two gradients, and forward again; the module at the end has these without the last.
    assert profiler.by_module == {
        ALL: 11 * product, "Sequential.0": 7 * product, "Sequential.2": 4 * product, "Sequential.2.0": 4 * product,
    }  # fmt: skip
    assert len(profiler.table("", profiler.rows(-1, None)).splitlines()) == 5
    profiler.end_profile()
    assert (profiler.flops, profiler.by_module, profiler.started) == (0, {}, False)
