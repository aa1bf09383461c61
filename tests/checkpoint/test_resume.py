"""N steps are k steps, an end, and N - k steps of processes that know nothing of it: the bits of all that is drawn."""

import random
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import worlds
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import refimpl


class Noisy(nn.Module):
    """Dropout, a buffer of each rank, data that must come in order, and other random numbers in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(5, 9), nn.Linear(9, 1)
        self.norm = nn.BatchNorm1d(9)
        self.seen: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append((x[:, 0].tolist(), random.random(), float(np.random.randn()), random.gauss(0, 1)))  # noqa: NPY002
        x = x.to(self.into.weight.dtype)
        hidden = nn.functional.dropout(self.norm(self.into(x)).relu(), 0.5)
        loss = self.out(hidden).float().square().mean()
        return loss * (1e9 if len(self.seen) == 2 and self.overflow else 1)

    overflow = False


def settings(stage: int, section: str) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0.001, "cycle_max_lr": 0.01}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 10},
        "gradient_clipping": 0.5,
        **({} if section == "fp32" else {section: {"enabled": True}}),
        **({"fp16": {"enabled": True, "initial_scale_power": 12, "hysteresis": 1}} if section == "fp16" else {}),
    }


def run(config: dict[str, Any], folder: Path, steps: range, seed: int, asynchronous: bool = False) -> Any:
    """Train steps; go on from `folder` if it has a checkpoint, and save one into it at the end."""
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    torch.manual_seed(0)
    model = Noisy()
    data = TensorDataset(torch.randn(36, 5, generator=torch.Generator().manual_seed(1)))
    torch.manual_seed(seed + rank)
    random.seed(seed + rank)
    np.random.seed(seed + rank)  # noqa: NPY002
    np.random.randn()  # noqa: NPY002 (it draws two and keeps one)
    engine = refimpl.initialize(model=model, config=config, training_data=data)[0]
    if steps.start:
        assert engine.load_checkpoint(folder)[0] is not None
    model.overflow = "fp16" in config and steps.start == 0
    losses = [engine.train_batch().item() for _ in steps]
    engine.save_checkpoint(folder, asynchronous=asynchronous)
    engine.wait_for_checkpoint()
    scaler = engine.stage.scaler
    end = {name: w.clone() for name, w in (engine.stage.full_state_dict() or {}).items()}
    moments = {n: engine.stage.full_state(n, "exp_avg") for n in ("into.weight", "out.bias")}
    rates = engine.get_lr(), engine.skipped_steps, None if scaler is None else scaler.state_dict()
    return model.seen, losses, rates, {k: v.tolist() for k, v in (end | moments).items()}


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(("stage", "section"), [(0, "fp16"), (1, "fp32"), (2, "bf16"), (3, "fp32"), (3, "fp16")])
def test_a_run_that_was_stopped_draws_what_it_would_have_drawn(
    stage: int, section: str, ranks: int, tmp_path: Path
) -> None:
    config = settings(stage, section)
    whole = worlds.run(run, config, tmp_path / "whole", range(6), 0, ranks=ranks)
    first = worlds.run(run, config, tmp_path / "cut", range(3), 0, ranks == 3, ranks=ranks)
    second = worlds.run(run, config, tmp_path / "cut", range(3, 6), 1234, ranks=ranks)
    for rank in range(ranks):
        assert whole[rank][0] == first[rank][0] + second[rank][0]
        assert whole[rank][1] == first[rank][1] + second[rank][1]
        assert whole[rank][2:] == second[rank][2:]
    assert (whole[0][2][1] > 0) == (section == "fp16")  # the scaler has something to remember
    assert whole[0][0] != whole[1][0]


def one_step_late(folder: Path, go_on: bool) -> Any:
    """Losses and weights of the three steps behind a save."""
    torch.manual_seed(0)
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu", "delayed_update": True}}
    data = TensorDataset(torch.randn(36, 5, generator=torch.Generator().manual_seed(1)))
    config = settings(2, "fp32") | {"zero_optimization": zero}
    engine = refimpl.initialize(model=Noisy(), config=config, training_data=data)[0]
    if go_on:
        engine.load_checkpoint(folder)
    else:
        for _ in range(3):
            engine.train_batch()
        engine.save_checkpoint(folder)
    losses = [engine.train_batch().item() for _ in range(3)]
    return losses, {name: w.tolist() for name, w in (engine.stage.full_state_dict() or {}).items()}


def test_a_late_update_is_in_the_checkpoint_and_in_the_step_that_follows_it(tmp_path: Path) -> None:
    assert worlds.run(one_step_late, tmp_path, False, ranks=2) == worlds.run(one_step_late, tmp_path, True, ranks=2)


def drawn(folder: Path, seed: int, go_on: bool) -> float:
    """This rank's next random number, after a save or a load."""
    torch.manual_seed(seed + torch.distributed.get_rank())
    engine = refimpl.initialize(model=Noisy(), config=settings(0, "fp32"))[0]
    if go_on:
        engine.load_checkpoint(folder)
    else:
        engine.save_checkpoint(folder)
    return torch.rand(1).item()


def test_random_numbers_are_carried_over_to_ranks_of_the_same_number_alone(tmp_path: Path) -> None:
    saved = worlds.run(drawn, tmp_path, 0, False, ranks=3)
    assert len(set(saved)) == 3
    assert worlds.run(drawn, tmp_path, 10, True, ranks=3) == saved
    assert worlds.run(drawn, tmp_path, 20, True, ranks=2) == saved[:2], "the third stream has no rank to go on"
    more = worlds.run(drawn, tmp_path, 30, True, ranks=4)
    assert more[:3] == saved
    assert more[3] not in saved


def test_random_states_can_be_left_alone(tmp_path: Path) -> None:
    engine = refimpl.initialize(model=Noisy(), config=settings(0, "fp32"))[0]
    engine.save_checkpoint(tmp_path)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    engine.load_checkpoint(tmp_path, load_random_states=False)
    assert torch.equal(torch.get_rng_state(), before)
    (tmp_path / "rng_state_0.pth").touch()  # transformers' Trainer has its own, which it puts back behind its sampler
    engine.load_checkpoint(tmp_path)
    assert torch.equal(torch.get_rng_state(), before)
    (tmp_path / "rng_state_0.pth").unlink()
    engine.load_checkpoint(tmp_path)
    assert not torch.equal(torch.get_rng_state(), before)


def test_a_save_between_two_micro_batches_says_what_it_loses(tmp_path: Path) -> None:
    engine = refimpl.initialize(model=Noisy(), config=settings(0, "fp32"))[0]
    engine.backward(engine(torch.randn(2, 5)))
    with pytest.warns(UserWarning, match="1 micro-batch.*not saved"):
        engine.save_checkpoint(tmp_path)
    engine.step()
    engine.backward(engine(torch.randn(2, 5)))
    engine.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.save_checkpoint(tmp_path)
