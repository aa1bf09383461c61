"""What libraries built on DeepSpeed do with its engine, optimizer and configuration, in their own words.

TRL 0.2x (trl/models/utils.py), OpenRLHF (utils/deepspeed), Lightning (fabric/strategies/deepspeed.py), accelerate
(`get_state_dict`), Megatron-DeepSpeed.
"""

import argparse
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import worlds
from torch import Tensor, nn

import refimpl.deepspeed as deepspeed
from refimpl.deepspeed.accelerator.real_accelerator import get_accelerator
from refimpl.deepspeed.monitor import monitor
from refimpl.deepspeed.monitor.comet import CometMonitor
from refimpl.deepspeed.monitor.config import DeepSpeedMonitorConfig, get_monitor_config
from refimpl.deepspeed.monitor.csv_monitor import csvMonitor
from refimpl.deepspeed.monitor.tensorboard import TensorBoardMonitor
from refimpl.deepspeed.monitor.wandb import WandbMonitor
from refimpl.deepspeed.runtime.base_optimizer import DeepSpeedOptimizer
from refimpl.deepspeed.runtime.zero import estimates, offload_states
from refimpl.deepspeed.runtime.zero.offload_config import OffloadDeviceEnum, OffloadStateTypeEnum
from refimpl.deepspeed.runtime.zero.utils import is_zero_param
from refimpl.engine.configuration.keys import ConfigError, ConfigWarning

CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}


def engine_of(model: nn.Module | None = None, stage: int = 3, **more: Any) -> deepspeed.DeepSpeedEngine:
    torch.manual_seed(0)
    model = model or nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    config = json.loads(json.dumps(CONFIG | more))
    config["zero_optimization"]["stage"] = stage
    return deepspeed.initialize(model=model, config=config)[0]


def remove_hooks(model: Any) -> None:
    """As TRL does."""
    if model.optimizer is not None and hasattr(model.optimizer, "parameter_offload"):
        offload = model.optimizer.parameter_offload
    else:
        offload = model.optimizer
    for _, p in [*offload.module.named_parameters(recurse=True), *offload.module.ds_external_parameters()]:
        p.ds_active_sub_modules.clear()
    for hook in [*offload.forward_hooks, *offload.backward_hooks]:
        hook.remove()
    offload.forward_hooks = []
    offload.backward_hooks = []


def add_hooks(model: Any) -> None:
    """As TRL does."""
    offload = model.optimizer.parameter_offload
    if hasattr(offload, "param_coordinator") and not offload.param_coordinator.is_invalid_trace():
        offload.param_coordinator._invalidate_trace()
    offload._register_deepspeed_module(offload.module)


def generate_between_steps(generate: bool) -> Tensor:
    """The weights after three steps; between them each rank may run the whole model as often as it likes."""
    engine = engine_of()
    rank = engine.global_rank
    for step in range(3):
        x = torch.randn(2, 5, generator=torch.Generator().manual_seed(10 * step + rank))
        engine.backward(engine(x).square().mean())
        engine.step()
        if not generate:
            continue
        with deepspeed.zero.GatheredParameters(engine.parameters()):
            remove_hooks(engine)
            gathered = engine.group.ledger.sent_bytes()["all_gather"]
            for _ in range(rank + 1):
                with torch.no_grad():
                    assert engine.module(x).isfinite().all()
            assert engine.group.ledger.sent_bytes()["all_gather"] == gathered
            add_hooks(engine)
        with deepspeed.zero.unwrap_model_for_generation(engine) as whole:
            assert whole.module[0].weight.numel() == 35
            assert whole.module[0].weight.isfinite().all()
    return torch.cat([w.flatten() for w in engine.module.state_dict().values()])


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_zero_3_model_generates_as_trl_lets_it(ranks: int) -> None:
    with_, without = (worlds.run(generate_between_steps, generate, ranks=ranks) for generate in (True, False))
    assert all(mine.equal(without[0]) for mine in with_)


def test_only_zero_3_has_parameters_to_gather() -> None:
    engine = engine_of(stage=2)
    assert not hasattr(engine.optimizer, "parameter_offload")
    assert not is_zero_param(engine.module[0].weight)
    assert is_zero_param(engine_of().module[0].weight)


def test_a_key_with_a_dot_has_no_effect_and_says_so() -> None:
    """TRL writes such keys for every reference model; DeepSpeed reads none."""
    dotted = {"zero_optimization.reduce_bucket_size": 64, "zero_optimization.stage3_prefetch_bucket_size": 57.6}
    with pytest.warns(ConfigWarning) as warned:
        engine = engine_of(**dotted)
    assert [str(w.message).partition(" DeepSpeed")[0] for w in warned] == [f"{key}: no effect:" for key in dotted]
    assert engine.config.zero_optimization == engine_of().config.zero_optimization
    with pytest.raises(ConfigError, match=r"^zero_optimization.stage: unknown key"):
        engine_of(**{"zero_optimization.stage": 2})


