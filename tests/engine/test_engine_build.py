"""From the configuration's names to the engine's parts, and what the engine prints about itself."""

import csv
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import worlds
from torch import Tensor, nn

import refimpl
from refimpl.engine.config import load_config
from refimpl.engine.configuration.keys import ConfigError
from refimpl.engine.trained import named_optimizer
from refimpl.optim.schedule import WarmupLR


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.into, self.out = nn.Linear(64, 64), nn.Linear(64, 64)
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return (self.out(self.into(x).relu()) * self.scale).float().square().mean()


def config(**more: Any) -> dict[str, Any]:
    """The oracles do not clip; unset, DeepSpeed and we do."""
    sgd = {"type": "SGD", "params": {"lr": 0.5}}
    return {"train_micro_batch_size_per_gpu": 4, "optimizer": sgd, "gradient_clipping": 0.0} | more


def start(model: nn.Module | None = None, **more: Any) -> refimpl.Engine:
    arguments = {name: more.pop(name) for name in ("optimizer_", "lr_scheduler", "model_parameters") if name in more}
    if "optimizer_" in arguments:
        arguments["optimizer"] = arguments.pop("optimizer_")
    return refimpl.initialize(model=model or Net(), config=config(**more), **arguments)[0]


def steps(engine: refimpl.Engine, count: int = 1, dtype: torch.dtype = torch.float32) -> None:
    for _ in range(count):
        engine.backward(engine(torch.ones(4, 64, dtype=dtype)))
        engine.step()


P = [nn.Parameter(torch.ones(64))]


@pytest.mark.parametrize(
    ("name", "params", "kind", "decay", "fused"),
    [
        ("Adam", {}, torch.optim.AdamW, 0.0, True),
        ("adamw", {"weight_decay": 0.1, "fused": False}, torch.optim.AdamW, 0.1, False),
        ("Adam", {"adam_w_mode": False}, torch.optim.Adam, 0.0, True),
        ("AdamW", {"adam_w_mode": False}, torch.optim.AdamW, 0.0, True),
        ("Adam", {"torch_adam": True}, torch.optim.AdamW, 0.01, True),
        ("Adam", {"torch_adam": True, "adam_w_mode": False}, torch.optim.Adam, 0, True),
        ("SGD", {"lr": 0.1}, torch.optim.SGD, 0, None),
        ("Adagrad", {}, torch.optim.Adagrad, 0, None),
        ("RMSprop", {}, torch.optim.RMSprop, 0, None),
        ("Lion", {}, "Lion", 0.0, None),
        ("Adam", {"bias_correction": False}, "Adam", 0.0, True),
    ],
)
def test_optimizers_by_name(name: str, params: dict[str, Any], kind: Any, decay: float, fused: bool | None) -> None:
    made = named_optimizer(name, P, params)
    assert type(made).__name__ == (kind if isinstance(kind, str) else kind.__name__)
    assert made.defaults["weight_decay"] == decay
    assert made.defaults.get("fused") == fused


def test_a_misspelt_parameter_is_named() -> None:
    with pytest.raises(ValueError, match=r"optimizer.params.weight_dacay: AdamW .* did you mean weight_decay"):
        named_optimizer("AdamW", P, {"weight_dacay": 0.1})
    with pytest.raises(ValueError, match=r"scheduler.params.warmup_steps: WarmupLR"):
        start(scheduler={"type": "WarmupLR", "params": {"warmup_steps": 3}})
    with pytest.raises(ValueError, match=r"bias_correction = False: .* leave torch_adam out"):
        named_optimizer("Adam", P, {"bias_correction": False, "torch_adam": True})


def mu_sgd(groups: list[dict[str, Any]], lr: float, **options: Any) -> torch.optim.Optimizer:
    """What mup's MuSGD does: a group of its own, with a rate of its own, for each kind of width."""
    groups = [{"params": [p], "lr": lr * (2 if p.dim() == 1 else 0.5)} for group in groups for p in group["params"]]
    return torch.optim.SGD(groups, lr=lr, **options)


