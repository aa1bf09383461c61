"""The small things behind DeepSpeed's names: optimizers, helpers, the accelerator, logging, OnDevice."""

import itertools
import json
import logging
import os
import pickle
import random
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
import worlds
from torch import nn

import refimpl.deepspeed as deepspeed
from refimpl.comm.group import Group
from refimpl.deepspeed import beside_accelerate, env_report, git_version_info
from refimpl.deepspeed.accelerator import abstract_accelerator
from refimpl.deepspeed.checkpoint.utils import clone_tensors_for_torch_save
from refimpl.deepspeed.compression import helper
from refimpl.deepspeed.launcher import runner
from refimpl.deepspeed.launcher.runner import DEEPSPEED_ENVIRONMENT_NAME
from refimpl.deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from refimpl.deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam, MultiTensorApply
from refimpl.deepspeed.ops.lamb import FusedLamb
from refimpl.deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
from refimpl.deepspeed.runtime import config as constants
from refimpl.deepspeed.runtime import config_utils, utils
from refimpl.deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from refimpl.deepspeed.runtime.checkpoint_engine import CheckpointCommitInfo, TorchCheckpointEngine
from refimpl.deepspeed.runtime.dataloader import DeepSpeedDataLoader
from refimpl.deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from refimpl.deepspeed.runtime.fp16.loss_scaler import LossScaler
from refimpl.deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from refimpl.deepspeed.runtime.state_dict_factory import SDLoaderFactory
from refimpl.deepspeed.runtime.zero.config import ZeroStageEnum
from refimpl.deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from refimpl.deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from refimpl.deepspeed.utils import timer
from refimpl.deepspeed.utils.logging import print_dist
from refimpl.deepspeed.utils.tensor_fragment import fragment_address
from refimpl.deepspeed.utils.torch import required_torch_version
from refimpl.engine.trained import named_optimizer
from refimpl.optim.lion import Lion

KINDS = (
    DeepSpeedZeroOptimizer, DeepSpeedZeroOptimizer_Stage3, FP16_Optimizer, FP16_UnfusedOptimizer, BF16_Optimizer,
)  # fmt: skip
TORCHS = {
    FusedAdam: (torch.optim.AdamW, {"weight_decay": 0.0}),
    DeepSpeedCPUAdam: (torch.optim.AdamW, {"weight_decay": 0.0}),
    DeepSpeedCPUAdagrad: (torch.optim.Adagrad, {}),
    FusedLion: (Lion, {"betas": (0.9, 0.999)}),
    DeepSpeedCPULion: (Lion, {"betas": (0.9, 0.999)}),
}


@pytest.mark.parametrize("kind", TORCHS)
def test_an_optimizer_steps_as_the_one_it_stands_for(kind: type) -> None:
    other, defaults = TORCHS[kind]
    p, q = (nn.Parameter(torch.linspace(-1, 1, 192)) for _ in range(2))
    mine, theirs = kind([p], lr=0.1), other([q], lr=0.1, **defaults)
    for step in range(3):
        p.grad = q.grad = torch.randn(192, generator=torch.Generator().manual_seed(step))
        mine.step()
        theirs.step()
    torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)
    assert isinstance(mine, kind)
    assert not isinstance(theirs, kind)


@pytest.mark.parametrize(
    ("name", "kind"), [("Adam", FusedAdam), ("Adagrad", DeepSpeedCPUAdagrad), ("Lion", FusedLion), ("Lamb", FusedLamb)]
)
def test_what_the_json_does_not_say_is_as_the_class_has_it(name: str, kind: type) -> None:
    p = [nn.Parameter(torch.ones(2))]
    named, made = named_optimizer(name, p, {}), kind(p)
    for option in ("lr", "betas", "eps", "weight_decay"):
        assert named.defaults.get(option) == made.defaults.get(option), option


@pytest.mark.parametrize(("kind", "switch"), [(FusedAdam, "adam_w_mode"), (DeepSpeedCPUAdam, "adamw_mode")])
def test_adam_without_decoupled_decay_is_torchs_adam(kind: type, switch: str) -> None:
    p, q = (nn.Parameter(torch.ones(64)) for _ in range(2))
    mine, theirs = (
        kind([p], lr=0.1, weight_decay=0.5, **{switch: False}),
        torch.optim.Adam([q], lr=0.1, weight_decay=0.5),
    )
    p.grad = q.grad = torch.ones(64)
    mine.step()
    theirs.step()
    torch.testing.assert_close(p, q)
    decoupled = kind([p], lr=0.1, weight_decay=0.5)
    decoupled.step()
    theirs.step()
    assert not torch.allclose(p, q, atol=1e-3)