def test_a_configuration_is_asked_like_a_dictionary() -> None:
    config = engine_of().config
    assert config["zero_optimization"]["offload_optimizer"]["device"] == "none"
    assert "optimizer" in config
    assert "scheduler" not in config
    with pytest.raises(KeyError, match="no_such"):
        config["no_such"]


def test_sizes_left_to_a_model_that_has_no_width_are_deepspeeds() -> None:
    """OpenRLHF leaves them "auto"; DeepSpeed drops what is "auto" in this section."""
    names = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
    zero = {"stage": 3} | dict.fromkeys((*names, "sub_group_size", "stage3_max_reuse_distance"), "auto")
    engine = deepspeed.initialize(model=nn.Linear(2, 2), config=CONFIG | {"zero_optimization": zero})[0]
    other = deepspeed.initialize(model=nn.Linear(2, 2), config=CONFIG | {"zero_optimization": {"stage": 3}})[0]
    assert engine.config == other.config


@pytest.mark.parametrize("stage", range(4))
def test_states_are_sent_to_the_host_where_they_are(stage: int) -> None:
    engine = engine_of(stage=stage)
    for owner in (engine, engine.optimizer):
        owner.offload_states(
            include=[OffloadStateTypeEnum.optim_states, OffloadStateTypeEnum.hp_params],
            device=OffloadDeviceEnum.cpu,
            pin_memory=True,
            non_blocking=True,
        )
        owner.reload_states(non_blocking=True)
    for state in OffloadStateTypeEnum:
        assert offload_states.get_state_devices(engine, state) == {torch.device("cpu")}
    with pytest.raises(ValueError, match="offload_states: device='nvme'"):
        engine.offload_states(device=OffloadDeviceEnum.nvme)
    assert isinstance(engine.optimizer, DeepSpeedOptimizer)
    assert isinstance(engine.optimizer, deepspeed.DeepSpeedOptimizer)
    assert not isinstance(torch.optim.SGD([nn.Parameter(torch.ones(1))]), DeepSpeedOptimizer)
    assert engine._consolidated_16bit_state_dict().keys() == engine.module.state_dict().keys()


def test_whole_weights_of_stage_3_share_no_memory() -> None:
    """accelerate's `save_model` takes weights that share some for tied, and writes one of them."""
    whole = engine_of(zero_optimization={"stage": 3})._zero3_consolidated_16bit_state_dict()
    assert len({w.untyped_storage().data_ptr() for w in whole.values()}) == len(whole) > 1


def test_whether_optimizer_states_are_at_the_host() -> None:
    assert not engine_of().zero_cpu_offload()
    offload = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    assert engine_of(stage=2, zero_optimization=offload).zero_cpu_offload()


def test_a_scripts_own_metrics(tmp_path: Path) -> None:
    csv = {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}
    engine = engine_of(csv_monitor=csv)
    assert engine.monitor.enabled
    engine.monitor.write_events([("Train/mine", 0.5, 3)])
    assert (tmp_path / "job" / "Train_mine.csv").read_text().split() == ["step,mine", "3,0.5"]


def master(folder: str) -> tuple[bool, bool]:
    config = {"train_batch_size": 2, "csv_monitor": {"enabled": True, "output_path": folder, "job_name": "job"}}
    made = monitor.MonitorMaster(deepspeed.DeepSpeedConfig(config).monitor_config)
    made.write_events([("Train/mine", 0.5, 3)])
    return made.enabled, made.csv_monitor is None


def test_metrics_without_an_engine_as_deepspeeds_tutorial_writes_them(tmp_path: Path) -> None:
    assert worlds.run(master, f"{tmp_path}", ranks=2) == [(True, False), (True, True)]
    assert (tmp_path / "job" / "Train_mine.csv").read_text().split() == ["step,mine", "3,0.5"]
    asked = get_monitor_config({"train_batch_size": 2, "wandb": {"enabled": False, "team": "my_team"}})
    one = WandbMonitor(asked.wandb)
    assert (one.enabled, one.team, one.project) == (False, "my_team", DeepSpeedMonitorConfig().wandb.project)
    assert not monitor.MonitorMaster(asked).enabled
    comet = CometMonitor(get_monitor_config({"comet": {"samples_log_interval": 5}}).comet)
    assert (comet.enabled, comet.samples_log_interval) == (False, 5)
    with pytest.raises(ConfigError, match="trackio"):
        get_monitor_config({"trackio": {"enabled": True}})
    assert (csvMonitor(asked.csv_monitor).enabled, TensorBoardMonitor(asked.tensorboard).job_name) == (
        False,
        "DeepSpeedJobName",
    )


def test_a_path_of_any_kind_is_a_configuration(tmp_path: Path) -> None:
    class Somewhere:
        def __fspath__(self) -> str:
            return str(tmp_path / "ds.json")

    (tmp_path / "ds.json").write_text(json.dumps({"train_batch_size": 6}))
    assert deepspeed.DeepSpeedConfig(Somewhere()).train_batch_size == 6


