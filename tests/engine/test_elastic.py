"""One batch for many numbers of ranks: which batch, against a search; and a run that goes on with it on other ranks."""

import json
from math import lcm
from pathlib import Path
from typing import Any

import pytest
import torch
import worlds
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import refimpl
from refimpl.engine.config import load_config
from refimpl.engine.configuration.batch import MICRO, STEPS, TRAIN
from refimpl.engine.configuration.elasticity import (
    SCHEDULER,
    ElasticityConfigError,
    ElasticityError,
    ElasticityIncompatibleWorldSize,
    read,
    shared,
)
from refimpl.engine.configuration.keys import ConfigError
from refimpl.engine.configuration.sections import Elasticity
from refimpl.engine.elastic import choose, most_divisible
from refimpl.launch import RankError
from refimpl.model.gpt import GPT, GPTConfig

TWELVE = {"enabled": True, "max_train_batch_size": 12, "micro_batch_sizes": [1, 2], "version": 0.1}  # the batch is 12


def divisors(n: int) -> int:
    return sum(n % d == 0 for d in range(1, n + 1))


def test_the_most_divisible_number() -> None:
    counts = [divisors(n) for n in range(1, 800)]
    for limit in range(1, 800):
        assert most_divisible(limit) == 1 + counts.index(max(counts[:limit]))  # the first with as many
    # Of 38 such numbers the last that DeepSpeed lists, and the next (A002182 of the OEIS), which it does not.
    assert [most_divisible(n) for n in (720_720, 1_081_079, 1_081_080)] == [720_720, 720_720, 1_081_080]