@pytest.mark.parametrize("stage", [0, 3])
def test_mups_optimizers_are_the_packages(stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mup", None)
    asked = {"type": "musgd", "params": {"lr": 0.1, "momentum": 0.9}}
    with pytest.raises(ConfigError, match=r"optimizer.type = 'MuSGD': needs the package mup"):
        start(optimizer=asked)
    monkeypatch.setitem(sys.modules, "mup", SimpleNamespace(MuSGD=mu_sgd))
    with pytest.raises(ConfigError, match=r"momentun: MuSGD .* did you mean momentum"):
        start(optimizer={"type": "MuSGD", "params": {"lr": 0.1, "momentun": 0.9}})
    engine, model = start(optimizer=asked, zero_optimization={"stage": stage}), Net()
    twin = mu_sgd([{"params": list(model.parameters())}], 0.1, momentum=0.9)
    for _ in range(3):
        steps(engine)
        model(torch.ones(4, 64)).backward()
        twin.step()
        twin.zero_grad()
    assert sorted(engine.get_lr()) == [0.05, 0.05, 0.2, 0.2]
    state = engine.module_state_dict()
    assert all(torch.allclose(state[name], p, atol=1e-6) for name, p in model.named_parameters())


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("name", ["Adam", "SGD", "Adagrad", "Lion", "RMSprop", "Adam uncorrected"])
def test_every_optimizer_trains_in_every_stage(stage: int, name: str) -> None:
    params: dict[str, Any] = {"lr": 0.01}
    if name.endswith("uncorrected"):
        name, params = "Adam", params | {"bias_correction": False}
    engine = start(optimizer={"type": name, "params": params}, zero_optimization={"stage": stage})
    plain = Net()
    oracle = named_optimizer(name, list(plain.parameters()), params)
    for _ in range(2):
        plain(torch.ones(4, 64)).backward()
        oracle.step()
        oracle.zero_grad()
    steps(engine, 2)
    for key, weight in engine.stage.full_state_dict().items():
        torch.testing.assert_close(weight, plain.state_dict()[key], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("stage", [0, 3])
def test_gradients_are_clipped_at_1_unless_the_file_says_otherwise(stage: int) -> None:
    """As in DeepSpeed since 0.19.3: with SGD, an update is no longer than lr x 1."""
    moved = {}
    for name, clipping in {"unset": {}, "one": {"gradient_clipping": 1.0}, "off": {"gradient_clipping": 0}}.items():
        settings = {key: value for key, value in config().items() if key != "gradient_clipping"}
        settings |= {"zero_optimization": {"stage": stage}} | clipping
        engine = refimpl.initialize(model=Net(), config=settings)[0]
        engine.backward(100 * engine(torch.ones(4, 64)))
        engine.step()
        weights = zip(engine.stage.full_state_dict().values(), Net().state_dict().values(), strict=True)
        moved[name] = torch.cat([(after - before).flatten() for after, before in weights]).norm().item()
    assert moved["unset"] == moved["one"] == pytest.approx(0.5, rel=1e-3)
    assert moved["off"] > 1


def test_the_clients_optimizer_wins_over_the_file() -> None:
    model = Net()
    own = torch.optim.SGD(model.parameters(), lr=0.25)
    engine = start(model, optimizer_=own)
    assert engine.optimizer is own
    engine = start(optimizer_=lambda parameters: torch.optim.Adagrad(parameters, lr=0.125))
    assert isinstance(engine.optimizer, torch.optim.Adagrad)
    assert (engine.get_lr(), engine.get_mom()) == ([0.125], [0.0])
    assert start(optimizer_=lambda p: torch.optim.SGD(p, lr=1, momentum=0.5)).get_mom() == [0.5]
    assert start(optimizer_=lambda p: torch.optim.Adam(p, betas=(0.5, 0.75))).get_mom() == [(0.5, 0.75)]
    with pytest.raises(TypeError, match="returned list"):
        start(optimizer_=lambda parameters: parameters)
    with pytest.raises(TypeError, match="a SimpleNamespace is neither"):
        start(optimizer_=SimpleNamespace(param_groups=[]))


def test_a_callable_gets_tensors_where_tensors_were_given() -> None:
    """DeepSpeed's does; one that sorts them by their dimensions reads each."""
    model, seen = Net(), list[list[Any]]()

    def make(parameters: list[Any]) -> torch.optim.Optimizer:
        seen.append(parameters)
        return torch.optim.SGD(parameters, lr=1)

    start(model, optimizer_=make)
    assert all(a is b for a, b in zip(seen[0], model.parameters(), strict=True))


@pytest.mark.parametrize(
    ("section", "told"),
    [
        ({"type": "cpu_adam", "params": {"lr": 0.5}}, ["optimizer.type = 'cpu_adam': not built"]),
        ({"params": {"lr": 0.0}}, ["optimizer.type is not given: not built"]),
        ({"type": "SGD", "params": {"slow": 1}}, []),
    ],
)
def test_beside_the_clients_optimizer_the_file_may_name_any(section: dict[str, Any], told: list[str]) -> None:
    """GPT-NeoX writes its own names there: cpu_adam, sm3, madgrad_wd. A schedule of the file moves the client's."""
    schedule = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.25, "warmup_num_steps": 2}}
    both = {**config(), "optimizer": section, "scheduler": schedule}
    with warnings.catch_warnings(record=True) as notes:
        warnings.simplefilter("always")
        model = Net()
        own = torch.optim.SGD(model.parameters(), lr=1.0)
        engine = refimpl.initialize(model=model, optimizer=own, config=both)[0]
    assert [str(note.message).partition(",")[0] for note in notes] == told
    assert engine.optimizer is own
    assert own.param_groups[0]["lr"] <= 0.25
    with pytest.raises(ConfigError, match="optimizer"):
        refimpl.initialize(model=Net(), config=both)


