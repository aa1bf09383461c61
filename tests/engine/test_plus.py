"""ZeRO++ and MiCS by the keys of DeepSpeed's JSON: trained, saved, loaded into another kind of ZeRO-3, refused."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from worlds import run

from refimpl.comm.group import Group
from refimpl.engine.config import load_config
from refimpl.engine.configuration.keys import ConfigError, ConfigWarning
from refimpl.engine.initialize import initialize
from refimpl.model.gpt import GPT, GPTConfig
from refimpl.zero.init import Init
from refimpl.zero.zero3 import Zero3

SHAPE = GPTConfig(vocab=19, context=8, width=20, layers=2, heads=2)
ZEROPP = {
    "zero_quantized_weights": True,
    "zero_quantized_nontrainable_weights": True,
    "zero_hpz_partition_size": 2,
    "zero_quantized_gradients": True,
    "zeropp_loco_param": {"err_beta": 0.5},
}
MICS = {"mics_shard_size": 4, "mics_hierarchical_params_gather": True}


def config(**zero: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 30, **zero},
    }


def engine_of(patch: pytest.MonkeyPatch, zero: dict[str, Any], seed: int = 0, **more: Any) -> Any:
    patch.setenv("REFIMPL_RANKS_PER_NODE", "2")
    torch.manual_seed(seed)
    with Init():
        model = GPT(SHAPE)
    model.wpe.requires_grad_(False)
    return initialize(model=model, config={**config(**zero), **more})[0]


def losses(engine: Any, steps: range) -> list[float]:
    found = []
    for step in steps:
        data = []
        for micro in range(2):
            generator = torch.Generator().manual_seed(100 * step + 10 * micro + engine.global_rank)
            ids = torch.randint(SHAPE.vocab, (2, SHAPE.context + 1), generator=generator)
            data.append((ids[:, :-1], ids[:, 1:]))
        found.append(engine.train_batch(iter(data)).item())
    return found


def saved(zero: dict[str, Any], folder: Path) -> tuple[dict[str, Tensor], list[float]]:
    """The weights after two steps, which are saved, and the losses of two more."""
    with pytest.MonkeyPatch.context() as patch:
        engine = engine_of(patch, zero)
        losses(engine, range(2))
        engine.save_checkpoint(folder)
        weights = {name: engine.stage.full_parameter(name) for name in engine.stage.names.values()}
        return weights, losses(engine, range(2, 4))


def resumed(zero: dict[str, Any], folder: Path) -> tuple[dict[str, Tensor], list[float]]:
    with pytest.MonkeyPatch.context() as patch:
        engine = engine_of(patch, zero, seed=7)
        losses(engine, range(1))  # second shards are fresh, errors are kept
        engine.load_checkpoint(folder)
        weights = {name: engine.stage.full_parameter(name) for name in engine.stage.names.values()}
        return weights, losses(engine, range(2, 4))


@pytest.mark.parametrize(("there", "here"), [(ZEROPP, {}), ({}, ZEROPP), (ZEROPP, ZEROPP), (MICS, ZEROPP)], ids=str)
def test_a_checkpoint_goes_on_in_another_kind_of_zero3(
    there: dict[str, Any], here: dict[str, Any], tmp_path: Path
) -> None:
    before, expected = run(saved, there, tmp_path, ranks=4)[0]
    for weights, found in run(resumed, here, tmp_path, ranks=4):
        rounded = "zero_quantized_nontrainable_weights"
        for name, w in weights.items():
            if name == "wpe.weight" and rounded in here and rounded not in there:
                torch.testing.assert_close(w, before[name], rtol=0, atol=w.abs().max().item() / 127)  # rests rounded
            else:
                assert torch.equal(w, before[name]), name
        assert found == pytest.approx(expected, rel=0.02), "the weights are equal; rounding moves the loss a little"


FP16 = {"bf16": {"enabled": False}, "fp16": {"enabled": True, "initial_scale_power": 6, "loss_scale_window": 3}}
FEEDBACK = {key: value for key, value in ZEROPP.items() if "nontrainable" not in key}


def loco(engine: Any) -> dict[str, Any]:
    state = engine.stage.owing.state_dict()
    return {f"{saved['unit']} {saved['hop']}": saved for saved in state["errors"]}


def stopped(folder: Path) -> tuple[list[float], dict[str, Any], dict[str, Tensor]]:
    """After three steps, which are saved: the losses of two more, the errors saved, the weights at the end."""
    with pytest.MonkeyPatch.context() as patch:
        engine = engine_of(patch, FEEDBACK, **FP16)
        losses(engine, range(3))
        engine.save_checkpoint(folder)
        errors = loco(engine)
        return losses(engine, range(3, 5)), errors, weights_of(engine)


def gone_on(folder: Path) -> tuple[list[float], dict[str, Any], dict[str, Tensor]]:
    with pytest.MonkeyPatch.context() as patch:
        engine = engine_of(patch, FEEDBACK, seed=7, **FP16)
        losses(engine, range(1))
        engine.load_checkpoint(folder)
        errors = loco(engine)
        return losses(engine, range(3, 5)), errors, weights_of(engine)


def weights_of(engine: Any) -> dict[str, Tensor]:
    return {name: engine.stage.full_parameter(name) for name in engine.stage.names.values()}


def test_what_rounding_owes_goes_on_bit_for_bit(tmp_path: Path) -> None:
    """Losses and weights are equal only if the errors of both hops are, the loss scale's growth between included."""
    there, here = run(stopped, tmp_path, ranks=4), run(gone_on, tmp_path, ranks=4)
    for (expected, saved, weights), (found, loaded, end) in zip(there, here, strict=True):
        assert {key.rpartition(" ")[2] for key in saved} == {"near", "far"}
        assert saved.keys() == loaded.keys()
        assert any(s["codes"].any() for s in saved.values())
        for key, s in saved.items():
            assert all(torch.equal(s[part], loaded[key][part]) for part in ("scales", "codes")), key
        assert found == expected
        assert all(torch.equal(end[name], w) for name, w in weights.items())