@pytest.mark.parametrize(("nodes", "gpus"), [(1, 1), (1, 8), (2, 4)])
def test_estimates(nodes: int, gpus: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Without offload a GPU keeps 18 bytes a parameter, shared out, and the parameters (stage 2) or a layer (3)."""
    psi, layer = 8_000_000, 500_000
    assert estimates.estimate_zero2_model_states_mem_needs(psi, gpus, nodes, cpu_offload=False)[1] == (
        2 * psi + 18 * psi // (gpus * nodes)
    )
    three = estimates.estimate_zero3_model_states_mem_needs
    assert three(psi, layer, gpus, nodes, cpu_offload=False)[1:] == (4 * layer + 18 * psi // (gpus * nodes), 4 * layer)
    assert three(psi, layer, gpus, nodes)[:2] == (1.5 * 18 * psi / nodes, 4 * layer)
    model = nn.Sequential(nn.Linear(1000, 2000, bias=False), nn.Linear(2000, 1000, bias=False))
    model[1].weight = nn.Parameter(torch.empty(0, 2000))
    deepspeed.zero.stage3.estimate_zero3_model_states_mem_needs_all_live(model, gpus, nodes)
    deepspeed.zero.stage_1_and_2.estimate_zero2_model_states_mem_needs_all_live(model, gpus, nodes)
    said = capsys.readouterr().out
    assert said.count("SW: Model with 2M total params") == 2
    assert said.count("offload_optimizer=") == 6 + 2
    assert f"{nodes} node" in said
    assert estimates.sizes(nn.Sequential(nn.Linear(3, 4), nn.Linear(2, 2))) == (16 + 6, 16)


def test_the_schedules_arguments() -> None:
    parser = deepspeed.add_tuning_arguments(argparse.ArgumentParser())
    arguments = vars(parser.parse_args(["--lr_schedule", "WarmupLR", "--warmup_num_steps", "7"]))
    schedule = {"type": "WarmupLR", "params": {n: arguments[n] for n in ("warmup_max_lr", "warmup_num_steps")}}
    assert engine_of(scheduler=schedule).lr_scheduler is not None
    assert arguments["warmup_num_steps"] == 7


def test_tensors_by_their_old_names() -> None:
    """Megatron-DeepSpeed makes its batches' sizes so."""
    accelerator = get_accelerator()
    assert accelerator.LongTensor([3, 4]).equal(torch.tensor([3, 4]))
    assert (accelerator.HalfTensor(2, 3).shape, accelerator.HalfTensor(2, 3).dtype) == ((2, 3), torch.float16)
    assert accelerator.FloatTensor([1]).dtype == torch.float32
    assert accelerator.lazy_call(lambda: 7) == 7
    assert accelerator.default_generator(0) is torch.default_generator
    with pytest.raises(AttributeError, match=r"get_accelerator\(\).create_graph: not part of this project"):
        accelerator.create_graph()


def test_what_is_not_built_says_so() -> None:
    deepspeed.set_autotp_mode(training=True)
    for use, what in (
        (lambda: deepspeed.set_autotp_mode(), "inference"),
        (lambda: deepspeed.DeepSpeedTransformerLayer(None), "DeepSpeedTransformerLayer"),
    ):
        with pytest.raises(NotImplementedError, match=what):
            use()


def coalesced(stage: int, block: bool) -> tuple[list[Tensor], int]:
    """The gradients' calls of two steps of three micro-batches, and the weights after them."""
    engine = engine_of(stage=stage)
    calls = 0
    for step in range(2):
        with engine.coalesce_grad_reduction() if block else nullcontext():
            for turn in range(3):
                seed = 100 * step + 10 * turn + engine.global_rank
                engine.set_gradient_accumulation_boundary(turn == 2)
                loss = engine(torch.randn(2, 5, generator=torch.Generator().manual_seed(seed))).square().mean()
                if block and turn == 1:
                    loss.backward()  # is one of them
                else:
                    engine.backward(loss)
            if block:
                with pytest.raises(RuntimeError, match=r"inside no_sync\(\) or coalesce_grad_reduction\(\)"):
                    engine.step()
                with pytest.raises(RuntimeError, match="inside no_sync"), engine.coalesce_grad_reduction():
                    pass
        engine.step()
        calls = engine.group.ledger.calls(by="tag")["gradients"]
    return list(engine.module.state_dict().values()), calls


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_one_reduction_for_all_backward_calls_of_a_step(stage: int) -> None:
    with_, without = (worlds.run(coalesced, stage, block, ranks=2) for block in (True, False))
    for (mine, calls), (theirs, _) in zip(with_, without, strict=True):
        assert all(map(torch.equal, mine, theirs))
        assert calls == {1: 1, 2: 3, 3: 6}[stage]  # stage 3 has a unit for each layer
    with pytest.raises(NotImplementedError, match="coalesce_grad_reduction: ZeRO stage 0"):
        engine_of(stage=0).coalesce_grad_reduction().__enter__()