class OwnRate(torch.optim.Optimizer):
    """Finds its rate by itself, as Adafactor may."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": None})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        return None


def test_an_optimizer_without_a_rate_of_its_groups(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monitor = {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}
    engine = start(csv_monitor=monitor, steps_per_print=1, optimizer_=OwnRate)
    steps(engine)
    assert engine.get_lr() == [None]
    assert "lr=[None]" in capsys.readouterr().out
    assert [path.name for path in (tmp_path / "job").iterdir()] == ["Train_Samples_train_loss.csv"]


def test_without_an_optimizer_it_infers_and_says_what_training_takes() -> None:
    engine, optimizer, *_ = refimpl.initialize(model=Net(), config={"train_batch_size": 4})
    assert optimizer is None
    with pytest.raises(RuntimeError, match="no optimizer"):
        engine.step()


def test_model_parameters_as_tensors_or_groups() -> None:
    model = Net()
    groups = [{"params": model.into.parameters(), "lr": 0.0}, {"params": model.out.parameters()}]
    engine = start(model, model_parameters=groups, zero_optimization={"stage": 2})
    assert engine.get_lr() == [0.0, 0.5]
    before = {n: w.clone() for n, w in model.state_dict().items()}
    steps(engine)
    after = model.state_dict()
    assert torch.equal(after["into.weight"], before["into.weight"])
    assert not torch.equal(after["out.weight"], before["out.weight"])

    model = Net()
    assert start(model, model_parameters=model.parameters()).get_lr() == [0.5]
    with pytest.raises(ValueError, match=r"group 0 has a tensor .* its own alone, or .* one nn.ModuleList of both"):
        start(Net(), model_parameters=model.parameters())
    with pytest.raises(ValueError, match="nothing to train"):
        start(Net().requires_grad_(False))
    with pytest.raises(ValueError, match=r"model_parameters: empty: .* list\(model.parameters\(\)\)"):
        start(Net(), model_parameters=iter(()))
    with pytest.raises(ValueError, match=r"group 0 has a tuple, no tensor: pass model.parameters\(\)"):
        start(model, model_parameters=model.named_parameters())
    with pytest.raises(ValueError, match=r"tensors beside groups: put them in a group too"):
        start(model, model_parameters=[model.into.weight, {"params": [model.into.bias]}])
    with pytest.raises(ValueError, match=r"group 1 has no 'params', only lr"):
        start(model, model_parameters=[{"params": [model.into.weight]}, {"lr": 0.1}])


class Halving:
    """A schedule of a script's own: it can step, and that is all."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.groups = optimizer.param_groups

    def step(self) -> None:
        for group in self.groups:
            group["lr"] /= 2