def without_errors(folder: Path) -> tuple[list[str], int]:
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine = engine_of(patch, {**FEEDBACK, "zero_hpz_partition_size": 1}, seed=7, **FP16)
        engine.load_checkpoint(folder)
        kept = len(loco(engine))
        losses(engine, range(3, 4))
    return [str(w.message) for w in caught if "zeropp_loco_param" in str(w.message)], kept


def test_on_another_number_of_ranks_what_rounding_owes_is_dropped(tmp_path: Path) -> None:
    run(stopped, tmp_path, ranks=4)
    (said, kept), (other, _) = run(without_errors, tmp_path, ranks=2)
    assert "errors are of 4 ranks on 2 nodes, here are 2 on 1: error feedback begins at zero" in said[0]
    assert (len(said), other, kept) == (1, [], 0)


def asked(zero: dict[str, Any], **more: Any) -> str:
    with pytest.raises(ConfigError) as error:
        initialize(model=nn.Linear(4, 4), config={**config(**zero), **more})
    return str(error.value)


@pytest.mark.parametrize(
    ("zero", "said"),
    [
        ({"zeropp_loco_param": {}}, "zeropp_loco_param is of quantised gradients"),
        ({"zeropp_loco_param": {"beta": 1}, "zero_quantized_gradients": True}, "zeropp_loco_param.beta: unknown key"),
        ({"zeropp_loco_param": {"err_beta": 1.5}, "zero_quantized_gradients": True}, "zeropp_loco_param.err_beta"),
        ({"zero_quantized_weights": "yes please"}, "zero_quantized_weights"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_by_name(zero: dict[str, Any], said: str) -> None:
    assert said in asked(zero)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_below_stage_3_they_have_no_effect_which_a_warning_says(stage: int) -> None:
    """open-instruct writes zero_hpz_partition_size 8 at every stage."""
    for zero in (ZEROPP, {"zero_hpz_partition_size": 8}):
        with pytest.warns(ConfigWarning, match=f"{'.*'.join(zero)}: .* stage 3 only, not in stage {stage}; no effect"):
            dropped = load_config(config(**zero, stage=stage), world_size=1)
        assert dropped == load_config(config(stage=stage), world_size=1)
    nothing = {"zero_hpz_partition_size": 0, "offload_param": {"device": "none", "buffer_count": 4}}
    load_config(config(stage=stage, **nothing), world_size=1)


def too_few(config: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as error:
        initialize(model=nn.Linear(4, 4), config=config)
    return str(error.value)


def test_shards_that_do_not_divide_the_ranks_are_refused_by_the_keys_name() -> None:
    (said, _) = run(too_few, config(mics_shard_size=3), ranks=2)
    assert said == "zero_optimization.mics_shard_size: 2 ranks are no multiple of shard 3 = 3: start a multiple of 3"


def test_a_disk_for_parameters_and_second_shards_exclude_each_other(tmp_path: Path) -> None:
    param = {"device": "nvme", "nvme_path": str(tmp_path)}
    assert "zero_hpz_partition_size" in asked({"zero_hpz_partition_size": 2, "offload_param": param})


def offloaded(folder: Path) -> list[list[float]]:
    """Losses with the optimizer, and the parameters, on a disk, rounded gathers and sums; and in memory."""
    disk = {"device": "nvme", "nvme_path": str(folder)}
    found = []
    plus = {key: value for key, value in ZEROPP.items() if "hpz" not in key}
    for zero in (plus, plus | {"offload_optimizer": disk}, plus | {"offload_optimizer": disk, "offload_param": disk}):
        with pytest.MonkeyPatch.context() as patch:
            found.append(losses(engine_of(patch, zero), range(2)))
    return found


def test_homes_change_nothing(tmp_path: Path) -> None:
    memory, optimizer, both = run(offloaded, tmp_path, ranks=4)[0]
    assert memory == optimizer
    assert memory == pytest.approx(both, rel=0.02), "a frozen shard on the disk rests there unrounded"


def groups() -> tuple[int, int, int]:
    with pytest.MonkeyPatch.context() as patch:
        stage = engine_of(patch, {**MICS, "mics_shard_size": "2"}).stage  # as for every other size
    assert isinstance(stage, Zero3)
    return stage.group.size, Group.world().size, stage.units[0].mine.numel() * 2 - stage.units[0].padded


def test_mics_shards_over_so_many_ranks() -> None:
    assert run(groups, ranks=4) == [(2, 4, 0)] * 4