@pytest.mark.parametrize("kind", [FusedAdam, DeepSpeedCPUAdam])
def test_bias_correction_is_honoured(kind: type) -> None:
    """The first step is then lr * 0.1 g / sqrt(0.001 g * g), not lr: 3.16 times as long."""
    p = nn.Parameter(torch.zeros(64))
    p.grad = torch.full((64,), 2.0)
    kind([p], lr=0.1, bias_correction=False).step()
    torch.testing.assert_close(p.detach(), torch.full((64,), -0.1 * 0.1 / 0.001**0.5))


def test_options_that_change_nothing_silently() -> None:
    p = [nn.Parameter(torch.ones(4))]
    for make in (
        lambda: DeepSpeedCPUAdam(p, fp32_optimizer_states=False),
        lambda: DeepSpeedCPUAdagrad(p, amsgrad=True),
        lambda: DeepSpeedCPULion(p, fp32_optimizer_states=False),
    ):
        with pytest.raises(ValueError, match="not implemented"):
            make()


def test_partitions() -> None:
    assert utils.partition_uniform(10, 4) == [0, 3, 6, 8, 10]
    assert utils.partition_uniform(2, 4) == [0, 1, 2, 2, 2]
    assert utils.partition_balanced([1, 1, 1, 1], 2) == [0, 2, 4]
    assert utils.partition_balanced([5, 1, 1, 1, 1, 1], 2) == [0, 1, 6]
    assert utils.partition_balanced([1, 2, 3], 4) == [0, 1, 2, 3, 3]
    weights = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
    for parts in range(1, 11):
        bounds = utils.partition_balanced(weights, parts)
        assert (bounds[0], bounds[-1], len(bounds)) == (0, 11, parts + 1)
        assert bounds == sorted(set(bounds))
    assert utils.prefix_sum_inc([1, 2, 3]) == [1, 3, 6]


def test_modules_by_their_dotted_name() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 3)))
    assert helper.recursive_getattr(model, "0.0.bias") is model[0][0].bias
    helper.recursive_setattr(model, "0.0", fresh := nn.Linear(2, 5))
    helper.recursive_setattr(model, "1", last := nn.Identity())
    assert model[0][0] is fresh
    assert model[1] is last
    with pytest.raises(AttributeError):
        helper.recursive_setattr(model, "2.weight", last)


def test_moving_and_copying() -> None:
    held = torch.ones(3)
    moved = utils.move_to_device({"a": [held, (held * 2,)]}, "cpu")
    assert moved["a"][1][0].equal(held * 2)
    assert isinstance(moved["a"][1], tuple)
    mixed = utils.move_to_device([held, "text", 3, held.bool()], "cpu", criterion_func=lambda x: x is held)
    assert mixed[0] is held
    assert mixed[1:3] == ["text", 3]  # all else stays
    assert utils.move_to_device((held,), "meta", lambda x: False)[0] is held
    flat = torch.arange(100.0)
    copy = clone_tensors_for_torch_save({"x": flat[:2], "n": 1})
    assert copy["x"].equal(flat[:2])
    assert copy["x"].untyped_storage().nbytes() == 8
    assert copy["n"] == 1
    assert DEEPSPEED_ENVIRONMENT_NAME == ".deepspeed_env"
    assert utils.call_to_str("f", 1, x=2) == "f(1, x=2)"
    assert utils.get_only_unique_item([2, 2]) == 2
    with pytest.raises(RuntimeError, match="unique"):
        utils.get_only_unique_item([1, 2])


def test_seeding_and_memory(capsys: pytest.CaptureFixture[str]) -> None:
    draws = []
    for _ in range(2):
        utils.set_random_seed(5)
        draws.append((torch.rand(3).tolist(), random.random(), np.random.random()))  # noqa: NPY002
    assert draws[0] == draws[1]
    utils.see_memory_usage("silent")
    utils.see_memory_usage("loud", force=True)
    said = capsys.readouterr().out
    assert "silent" not in said
    assert said.startswith("loud\nMA ")