def test_schedules_from_the_file_the_client_or_a_callable() -> None:
    warmup = {"warmup_min_lr": 0.0, "warmup_max_lr": 0.5, "warmup_num_steps": 4, "warmup_type": "linear"}
    rates = []
    model = Net()
    own = torch.optim.SGD(model.parameters(), lr=0.5)
    for engine in (
        start(scheduler={"type": "WarmupLR", "params": warmup}),
        start(lr_scheduler=lambda optimizer: WarmupLR(optimizer, **warmup)),
        start(model, optimizer_=own, lr_scheduler=WarmupLR(own, **warmup)),
    ):
        rates.append([])
        for _ in range(6):
            rates[-1].append(engine.get_lr()[0])
            steps(engine)
    assert rates[0] == rates[1] == rates[2]
    assert rates[0][5] == 0.5 > rates[0][3] > rates[0][2] > 0
    with pytest.raises(ValueError, match="given twice"):
        start(lr_scheduler=lambda optimizer: None, scheduler={"type": "WarmupLR", "params": warmup})
    for how in ({"scheduler": {"type": "StepLR", "params": {"step_size": 1, "gamma": 0.5}}}, {"lr_scheduler": Halving}):
        engine = start(**how)
        steps(engine, 2)
        assert engine.get_lr() == [0.125]


def test_the_model_is_cast_as_the_file_says() -> None:
    for section, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        engine = start(**{section: {"enabled": True}})
        assert {p.dtype for p in engine.module.parameters()} == {dtype}
        assert engine.module.scale.dtype == torch.float32  # buffers stay as they are
        steps(engine, 1, dtype)
        assert engine.optimizer.param_groups[0]["params"][0].dtype == torch.float32
    engine = start(bf16={"enabled": True}, data_types={"buffer_dtype": "bf16"})
    assert (engine.module.into.weight.dtype, engine.module.scale.dtype) == (torch.bfloat16, torch.bfloat16)
    assert start(Net().double()).module.into.weight.dtype == torch.float64


@pytest.mark.parametrize("names", ["auto", ["s*e"], []])
@pytest.mark.parametrize("section", ["bf16", "fp16"])
def test_the_buffers_that_a_model_or_the_file_names_are_fp32(section: str, names: Any) -> None:
    """DeepSpeed 0.19.8's `keep_in_fp32_modules`: one list counts for fp16 alone."""
    model, other = nn.Sequential(Net().bfloat16(), Net()), Net()
    model[0]._keep_in_fp32_modules_strict = {"scale"}
    model[1]._keep_in_fp32_modules = ["scale"]
    types = {"buffer_dtype": "bf16", "keep_in_fp32_modules": names}
    start(nn.ModuleList([model, other]), **{section: {"enabled": True}}, data_types=types)
    kept = [True, section == "fp16", False] if names == "auto" else [bool(names)] * 3
    assert [net.scale.dtype == torch.float32 for net in (*model, other)] == kept


def test_inputs_are_cast_only_when_asked() -> None:
    with pytest.raises(RuntimeError, match="dtype"):
        steps(start(fp16={"enabled": True}))
    engine = start(fp16={"enabled": True, "auto_cast": True})
    steps(engine)
    assert engine.global_steps == 1


