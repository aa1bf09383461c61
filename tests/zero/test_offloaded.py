"""Optimizer state in another home: the same bits, in the memory of a few buffers, also when it is looked at."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import pairwise
from torch import Tensor, nn
from training import STAGES, Job, Net, adamw, differing, oracle, tokens, train
from worlds import run

from refimpl.comm.group import Group
from refimpl.offload.homes import Disk, Host
from refimpl.optim.lion import Lion
from refimpl.optim.loss_scale import LossScaler
from refimpl.zero.config import ZeroConfig
from refimpl.zero.flat import Bucket
from refimpl.zero.zero2 import Zero2

HOMES = {"host": lambda folder: Host(), "disk": lambda folder: Disk(folder)}
every_home = pytest.mark.parametrize("home", list(HOMES))
every_stage = pytest.mark.parametrize("stage", list(STAGES))


def in_home(job: Job, home: str, folder: Path, sub_group_size: int = 128) -> Job:
    return replace(job, config=job.config | {"optimizer_home": HOMES[home](folder), "sub_group_size": sub_group_size})


def expected(stage: str, ranks: int, job: Job) -> dict[str, Tensor]:
    """One process's weights: in the order in which the stage adds micro-batches."""
    return oracle(ranks, job, ranks_first=stage in ("zero2", "zero3"))


# Of two groups, in two micro-batches, clipped.
FP32 = Job(micro_batches=2, clip=0.05)


@pytest.mark.parametrize(("stage", "home", "ranks"), pairwise([*STAGES], [*HOMES], [2, 3, 4]))
def test_fp32_equals_one_process_bit_for_bit(stage: str, home: str, ranks: int, tmp_path: Path) -> None:
    out = run(train, stage, in_home(FP32, home, tmp_path), ranks=ranks)[0]
    assert differing(out.weights, expected(stage, ranks, FP32)) == []


@every_home
@every_stage
def test_bf16_equals_the_same_stage_without_it(stage: str, home: str, tmp_path: Path) -> None:
    job = Job(dtype=torch.bfloat16, micro_batches=2)
    plain = run(train, stage, job, ranks=3)[0].weights
    assert plain is not None
    assert differing(run(train, stage, in_home(job, home, tmp_path), ranks=3)[0].weights, plain) == []


def with_gradients(job: Job, folder: Path, home: str = "disk") -> Job:
    """Gradients rest there too."""
    job = in_home(job, home, folder)
    return replace(job, config=job.config | {"gradient_home": job.config["optimizer_home"]})


shards = pytest.mark.parametrize("stage", ["zero2", "zero3"])


@pytest.mark.parametrize(("stage", "home", "ranks"), pairwise(["zero2", "zero3"], [*HOMES], [2, 3, 4]))
def test_gradients_at_rest_give_the_same_bits(stage: str, home: str, ranks: int, tmp_path: Path) -> None:
    out = run(train, stage, with_gradients(FP32, tmp_path, home), ranks=ranks)[0]
    assert differing(out.weights, expected(stage, ranks, FP32)) == []
    assert (out.memory["gradients"] == 0) is (home == "disk")


class AllUsed(Net):
    """No layer is unused: that would hold all buckets behind it back to the end of backward."""

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) + self.unused(self.embed(tokens)).square().mean()


@shards
@every_home
def test_gradients_leave_bucket_by_bucket_inside_backward(stage: str, home: str, tmp_path: Path) -> None:
    job = Job(steps=1, make=AllUsed, config={"reduce_bucket_size": 300})
    events = run(train, stage, with_gradients(job, tmp_path, home), ranks=2)[0].events
    names = [event.op.split()[0] for event in events if event.phase == "mark"]
    assert names.count("home") > 2
    assert "grad" in names[names.index("home") :], "a gradient arrives after another has left"


def returned(home: Host) -> list[tuple[bool, bool]]:
    """Runs on every rank: of each part when the next one's update begins: has the model its new weights; are they new.

    On a GPU that is a copy, which then runs beside the update.
    """
    torch.manual_seed(0)
    config = ZeroConfig(optimizer_home=home, sub_group_size=128)
    model = AllUsed()
    here = Zero2(model, adamw(model), Group.world(), config)
    slices, owned, seen = here.update.slices, here.update.owned, list[tuple[Bucket, slice, Tensor, Tensor]]()
    plain, before = slices.step_inside, list[tuple[Bucket, slice, Tensor]]()

    def watched(bucket: Bucket, start: int, end: int, settings: list[dict[str, Any]]) -> None:
        seen.extend((b, where, old, owned[b][where].clone()) for b, where, old in before)
        before[:] = [(bucket, slice(start, end), owned[bucket][start:end].clone())]
        plain(bucket, start, end, settings)

    slices.step_inside = watched  # type: ignore[method-assign]
    here.backward(model(tokens(0, here.group.rank)))
    here.step()
    return [(torch.equal(then, owned[b][where]), not torch.equal(then, old)) for b, where, old, then in seen]