def search(micro_batches: set[int], most: int, ranks: range, larger: bool) -> tuple[int, list[int]]:
    """The rule as it is told: of each base's largest highly composite multiple the one with the most numbers."""
    records = [n for n in range(1, most + 1) if all(divisors(n) > divisors(k) for k in range(1, n))]
    found = {}
    for base in (*micro_batches, lcm(*micro_batches)):
        for batch in [base * max(n for n in records if n * base <= most)] if base <= most else []:
            triples = {
                n for n in ranks for m in micro_batches for steps in [batch // (m * n)] if m * steps * n == batch
            }
            found[batch] = sorted(n for n in triples if n <= batch)
    longest = max(map(len, found.values()))
    batches = [batch for batch, numbers in found.items() if len(numbers) == longest]
    batch = max(batches) if larger else min(batches)
    return batch, found[batch]


SIZES = st.sets(st.integers(1, 12), min_size=1, max_size=4)


@given(SIZES, st.integers(12, 90), st.integers(1, 9), st.integers(0, 90), st.booleans())
def test_it_is_what_a_search_finds(micro: set[int], most: int, low: int, more: int, larger: bool) -> None:
    ranks = range(low, low + more + 1)
    batch, numbers = choose(micro, most, ranks, larger)
    assert (batch, numbers) == search(micro, most, ranks, larger)
    assert batch <= most
    assert numbers == [n for n in ranks if any(batch % (m * n) == 0 for m in micro)]


@given(SIZES, st.integers(12, 10**6), st.sampled_from([1, 2, 4, 6, 8]), st.data())
def test_every_number_shares_the_batch_and_none_is_outside(
    micro: set[int], most: int, node: int, data: st.DataObject
) -> None:
    """Version 0.2, by machines; every divisor of a machine's ranks as the ranks that share a model."""
    together = data.draw(st.sampled_from([t for t in range(1, node + 1) if node % t == 0]))
    low = data.draw(st.integers(1, node))
    given = {"enabled": True, "max_train_batch_size": most * node, "micro_batch_sizes": sorted(micro)}
    given |= {"min_gpus": low, "max_gpus": low + 100, "num_gpus_per_node": node, "model_parallel_size": together}
    section = read({"elasticity": given})
    assert section is not None
    found = shared(section)
    assert found.batch <= most * node
    assert found.ranks == tuple(sorted(found.ranks))
    for ranks in found.ranks:
        assert low <= ranks * together <= low + 100
        assert ranks % (node // together) == 0
        sizes = found.triple(ranks)
        assert sizes[TRAIN] == found.batch == sizes[MICRO] * sizes[STEPS] * ranks
        assert sizes[MICRO] == max(m for m in micro if (found.batch // ranks) % m == 0)
    machines = {ranks * together // node for ranks in found.ranks}
    for n in {n for n in range(1, 130) if low <= n * node <= low + 100} - machines:
        with pytest.raises(ElasticityIncompatibleWorldSize):
            found.triple(n * node // together)


def test_a_machine_is_not_cut_to_meet_a_bound() -> None:
    """12 ranks at least are two machines of 8: DeepSpeed counts one, which is too few."""
    machines = {"version": 0.2, "num_gpus_per_node": 8, "max_train_batch_size": 96, "min_gpus": 12, "max_gpus": 40}
    found = shared(Elasticity(**TWELVE | machines))
    assert (found.batch, found.ranks) == (96, (16, 24, 32))


def section(**changed: Any) -> dict[str, Any]:
    return {"elasticity": TWELVE | changed}


def test_the_three_sizes_are_the_elastic_ones_on_every_number_of_ranks() -> None:
    for ranks, micro, steps in ((1, 2, 6), (2, 2, 3), (3, 2, 2), (4, 1, 3), (6, 2, 1), (12, 1, 1)):
        loaded = load_config(section(), world_size=ranks)
        assert (loaded.train_batch_size, loaded.train_micro_batch_size_per_gpu) == (12, micro)
        assert loaded.gradient_accumulation_steps == steps
    with pytest.raises(ElasticityIncompatibleWorldSize, match=r"^elasticity: 5 data.* of 12; .*: 1, 2, 3, 4, 6, 12\."):
        load_config(section(), world_size=5)


def test_sizes_beside_it_are_an_error_unless_it_says_that_they_have_no_effect() -> None:
    beside = {TRAIN: 64, STEPS: 1}
    with pytest.raises(ElasticityConfigError, match=f"^{TRAIN}, {STEPS}: elasticity .*ignore_non_elastic_batch_info"):
        load_config(section() | beside, world_size=2)
    loaded = load_config(section(ignore_non_elastic_batch_info=True) | beside, world_size=2)
    assert loaded == load_config(section(ignore_non_elastic_batch_info=True), world_size=2)
    assert load_config(section() | dict.fromkeys((TRAIN, MICRO, STEPS), "auto"), world_size=2).train_batch_size == 12


def test_a_resolved_configuration_is_read_again() -> None:
    loaded = load_config(section(), world_size=2)
    assert load_config(loaded.model_dump(), world_size=2) == loaded
    with pytest.raises(ElasticityConfigError, match=f"^{STEPS}: elasticity chooses"):  # of 3 ranks another
        load_config(loaded.model_dump(), world_size=3)


def test_the_documentations_spelling_is_the_codes() -> None:
    """Of 4, which 1, 2 and 4 ranks share, and 6, which 1, 2 and 3 do. DeepSpeed does not read the first spelling."""
    chosen = {"max_train_batch_size": 6, "micro_batch_sizes": [1, 4], "max_gpus": 4}
    for name in ("prefer_large_batch", "prefer_larger_batch"):
        found = [load_config(section(**chosen, **{name: on}), world_size=1).train_batch_size for on in (True, False)]
        assert found == [6, 4], name
    with pytest.raises(
        ElasticityConfigError, match=r"prefer_large_batch and elasticity\.prefer_larger_batch mean the same"
    ):
        read(section(prefer_large_batch=True, prefer_larger_batch=True))


def test_a_section_that_is_off_is_not_read() -> None:
    off = {"elasticity": {"enabled": False, "micro_batch_sizes": "none", "min_gpus": -1, "min_time": 20}}
    assert load_config(off | {TRAIN: 4}, world_size=2) == load_config({TRAIN: 4}, world_size=2)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"micro_batch_sizes": 5}, "elasticity.micro_batch_sizes: "),
        ({"micro_batch_sizes": []}, "elasticity.micro_batch_sizes: "),
        ({"micro_batch_sizes": [2, 0.5, 4]}, "elasticity.micro_batch_sizes.1: "),
        ({"micro_batch_sizes": [1, 13]}, "elasticity.micro_batch_sizes: 13: more than elasticity.max_train_batch_size"),
        ({"max_train_batch_size": 0}, "elasticity.max_train_batch_size: "),
        ({"min_gpus": 3, "max_gpus": 2}, "elasticity.max_gpus = 2: less than min_gpus = 3"),
        ({"min_gpus": 13}, "elasticity: no number of ranks from min_gpus = 13 to max_gpus = 10000 shares a batch"),
        ({"version": 0.3}, "elasticity.version = 0.3: must be 0.1 or 0.2"),
        ({"model_parallel_size": 2}, "elasticity.model_parallel_size = 2: .* set elasticity.version to 0.2"),
        (
            {"version": 0.2, "num_gpus_per_node": 6, "model_parallel_size": 4},
            "elasticity.num_gpus_per_node = 6: must be a multiple of model_parallel_size = 4",
        ),
        (
            {"version": 0.2, "num_gpus_per_node": 8},
            "elasticity.micro_batch_sizes: 2 on each of 8 data-parallel ranks of a machine: more than",
        ),
        ({"version": 0.2, "num_gpus_per_node": 4, "max_gpus": 3}, "elasticity: no number of ranks"),
    ],
)
def test_what_is_wrong_is_named(changed: dict[str, Any], says: str) -> None:
    """DeepSpeed takes the last as any number, and trains."""
    with pytest.raises(ElasticityError, match=f"^{says}"):
        load_config(section(**changed), world_size=2)
    assert issubclass(ElasticityError, ConfigError)


def test_who_starts_the_ranks_must_have_read_the_same_section(monkeypatch: pytest.MonkeyPatch) -> None:
    said = {"min_time": 20, "ignore_non_elastic_batch_info": True}  # of no effect on the batch
    monkeypatch.setenv(SCHEDULER, json.dumps(TWELVE | said))
    assert load_config(section(), world_size=2).train_batch_size == 12
    with pytest.raises(ElasticityConfigError, match=r"min_gpus 1 there, 2 here: give both the same$"):
        load_config(section(min_gpus=2), world_size=2)
    for text, says in (("{", "is not JSON"), ("{}", "no section with enabled"), ('{"enabled": 1, "x": 1}', r"\.x: ")):
        monkeypatch.setenv(SCHEDULER, text)
        with pytest.raises(ElasticityConfigError, match=f"{SCHEDULER}.*{says}"):
            load_config(section(), world_size=2)


class Net(nn.Module):
    """In fp64, so that rounding is small."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


def steps(stage: int, folder: Path, count: int, save_at: int = 0) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and weights of `count` steps behind the checkpoint in `folder`, if there is one; save one at `save_at`."""
    data = torch.utils.data.TensorDataset(torch.randn(36, 3, generator=torch.Generator().manual_seed(1)).double())
    config = section() | {
        "optimizer": {"type": "AdamW", "params": {"lr": 0.05}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    engine, *_ = refimpl.initialize(model=Net(), config=config, training_data=data)
    assert engine.elasticity_enabled()
    assert engine.train_batch_size() == 12
    if (folder / "latest").exists():
        engine.load_checkpoint(folder)
    losses = []
    for step in range(1, count + 1):
        losses.append(engine.train_batch().item())
        if step == save_at:
            engine.save_checkpoint(folder)
    return losses, {name: w.clone() for name, w in (engine.stage.full_state_dict() or {}).items()}


@pytest.mark.parametrize("stage", [1, 3])
def test_a_run_goes_on_with_its_batch_on_any_of_these_ranks(stage: int, tmp_path: Path) -> None:
    """The steps behind the second, of two ranks that never stopped: an epoch's last, and the next one's first."""
    (losses, weights), _ = worlds.run(steps, stage, tmp_path, 4, 2, ranks=2)
    assert len(set(losses)) == 4
    for ranks in (1, 3, 4):
        (again, reached), *_ = worlds.run(steps, stage, tmp_path, 2, ranks=ranks)
        assert again == pytest.approx(losses[2:], rel=1e-6)  # a loss is reported in fp32
        torch.testing.assert_close(reached, weights, rtol=1e-10, atol=1e-12)


def laid_out(together: int) -> tuple[int, int, int]:
    config = section(version=0.2, num_gpus_per_node=together, model_parallel_size=together)
    shape = GPTConfig(vocab=19, context=8, width=64, layers=1, heads=4)
    engine, *_ = refimpl.initialize(model=GPT(shape), config=config | {"tensor_parallel": {"autotp_size": 2}})
    return engine.get_batch_info()


def test_ranks_that_share_a_model_are_one_of_the_batch() -> None:
    assert worlds.run(laid_out, 2, ranks=2) == [(12, 2, 6)] * 2
    with pytest.raises(RankError, match=r"elasticity\.model_parallel_size = 1, but the ranks are laid out with 2"):
        worlds.run(laid_out, 1, ranks=2)