def zero_init(inside: bool, precision: dict[str, Any], zero: dict[str, Any]) -> list[Tensor]:
    from refimpl.zero.init import Init

    torch.manual_seed(0)
    if inside:
        with Init():
            model = Net()
    else:
        model = Net()
    engine = start(model, zero_optimization=zero, **precision)
    steps(engine, 2, engine.config.dtype)
    return [w.clone() for w in (engine.stage.full_state_dict() or {}).values()]


@pytest.mark.parametrize("precision", [{}, {"bf16": {"enabled": True}}])
@pytest.mark.parametrize(
    "zero",
    [{"stage": 3, "stage3_param_persistence_threshold": 0}, {"stage": 3, "stage3_param_persistence_threshold": 64},
     {"stage": 1}],
)  # fmt: skip
def test_a_model_born_in_shards_gives_the_same_bits(precision: dict[str, Any], zero: dict[str, Any]) -> None:
    born, plain = (worlds.run(zero_init, inside, precision, zero, ranks=2)[0] for inside in (True, False))
    assert len(born) == len(plain) == 5
    assert all(torch.equal(a, b) for a, b in zip(born, plain, strict=True))


def test_exactly_one_configuration() -> None:
    args = type("Args", (), {"deepspeed_config": config()})
    assert refimpl.initialize(args, Net())[0].train_batch_size() == 4
    assert refimpl.initialize(model=Net(), config_params=config())[0].train_batch_size() == 4
    with pytest.raises(ValueError, match="found none"):
        refimpl.initialize(model=Net())
    with pytest.raises(ValueError, match=r"found config and args.deepspeed_config"):
        refimpl.initialize(args, Net(), config=config())
    with pytest.raises(ValueError, match="needs a model"):
        refimpl.initialize(config=config())
    with pytest.raises(
        ValueError, match=r"mesh_param = \(1,\): must be \(data_parallel_size, sequence_parallel_size\)"
    ):
        refimpl.initialize(model=Net(), config=config(), mesh_param=(1,))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="mpu: object has no get_data_parallel_group"):
        refimpl.initialize(model=Net(), config=config(), mpu=object())
    with pytest.raises(RuntimeError, match="dist_init_required"):
        refimpl.initialize(model=Net(), config=config(), dist_init_required=False)


def test_errors_of_the_configuration_reach_the_caller() -> None:
    with pytest.raises(ConfigError, match=r"train_batch_size = 9, .* 4 x .* 2 x world size 1 = 8"):
        start(train_batch_size=9, gradient_accumulation_steps=2)
    with pytest.raises(ConfigError, match="did you mean steps_per_print"):
        start(steps_per_prnt=1)


def test_it_prints_what_the_file_asks_for(capsys: pytest.CaptureFixture[str]) -> None:
    engine = start(steps_per_print=2, wall_clock_breakdown=True, memory_breakdown=True)
    steps(engine, 1)
    assert capsys.readouterr().out == ""
    measured = engine.report.clock.drain
    with mock.patch.object(engine.report.clock, "drain", side_effect=lambda: dict.fromkeys(measured(), 3.0)):
        steps(engine, 1)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "step=2, skipped=0, lr=[0.5]"
    assert lines[1] == "time (ms a step) | fwd: 1.50 | bwd: 1.50 | step: 1.50"  # 3 in two steps
    size = sum(p.nbytes for p in engine.module.parameters())
    assert lines[2].startswith("bytes before step")
    assert f"gradients: {size}" in lines[2]
    assert f"parameters: {size}" in lines[3]
    assert "gradients: 0" in lines[3]
    assert len(lines) == 4
    steps(start(memory_breakdown=True), 1)  # at every step, where nothing says how often
    assert capsys.readouterr().out.startswith("bytes before step")
    start(dump_state=True)
    assert '"train_micro_batch_size_per_gpu": 4' in capsys.readouterr().out
    silent = start()
    with mock.patch.object(silent, "get_lr") as asked:  # of a tensor on a GPU, for which the host would wait
        steps(silent, 1)
    asked.assert_not_called()
    assert capsys.readouterr().out == ""