def test_clipping_of_plain_gradients() -> None:
    p = nn.Parameter(torch.ones(4))
    p.grad = torch.full((4,), 3.0)
    assert utils.clip_grad_norm_([p], 1.0).item() == pytest.approx(6)
    assert p.grad.norm().item() == pytest.approx(1, rel=1e-4)


def test_where_a_rank_counts_no_gradient_its_norm_is_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a tensor rank whose every parameter is another's copy: NCCL has no way for a zero at the host."""
    monkeypatch.setenv("REFIMPL_DEVICE", "meta")
    sent: list[str] = []
    monkeypatch.setattr(utils.comm, "all_reduce", lambda norm, *_, **__: sent.append(norm.device.type))
    mpu = SimpleNamespace(get_model_parallel_rank=lambda: 1, get_model_parallel_group=lambda: None)
    p = nn.Parameter(torch.zeros(2))
    p.grad = torch.ones(2)
    utils.norm_of_plain([p], mpu=mpu)
    assert sent == ["meta"]


def norms_of(norm_type: float, split: bool) -> tuple[float, float]:
    """Runs on every rank: the norm before and after, of a part [rank + 1] and of a parameter that all have."""
    rank, world = Group.world().rank, dist.get_world_size()
    part, whole = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(2))
    part.model_parallel = True  # type: ignore[attr-defined]
    part.grad, whole.grad = torch.full((1,), rank + 1.0), torch.full((2,), 3.0)
    alone = [dist.new_group([r]) for r in range(world)]
    mpu = SimpleNamespace(
        get_model_parallel_rank=lambda: rank,
        get_model_parallel_group=lambda: dist.group.WORLD,
        get_data_parallel_group=lambda: alone[rank],
    )
    norm = utils.clip_grad_norm_([part, whole], 0.5, norm_type, mpu if split else None)
    return float(norm), float(part.grad)


@pytest.mark.parametrize("norm_type", [1, 2, 3, float("inf")])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_clipping_of_plain_gradients_is_the_same_on_all_ranks(ranks: int, norm_type: float) -> None:
    """Over the parts of a split model it is the whole model's; otherwise the mean of the ranks' norms."""
    parts = torch.arange(1.0, ranks + 1)
    whole = torch.cat([parts, torch.full((2,), 3.0)]).norm(norm_type)
    mean = torch.stack([torch.tensor([part, 3.0, 3.0]).norm(norm_type) for part in parts]).mean()
    for split, expected in ((True, whole), (False, mean)):
        for rank, (norm, clipped) in enumerate(worlds.run(norms_of, norm_type, split, ranks=ranks)):
            assert norm == pytest.approx(expected.item(), rel=1e-5)
            assert clipped == pytest.approx((rank + 1) * 0.5 / (expected.item() + 1e-6), rel=1e-5)