@every_home
def test_updated_weights_return_before_the_next_part_is_updated(home: str, tmp_path: Path) -> None:
    for parts in run(returned, HOMES[home](tmp_path), ranks=2):
        assert all(there for there, _ in parts)
        assert sum(new for _, new in parts) > 3  # a part may be padding alone


@shards
@every_home
def test_gradients_at_rest_with_a_scaler_in_bf16(stage: str, home: str, tmp_path: Path) -> None:
    job = Job(dtype=torch.bfloat16, micro_batches=3, scaler=lambda: LossScaler(2.0), poison=(2, 1))
    plain = run(train, stage, job, ranks=3)[0]
    out = run(train, stage, with_gradients(job, tmp_path, home), ranks=3)[0]
    assert out.done == plain.done == [True, True, False, True, True]
    assert plain.weights is not None
    assert differing(out.weights, plain.weights) == []


@pytest.mark.parametrize(("stage", "home", "ranks"), pairwise([*STAGES], [*HOMES], [2, 3]))
def test_one_step_late_is_one_process_one_step_late(stage: str, home: str, ranks: int, tmp_path: Path) -> None:
    job = in_home(Job(clip=0.05), home, tmp_path)
    job = replace(job, config=job.config | {"delayed_update": True})
    assert differing(run(train, stage, job, ranks=ranks)[0].weights, oracle(ranks, job)) == []


@pytest.mark.parametrize(("stage", "home", "ranks"), pairwise(["zero2", "zero3"], [*HOMES], [2, 3]))
def test_one_step_late_with_gradients_that_wait_at_the_host(stage: str, home: str, ranks: int, tmp_path: Path) -> None:
    """The next backward fills the same memory while the update still reads: the bits show it would notice."""
    job = in_home(Job(clip=0.05), home, tmp_path)
    job = replace(job, config=job.config | {"delayed_update": True, "gradient_home": Host()})
    assert differing(run(train, stage, job, ranks=ranks)[0].weights, oracle(ranks, job)) == []


def test_whole_gradients_have_no_home(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="gradient_home: Zero1 keeps whole gradients on every rank"):
        run(train, "zero1", with_gradients(Job(), tmp_path), ranks=2)


@every_stage
def test_an_overflow_skips_the_step(stage: str, tmp_path: Path) -> None:
    job = Job(scaler=lambda: LossScaler(2.0), poison=(2, 1))
    out = run(train, stage, in_home(job, "disk", tmp_path), ranks=2)[0]
    plain = run(train, stage, job, ranks=2)[0]
    assert out.done == plain.done == [True, True, False, True, True]
    assert plain.weights is not None
    assert differing(out.weights, plain.weights) == []


def on_disk(job: Job, folder: Path, sub_group_size: int = 128) -> Job:
    """Parameters too."""
    disk = Disk(folder)  # one of them serves two
    homes = {"optimizer_home": disk, "gradient_home": disk, "parameter_home": Disk(folder)}
    homes |= {"sub_group_size": sub_group_size}
    return replace(job, config=job.config | homes)


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9, nesterov=True),
        lambda m: torch.optim.Adagrad(m.parameters(), lr=0.01, initial_accumulator_value=0.1),
        lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, amsgrad=True),
        lambda m: Lion(m.parameters(), lr=1e-3, weight_decay=0.1),
    ],
    ids=["sgd", "adagrad", "amsgrad", "lion"],
)
def test_other_optimizers_on_a_disk(optimizer: Callable[[nn.Module], torch.optim.Optimizer], tmp_path: Path) -> None:
    job = Job(optimizer=optimizer, steps=4)
    assert differing(run(train, "zero3", on_disk(job, tmp_path), ranks=3)[0].weights, oracle(3, job)) == []


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_parameters_on_a_disk_give_the_same_bits(ranks: int, tmp_path: Path) -> None:
    out = run(train, "zero3", on_disk(FP32, tmp_path), ranks=ranks)[0]
    assert differing(out.weights, expected("zero3", ranks, FP32)) == []


def test_parameters_on_a_disk_give_the_same_bits_in_bf16(tmp_path: Path) -> None:
    job = Job(dtype=torch.bfloat16, micro_batches=2)
    plain = run(train, "zero3", job, ranks=3)[0].weights
    assert plain is not None
    assert differing(run(train, "zero3", on_disk(job, tmp_path), ranks=3)[0].weights, plain) == []