def monitored(folder: Path, everywhere: bool) -> list[float]:
    monitor = {"enabled": everywhere or dist.get_rank() == 0, "output_path": str(folder), "job_name": "job"}
    engine = start(csv_monitor=monitor, gradient_accumulation_steps=2, fp16={"enabled": True, "initial_scale_power": 4})
    losses, lost = [], engine(torch.ones(4, 64, dtype=torch.float16))
    lost.register_hook(mock.Mock(side_effect=MemoryError("in backward")))
    with pytest.raises(MemoryError, match="in backward"):
        engine.backward(lost)  # a micro-batch that no step counts
    for step in range(4):
        x = torch.full((4, 64), 1.0 + step + engine.group.rank, dtype=torch.float16)
        losses.append(engine.backward(engine(x)).item())
        engine.step()
    return losses


@pytest.mark.parametrize("everywhere", [True, False])
def test_monitors_get_the_loss_of_the_whole_batch(everywhere: bool, tmp_path: Path) -> None:
    losses = torch.tensor(worlds.run(monitored, tmp_path, everywhere, ranks=2))  # [rank, micro-batch]
    metrics = {path.stem: list(csv.reader(path.read_text().splitlines())) for path in (tmp_path / "job").iterdir()}
    assert set(metrics) == {f"Train_Samples_{name}" for name in ("train_loss", "lr", "loss_scale")}
    assert metrics["Train_Samples_loss_scale"][1:] == [["16", "16.0"], ["32", "16.0"]]
    assert metrics["Train_Samples_lr"][1:] == [["16", "0.5"], ["32", "0.5"]]
    written = [float(value) for _, value in metrics["Train_Samples_train_loss"][1:]]
    assert written == pytest.approx([losses[:, :2].mean().item(), losses[:, 2:].mean().item()], rel=1e-6)


def test_counters_and_getters() -> None:
    engine = start(gradient_accumulation_steps=2, zero_optimization={"stage": 1})
    assert (engine.train_batch_size(), engine.train_micro_batch_size_per_gpu()) == (8, 4)
    assert (engine.gradient_accumulation_steps(), engine.zero_optimization_stage()) == (2, 1)
    assert engine.get_global_grad_norm() is None
    assert (engine.local_rank, engine.device) == (0, torch.device("cpu"))
    assert not engine.eval().module.training
    assert engine.train().module.training
    assert engine.config == load_config(
        config(gradient_accumulation_steps=2, zero_optimization={"stage": 1}), world_size=1
    )


def test_what_would_train_nothing_is_refused() -> None:
    """A schedule of rates that nobody uses, data that are no batch, values that are nowhere."""
    model = Net()
    own, other = (torch.optim.SGD(each.parameters(), lr=0.5) for each in (model, Net()))
    with pytest.raises(ValueError, match="lr_scheduler: StepLR moves the rates of another optimizer"):
        start(model, optimizer_=own, lr_scheduler=torch.optim.lr_scheduler.StepLR(other, 1))
    with pytest.raises(ValueError, match="lr_scheduler: there is no optimizer whose rates it would move"):
        refimpl.initialize(model=Net(), config={"train_batch_size": 4}, lr_scheduler=lambda optimizer: None)
    few: Any = [torch.ones(4)]
    loader: Any = torch.utils.data.DataLoader(few)
    with pytest.raises(ValueError, match=r"training_data: 0 samples make no micro-batch of \d+ on each of 1 ranks"):
        refimpl.initialize(model=Net(), config={"train_batch_size": 4}, training_data=few[:0])
    with pytest.raises(TypeError, match="training_data: a DataLoader: pass its dataset"):
        refimpl.initialize(model=Net(), config={"train_batch_size": 4}, training_data=loader)
    with torch.device("meta"):
        nowhere = Net()
    with pytest.raises(ValueError, match=r"parameter into.weight is on the meta device"):
        start(nowhere)