def test_the_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("REFIMPL_DEVICE", raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    accelerator = deepspeed.get_accelerator()
    assert (5 % accelerator.device_count(), accelerator.device_count()) == (2, 3), "of a CPU each rank has one"
    assert (accelerator.device_name(), accelerator.device_name(0), accelerator._name) == ("cpu", "cpu", "cpu")
    assert (accelerator.current_device_name(), accelerator.current_device()) == ("cpu", "cpu")
    assert (accelerator.communication_backend_name(), accelerator.is_available()) == ("gloo", True)
    assert accelerator.on_accelerator(torch.ones(1))
    assert not accelerator.on_accelerator(torch.ones(1, device="meta"))
    before = accelerator.memory_allocated()
    assert 0 < before < accelerator.total_memory()
    for act in (accelerator.synchronize, accelerator.empty_cache, accelerator.reset_peak_memory_stats):
        act()
    accelerator.set_device(0)
    with accelerator.device(0), accelerator.stream(accelerator.Stream()):
        state = accelerator.get_rng_state()
    accelerator.manual_seed(3)
    first = torch.rand(1)
    accelerator.set_rng_state(state)
    accelerator.manual_seed(3)
    assert torch.rand(1).equal(first)
    assert accelerator.is_bf16_supported()
    assert torch.float16 in accelerator.supported_dtypes()
    monkeypatch.setenv("REFIMPL_DEVICE", "cuda:1")
    assert (accelerator.device_name(), accelerator.device_name(1), accelerator.current_device_name()) == (
        "cuda", "cuda:1", "cuda:1",
    )  # fmt: skip
    assert accelerator.communication_backend_name() == "nccl"
    for name in ("allocated", "reserved"):
        for kind, size in ((f"memory_{name}", len(name)), (f"max_memory_{name}", 2 * len(name))):
            monkeypatch.setattr(torch.cuda, kind, lambda index, size=size: (index, size))
            assert getattr(accelerator, kind)() == (1, size)
            assert getattr(accelerator, kind)(0) == (0, size)
    assert (accelerator.memory_cached(), accelerator.max_memory_cached()) == ((1, 8), (1, 16))
    for kind in ("current", "default"):
        monkeypatch.setattr(torch.cuda, f"{kind}_stream", lambda index, kind=kind: (kind, index))
        stream = getattr(accelerator, f"{kind}_stream")
        assert (stream(), stream(0)) == ((kind, 1), (kind, 0))
    monkeypatch.setattr(torch.cuda, "get_rng_state", str)
    assert (accelerator.get_rng_state(), accelerator.get_rng_state(0)) == ("cuda:1", "cuda:0")
    seeds: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed", seeds.append)
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    before = torch.get_rng_state()
    accelerator.manual_seed(4)
    accelerator.manual_seed_all(5)
    assert seeds == [4, 5]
    assert torch.equal(torch.get_rng_state(), before), "the CPU's numbers are not the device's"


@pytest.mark.parametrize(
    ("local_rank", "current", "group", "device"),
    [
        (None, 0, None, "cuda:0"),  # one process, and nobody has started it
        (None, 2, None, "cuda:2"),
        ("1", 0, None, "cuda:1"),
        ("5", 0, None, "cuda:1"),  # this process sees four
        (None, 3, "cuda:nccl", "cuda:3"),  # a script's own, as of mp.spawn
        (None, 3, "cpu:gloo,cuda:gloo", "cpu"),
    ],
)
def test_the_accelerator_of_who_has_not_joined_is_where_its_engine_will_be(
    local_rank: str | None, current: int, group: str | None, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("REFIMPL_DEVICE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    if local_rank is not None:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    for name, value in {"is_available": True, "device_count": 4, "current_device": current}.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    if group is not None:
        monkeypatch.setattr(dist, "get_backend_config", lambda handle: group)
        world = SimpleNamespace(WORLD=SimpleNamespace(bound_device_id=None))
        monkeypatch.setattr(abstract_accelerator, "dist", SimpleNamespace(is_initialized=lambda: True, group=world))
    accelerator = deepspeed.get_accelerator()
    assert accelerator.current_device_name() == device
    assert accelerator.device_name() == device.partition(":")[0]


def test_timers_add_up_what_lies_between_start_and_stop(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """ArcticTraining's and DeepSpeed-MII's; the clock says 0, 1, 4, 9, ... seconds."""
    monkeypatch.setattr(timer, "_now", (n**2 for n in itertools.count()).__next__)
    timers = timer.SynchronizedWallClockTimer()
    assert isinstance(timers("step"), timer.SynchronizedWallClockTimer.Timer)
    for _ in range(2):
        timers("step").start()
        timers("step").stop()
    assert timers("step").mean() == 3000  # of 1 - 0 and 9 - 4 seconds
    assert timers("step").elapsed(reset=False) == 6000
    timers.log(["step", "unknown"], normalizer=2, memory_breakdown=True)
    assert capsys.readouterr().out.startswith("time (ms) | step: 3000.00 | mem_allocated: ")
    assert timers("step").elapsed() == timers("step").mean() == 0
    timers("step").start()  # at 16
    assert timers("step").elapsed() == 9000, "up to 25, and it goes on from 36"
    timers("step").stop()  # at 49
    assert timers.get_mean(["step", "unknown"]) == {"step": 13_000_000}
    with pytest.raises(RuntimeError, match="'step' does not run: call start"):
        timers("step").stop()
    timers("step").start()
    with pytest.raises(RuntimeError, match=r"'step' runs: call stop\(\)"):
        timers("step").start()


def test_files_that_a_script_writes_by_itself(tmp_path: Path) -> None:
    """ArcticTraining's experts; what would run at a load is refused."""
    files = TorchCheckpointEngine()
    info = CheckpointCommitInfo(tag="a", save_dir=f"{tmp_path}", save_latest=True)
    files.create(info)
    files.makedirs(f"{tmp_path / 'a'}", exist_ok=True)
    files.save({"w": torch.arange(3.0), "step": 2}, f"{tmp_path / 'a' / 'w.pt'}")
    back = files.load(f"{tmp_path / 'a' / 'w.pt'}", map_location="cpu")
    assert files.commit(info)
    assert (back["w"].tolist(), back["step"]) == ([0, 1, 2], 2)
    torch.save(SimpleNamespace(), tmp_path / "b.pt")
    with pytest.raises(pickle.UnpicklingError, match="SimpleNamespace"):
        files.load(f"{tmp_path / 'b.pt'}")


def test_calls_are_ranges_in_the_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    accelerator = type(deepspeed.get_accelerator())
    monkeypatch.setattr(accelerator, "range_push", lambda _, name: seen.append(name))
    monkeypatch.setattr(accelerator, "range_pop", lambda _: seen.append("end"))

    @deepspeed.utils.instrument_w_nvtx
    def divide(a: int, b: int) -> float:
        return a / b

    assert divide(1, b=2) == 0.5
    with pytest.raises(ZeroDivisionError):
        divide(1, 0)
    assert [name.rpartition(".")[2] for name in seen] == ["divide", "end"] * 2


def test_what_megatron_imports_before_it_trains(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    env_report.main()
    assert "refimpl" in capsys.readouterr().out
    assert timer.BACKWARD_INNER_MICRO_TIMER == "bwd_inner_microstep"
    assert deepspeed.checkpoint.PADDED_VOCAB_SIZE == "padded_vocab_size"
    (tmp_path / "hosts").write_text("a slots=2\n")
    assert runner.fetch_hostfile(tmp_path / "hosts") == {"a": 2}
    assert (runner.DLTS_HOSTFILE, runner.EXPORT_ENVS) == ("/job/hostfile", [])
    assert git_version_info.version == deepspeed.__version__
    assert not any(git_version_info.installed_ops.values())
    (tmp_path / "hosts").write_text("a slots=2\nb slots=0\n")
    with pytest.raises(ValueError, match="line 2: 'b slots=0' has no slot"):
        runner.fetch_hostfile(tmp_path / "hosts")


def test_builders_of_kernels_say_what_is_here_and_give_its_module() -> None:
    """Scripts build `CPUAdamBuilder` ahead of a run; DeepSpeed's tests skip by `__compatible_ops__[Builder.NAME]`."""
    from refimpl.deepspeed.ops.op_builder import AsyncIOBuilder, CPUAdamBuilder, QuantizerBuilder

    assert CPUAdamBuilder().load(verbose=False).DeepSpeedCPUAdam is deepspeed.ops.adam.DeepSpeedCPUAdam
    ops = deepspeed.ops.__compatible_ops__
    assert [ops[b.NAME] for b in (CPUAdamBuilder, AsyncIOBuilder, QuantizerBuilder)] == [True, True, False]
    with pytest.raises(NotImplementedError, match="QuantizerBuilder: quantizer is not part of this project"):
        QuantizerBuilder().load()
    assert deepspeed.ops.aio.AsyncIOBuilder is AsyncIOBuilder
    with pytest.raises(NotImplementedError, match="aio_handle: not part of this project: files that a script reads"):
        AsyncIOBuilder().load().aio_handle()
    assert type(deepspeed.get_accelerator().create_op_builder("FusedAdamBuilder")).NAME == "fused_adam"
    assert git_version_info.torch_info["version"] == ".".join(torch.__version__.split(".")[:2])


@pytest.mark.parametrize("known", [None, 1, 2])
def test_where_accelerate_takes_each_rank_for_a_job_of_its_own(
    known: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it does without a GPU, where no backend is named to it: ranks would train on the same data without a word."""
    shared = {} if known is None else {"num_processes": known}
    partial = SimpleNamespace(PartialState=SimpleNamespace(_shared_state=shared))
    monkeypatch.setitem(sys.modules, "accelerate.state", partial)  # type: ignore[arg-type]
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    with (
        pytest.warns(UserWarning, match="counts 1 process where 2 ranks.*use_cpu=True") if known == 1 else nullcontext()
    ):
        beside_accelerate.tell()


def test_an_operator_on_lists_in_chunks() -> None:
    flag, lists = torch.zeros(1), [[torch.ones(2)], [torch.ones(3)]]
    assert MultiTensorApply(2048)(lambda *args: args, flag, lists, 0.5) == (2048, flag, lists, 0.5)


@pytest.mark.parametrize("name", ["get_sd_loader", "get_sd_loader_json"])
def test_megatrons_files_are_not_merged_and_say_what_is(name: str) -> None:
    with pytest.raises(NotImplementedError, match=rf"SDLoaderFactory\.{name}: .* engine\.load_checkpoint reads"):
        getattr(SDLoaderFactory, name)({"type": "Megatron", "checkpoints": []}, None)


def test_what_mpirun_said_is_put_where_torch_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    written = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    for name in written:  # as it is, put back afterwards
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name, value in {"RANK": "1", "SIZE": "2", "LOCAL_RANK": "1", "LOCAL_SIZE": "2"}.items():
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", value)
    deepspeed.comm.mpi_discovery(distributed_port=1234)
    assert [os.environ[name] for name in written] == ["1", "2", "1", "2", "127.0.0.1", "1234"]


def test_messages_of_some_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    logger = deepspeed.utils.logger
    assert logger is logging.getLogger("DeepSpeed")
    level = logger.level
    try:
        deepspeed.utils.log_dist("too quiet", ranks=[0])
        print_dist("at any level", ranks=[0])
        deepspeed.utils.set_log_level_from_string("info")
        deepspeed.utils.log_dist("heard", ranks=[0])
        logger.warning_once("once")
        logger.warning_once("once")
        deepspeed.utils.log_dist_once("also once")
        deepspeed.utils.log_dist_once("also once")
        deepspeed.initialize(model=nn.Linear(2, 2), config={"train_batch_size": 1})
        deepspeed.initialize(model=nn.Linear(2, 2), config={"train_batch_size": 1, "log_level": "error"})
        assert logger.level == logging.ERROR  # of the script's own messages too, as in DeepSpeed
    finally:
        logger.setLevel(level)
        logging.getLogger("refimpl").setLevel(logging.NOTSET)
    said = capsys.readouterr().out
    assert "too quiet" not in said
    assert [said.count(text) for text in ("heard", " once\n", "also once", "at any level")] == [1, 2, 1, 1]
    assert said.count(f"DeepSpeed info: version={deepspeed.__version__}, ") == 2  # transformers' tests look for it
    with pytest.raises(ValueError, match="loud"):
        deepspeed.utils.set_log_level_from_string("loud")


def test_models_on_another_device_and_in_another_dtype() -> None:
    with deepspeed.OnDevice(dtype=torch.float16, device="meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        here = torch.ones(2, device="cpu")
        ints = torch.zeros(2, dtype=torch.long)
    assert {p.device.type for p in model.parameters()} == {"meta"}
    assert {p.dtype for p in model.parameters()} == {torch.float16}
    assert (here.device.type, here.dtype, ints.dtype) == ("cpu", torch.float16, torch.long)
    with deepspeed.OnDevice(dtype=torch.float16, enabled=False):
        assert torch.ones(1).dtype == torch.float32
    assert torch.ones(1).dtype == torch.float32


class TwoParts:
    """An mpu of which a script asks no more than this."""

    def get_data_parallel_world_size(self) -> int:
        return 1


def sizes_of_a_configuration() -> list[int]:
    """Samples a step that the same micro-batch is, by who lays the ranks out."""
    micro = {"train_micro_batch_size_per_gpu": 2}
    mesh = deepspeed.comm.initialize_mesh_device((1, 2), ("data_parallel", "sequence_parallel"))
    found = [
        deepspeed.DeepSpeedConfig(micro),
        deepspeed.DeepSpeedConfig(micro | {"train_batch_size": 2}, mpu=TwoParts()),
        deepspeed.DeepSpeedConfig(micro | {"train_batch_size": 2}, mesh_device=mesh),
        deepspeed.DeepSpeedConfig(micro | {"train_batch_size": 2, "tensor_parallel": {"autotp_size": 2}}),
        deepspeed.DeepSpeedConfig(micro | {"train_batch_size": 2, "sequence_parallel_size": 2}),
    ]
    with pytest.raises(deepspeed.DeepSpeedConfigError, match=r"pipeline.stages: 2 ranks are no multiple of 3"):
        deepspeed.DeepSpeedConfig(micro | {"pipeline": {"stages": 3}})
    return [config.train_batch_size for config in found]


def test_a_configuration_counts_the_ranks_that_read_other_batches() -> None:
    assert worlds.run(sizes_of_a_configuration, ranks=2) == [[4, 2, 2, 2, 2]] * 2


def test_a_file_that_a_script_reads_itself() -> None:
    read = partial(json.loads, object_pairs_hook=config_utils.dict_raise_error_on_duplicate_keys)
    found = read('{"bf16": {"enabled": true}}')
    assert config_utils.get_scalar_param(found["bf16"], "enabled", False) is True
    assert config_utils.get_dict_param(found, "fp16", None) is None
    with pytest.raises(ValueError, match="'enabled' occurs twice"):
        read('{"bf16": {"enabled": true, "enabled": false}}')


def test_a_configuration_by_itself(tmp_path: object) -> None:
    config = deepspeed.DeepSpeedConfig({"train_batch_size": 4, "bf16": {"enabled": True}})
    assert (config.train_micro_batch_size_per_gpu, config.bf16.enabled) == (4, True)
    with pytest.raises(deepspeed.DeepSpeedConfigError, match="train_batch_sizes"):
        deepspeed.DeepSpeedConfig({"train_batch_sizes": 4})
    assert os.environ.get("WORLD_SIZE", "1") == "1"


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_whose_optimizer_it_is(stage: int, dtype: str) -> None:
    """What isinstance says of DeepSpeed's classes, as scripts ask it; its slices are in fp32."""
    config = {"train_batch_size": 2, "optimizer": {"type": "Adam"}, "zero_optimization": {"stage": stage}}
    config |= {"bf16": {"enabled": True}} if dtype == "bf16" else {}
    engine, optimizer, *_ = deepspeed.initialize(model=nn.Linear(4, 4), config=config)
    found = {kind.__name__ for kind in KINDS if isinstance(optimizer, kind)}
    expected = {0: set(), 1: {"DeepSpeedZeroOptimizer"}, 2: {"DeepSpeedZeroOptimizer"}}
    by_stage = expected.get(stage, {"DeepSpeedZeroOptimizer_Stage3"})
    assert found == by_stage | ({"BF16_Optimizer"} if dtype == "bf16" and stage < 2 else set())
    assert isinstance(optimizer.optimizer, torch.optim.AdamW)
    assert {p.dtype for p in optimizer.single_partition_of_fp32_groups} == {torch.float32}
    assert not optimizer.needs_scaler()
    engine.empty_partition_cache()
    engine.destroy()
    assert not any(isinstance(torch.optim.SGD(nn.Linear(1, 1).parameters()), kind) for kind in KINDS)
    with pytest.raises(NotImplementedError, match="is for isinstance alone"):
        KINDS[0](optimizer)


def test_versions_of_torch() -> None:
    """By numbers, not by letters: 2.9 is before 2.11."""
    major, minor = map(int, torch.__version__.split(".")[:2])
    assert required_torch_version(min_version=f"{major}.{minor}")
    assert required_torch_version(min_version=1.8, max_version=f"{major}.{minor}")
    assert not required_torch_version(min_version=f"{major}.{minor + 1}")
    assert not required_torch_version(max_version=f"{major}.{minor - 1}")
    with pytest.raises(ValueError, match="give min_version"):
        required_torch_version()


@pytest.mark.parametrize(
    ("written", "asked"),
    [
        ("Lamb", constants.LAMB_OPTIMIZER),
        ("Muon", constants.MUON_OPTIMIZER),
        ("OneBitLamb", constants.ONEBIT_LAMB_OPTIMIZER),
        ("OneBitAdam", constants.ONEBIT_ADAM_OPTIMIZER),
        ("ZeroOneAdam", constants.ZERO_ONE_ADAM_OPTIMIZER),
        ("AdamW", constants.ADAMW_OPTIMIZER),
        ("SGD", "SGD"),  # torch's, as it is written
    ],
)
def test_an_engine_names_its_optimizer_as_the_constants_do(written: str, asked: str) -> None:
    """DeepSpeedExamples' bing_bert asks so whether to report LAMB's coefficients."""
    config = {"train_batch_size": 1, "optimizer": {"type": written, "params": {"lr": 0.1}}}
    assert deepspeed.initialize(model=nn.Linear(2, 2), config=config)[0].optimizer_name() == asked


def test_a_clients_optimizer_is_named_by_its_class() -> None:
    model, config = nn.Linear(2, 2), {"train_batch_size": 1, "zero_optimization": {"stage": 2}}
    engine = deepspeed.initialize(model=model, optimizer=torch.optim.NAdam(model.parameters()), config=config)[0]
    assert engine.optimizer_name() == "NAdam"
    assert deepspeed.initialize(model=nn.Linear(2, 2), config={"train_batch_size": 1})[0].optimizer_name() is None


def test_what_a_checkpoint_of_deepspeed_holds_can_be_named() -> None:
    """As scripts name it for torch.load(weights_only=True)."""
    with torch.serialization.safe_globals([ZeroStageEnum, LossScaler, fragment_address]):
        assert fragment_address(numel=2, start=4) == fragment_address(2, 4)
        assert ZeroStageEnum(2) == 2
        assert ZeroStageEnum.weights == ZeroStageEnum.max_stage == 3


def test_what_scripts_import_for_a_word_or_to_catch_it() -> None:
    from refimpl.deepspeed.checkpoint.constants import FP32_FLAT_GROUPS, UNIVERSAL_CHECKPOINT_INFO
    from refimpl.deepspeed.runtime.constants import GRADIENT_CLIPPING_DEFAULT, ROUTE_EVAL
    from refimpl.deepspeed.runtime.zero.utils import ZeRORuntimeException

    assert (FP32_FLAT_GROUPS, UNIVERSAL_CHECKPOINT_INFO) == ("fp32_flat_groups", "universal_checkpoint_info")
    engine = deepspeed.initialize(model=nn.Linear(2, 2), config={"train_batch_size": 1})[0]
    assert engine.gradient_clipping() == GRADIENT_CLIPPING_DEFAULT
    assert list(engine.deepspeed_io([0, 1, 2], 1, ROUTE_EVAL)) == [0, 1, 2]
    assert issubclass(ZeRORuntimeException, Exception)
    from refimpl.deepspeed.runtime.engine import MEMORY_OPT_ALLREDUCE_SIZE
    from refimpl.deepspeed.runtime.pipe import ProcessTopology

    assert (MEMORY_OPT_ALLREDUCE_SIZE, ProcessTopology(["pipe"], [1]).world_size()) == (500_000_000, 1)


def test_the_loader_of_an_engine_has_deepspeeds_name() -> None:
    data, config = [torch.ones(2)] * 3, {"train_batch_size": 1}
    loader = deepspeed.initialize(model=nn.Linear(2, 2), training_data=data, config=config)[2]
    assert isinstance(loader, DeepSpeedDataLoader)
    assert isinstance(loader.data_sampler, torch.utils.data.DistributedSampler)  # whose set_epoch scripts call
    assert loader.data_sampler is loader.sampler


def test_a_loader_made_by_hand_gives_each_rank_its_share() -> None:
    """h2o-llmstudio's, with a sampler of its own, and without one."""
    own = DeepSpeedDataLoader(range(5), 2, local_rank=0, pin_memory=False, tput_timer=None, data_sampler=[4, 1, 0])  # type: ignore[arg-type]
    assert ([batch.tolist() for batch in own], len(own)) == ([[4, 1], [0]], 2)
    more = {"tput_timer": None, "data_parallel_world_size": 2, "dataloader_drop_last": True}
    shares = [DeepSpeedDataLoader(range(6), 2, False, 0, data_parallel_rank=rank, **more) for rank in (0, 1)]  # type: ignore[arg-type]
    seen = [i for share in shares for batch in share for i in batch.tolist()]
    assert len(seen) == len(set(seen)) == 4
    assert sorted(i for batch in DeepSpeedDataLoader(range(3), 2, False, -1, None) for i in batch.tolist()) == [0, 1, 2]  # type: ignore[arg-type]


def pipelined() -> None:
    for seed_layers, seed in ((False, 1), (True, 7)):
        torch.manual_seed(1)
        specs = [deepspeed.pipe.LayerSpec(nn.Linear, 2, 2)]
        module = deepspeed.pipe.PipelineModule(specs, 1, seed_layers=seed_layers, base_seed=7)
        torch.manual_seed(seed)
        assert next(module.parameters()).equal(nn.Linear(2, 2).weight)
        assert module.stage_owner(0) == 0
        with pytest.raises(ValueError, match="there is no layer 1: the model has 1"):
            module.stage_owner(1)
    engine, *_ = deepspeed.initialize(model=module, config={"train_batch_size": 1})
    assert engine.mpu is module.grid  # as determined asks it


def test_layers_of_a_pipeline_have_a_stage_and_a_seed_of_their_own_if_asked() -> None:
    worlds.run(pipelined, ranks=1)
