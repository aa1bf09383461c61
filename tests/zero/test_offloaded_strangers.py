"""What a stranger tried with state that rests elsewhere: the optimizer's own dict, writes, a shared disk, errors."""

import copy
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training import STAGES, Net, adamw, differing, tokens
from worlds import run

from refimpl.comm.group import Group
from refimpl.offload.blocks import Aio, OffloadError
from refimpl.offload.homes import Disk, Host
from refimpl.zero.config import ZeroConfig
from refimpl.zero.optimizer.slices import Slices
from refimpl.zero.stage import Stage

HOMES = {"none": lambda folder: None, "host": lambda folder: Host(), "disk": lambda folder: Disk(folder)}
every_home = pytest.mark.parametrize("home", ["host", "disk"])


def built(stage: str, home: Host | None, **options: Any) -> Stage:
    torch.manual_seed(0)
    model = Net()
    config = ZeroConfig(reduce_bucket_size=700, optimizer_home=home, sub_group_size=128)
    return STAGES[stage](model, adamw(model), Group.world(), replace(config, **options))


def steps(stage: Stage, first: int, last: int) -> None:
    for step in range(first, last):
        stage.backward(stage.model(tokens(step, stage.group.rank)))
        stage.step()


def weights(stage: Stage) -> dict[str, Tensor]:
    return {name: stage.full_parameter(name) for name in stage.names.values()}


def by_the_optimizers_dict(home: Host) -> list[str]:
    """Runs on every rank: the optimizer's own state_dict, into a stage that has taken other steps."""
    first, second = built("zero2", home), built("zero2", home)
    steps(first, 0, 2)
    state = copy.deepcopy(first.optimizer.state_dict())  # torch's are references
    assert not any(t.isnan().any() for one in state["state"].values() for t in one.values())
    steps(second, 5, 7)
    for name, weight in weights(first).items():
        second.set_full_parameter(name, weight)
    second.optimizer.load_state_dict(state)
    steps(first, 2, 4)
    steps(second, 2, 4)
    return differing(weights(first), weights(second))


@every_home
def test_the_optimizers_own_dict_is_whole(home: str, tmp_path: Path) -> None:
    assert run(by_the_optimizers_dict, HOMES[home](tmp_path), ranks=2)[0] == []


def frozen_after(home: Host) -> float:
    """Runs on every rank: a weight is frozen and written; the late update of the others leaves it alone."""
    here = built("zero2", home, delayed_update=True, reduce_bucket_size=100)
    steps(here, 0, 2)
    here.catch_up()
    frozen = here.model.get_parameter("blocks.0.up.weight")
    frozen.requires_grad_(False)
    frozen.data.fill_(7.0)
    steps(here, 2, 4)
    here.catch_up()
    return frozen.min().item()


@every_home
def test_a_late_update_publishes_what_it_has_updated(home: str, tmp_path: Path) -> None:
    assert run(frozen_after, HOMES[home](tmp_path), ranks=2) == [7.0, 7.0]


def torn(home: Host, late: bool) -> list[str]:
    """Runs on every rank: the optimizer raises at its third part; what each use says then."""
    here = built("zero2", home, delayed_update=late)
    steps(here, 0, 1)
    here.catch_up()
    before, kind = here.full_state_dict(), here.update.slices
    assert isinstance(kind, Slices)
    plain, calls = kind.step_inside, []

    def fails(*args: Any) -> None:
        calls.append(1)
        if len(calls) == 3:
            raise OSError("told to")
        plain(*args)

    kind.step_inside = fails  # type: ignore[method-assign]

    def one_more() -> None:
        steps(here, 1, 2)
        here.catch_up()

    with pytest.raises(OffloadError if isinstance(home, Disk) else OSError, match="told to"):
        one_more()
    said = []
    uses: tuple[Callable[[], object], ...] = (
        here.state_dict,
        here.full_state_dict,
        here.optimizer.state_dict,
        here.model.state_dict,
        lambda: steps(here, 2, 3),
        lambda: here.full_parameter("norm.weight"),
        lambda: here.read_local("norm.weight", "exp_avg"),
        lambda: here.set_full_parameter("norm.weight", torch.zeros(13)),
    )
    for use in uses:
        with pytest.raises(OffloadError) as error:
            use()
        said.append(str(error.value))
    if late and before is not None:  # nothing of the half is published
        assert differing(dict(here.model.state_dict(keep_vars=True)), before) == []
    return said


@every_home
@pytest.mark.parametrize("late", [False, True])
def test_half_a_step_is_of_no_use(late: bool, home: str, tmp_path: Path) -> None:
    for said in run(torn, HOMES[home](tmp_path), late, ranks=2)[0]:
        assert "interrupted in the middle of its update" in said
        assert "Load a checkpoint with its optimizer state" in said


def raised_alone(stage: str, late: bool) -> str:
    """Runs on every rank: a hook raises on the last one alone, whose script catches it and goes on."""
    here = built(stage, Host(), delayed_update=late)
    steps(here, 0, 1)
    here.catch_up()
    saved, last = copy.deepcopy(here.state_dict()), here.group.size - 1

    def hook(*_: Any) -> None:
        raise KeyError("of the script's own")

    handle = here.optimizer.register_step_post_hook(hook) if here.group.rank == last else None
    with pytest.raises(KeyError) if handle else nullcontext():
        steps(here, 1, 2)
        here.catch_up()
    with pytest.raises(ValueError, match="step 3") as told:
        steps(here, 2, 3)
    if handle:
        handle.remove()
    here.load_state_dict(saved)
    steps(here, 1, 3)
    here.catch_up()
    return str(told.value)


@pytest.mark.parametrize(("stage", "late"), [("ddp", True), ("zero1", False), ("zero2", True), ("zero3", False)])
def test_a_hook_that_raises_on_one_rank_alone_is_told_on_all_at_the_next_step(stage: str, late: bool) -> None:
    first, *others = run(raised_alone, stage, late, ranks=3)
    assert others == [first, first]
    assert "the optimizer's step raised on some ranks alone (rank 2, step 2: KeyError: " in first


def written_locally(home: Host | None, dtype: torch.dtype) -> dict[str, Tensor]:
    """Runs on every rank: each writes its own part of a weight; the next steps start from it."""
    here = built("zero2", home, dtype=dtype)
    steps(here, 0, 1)
    for name in ("blocks.0.up.weight", "norm.weight"):
        part = here.read_local(name)
        assert part is not None
        here.write_local(name, torch.full_like(part, 0.123))
        again = here.read_local(name)
        assert again is not None
        assert again.eq(torch.tensor(0.123)).all()
    steps(here, 1, 3)
    return weights(here)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_what_a_rank_writes_of_its_own_part_stays(dtype: torch.dtype, tmp_path: Path) -> None:
    found = {home: run(written_locally, make(tmp_path), dtype, ranks=2)[0] for home, make in HOMES.items()}
    assert differing(found["host"], found["none"]) == differing(found["disk"], found["none"]) == []


def set_whole(home: Host | None, parameters: Disk | None) -> Tensor:
    """Runs on every rank: an fp32 value that bf16 does not hold, written over a sharded weight."""
    here = built("zero3", home, dtype=torch.bfloat16, parameter_home=parameters)
    steps(here, 0, 1)
    here.set_full_parameter("norm.weight", torch.full((13,), 0.123456789))
    return here.full_parameter("norm.weight")


def test_a_master_in_memory_of_a_weight_on_a_disk_gets_all_digits(tmp_path: Path) -> None:
    found = run(set_whole, Host(), Disk(tmp_path), ranks=2)[0]
    assert torch.equal(found, torch.full((13,), 0.123456789))


def shared(disk: Disk) -> list[str]:
    """Runs on every rank: two stages on one disk, one of them late, against the same without sharing."""
    group = Group.world()

    def two(one: Disk, other: Disk) -> list[Tensor]:
        torch.manual_seed(0)
        models = [nn.Linear(64, 64), nn.Linear(64, 64)]
        stages = [
            STAGES["zero2"](
                m, adamw(m), group, ZeroConfig(optimizer_home=home, sub_group_size=256, delayed_update=late)
            )
            for m, home, late in zip(models, (one, other), (True, False), strict=True)
        ]
        for step in range(5):
            for stage in stages:
                stage.backward(stage.model(torch.full((2, 64), 0.1 * step + 0.1)).square().mean())
                stage.step()
        stages[0].catch_up()
        return [p.detach().clone() for m in models for p in m.parameters()]

    apart = two(Disk(disk.file.folder), Disk(disk.file.folder))
    return [str(i) for i, (a, b) in enumerate(zip(two(disk, disk), apart, strict=True)) if not torch.equal(a, b)]


def test_two_stages_share_a_disk_though_one_is_late(tmp_path: Path) -> None:
    assert run(shared, Disk(tmp_path), ranks=2) == [[], []]


def with_nothing(disk: Disk) -> None:
    """Runs on every rank: a unit of one parameter without elements."""
    model = nn.Sequential(nn.Linear(4, 4))
    model.empty = nn.Parameter(torch.empty(0))
    config = ZeroConfig(optimizer_home=disk, gradient_home=disk, parameter_home=disk)
    stage = STAGES["zero3"](model, torch.optim.SGD(model.parameters(), lr=0.1), Group.world(), config)
    for _ in range(2):
        stage.backward(model(torch.ones(2, 4)).sum() + model.empty.sum())
        assert stage.step()


def test_a_parameter_without_elements_rests_there_too(tmp_path: Path) -> None:
    run(with_nothing, Disk(tmp_path), ranks=2)


def unused_states() -> list[Tensor | None]:
    here = built("zero2", None, reduce_bucket_size=150)
    steps(here, 0, 2)
    return [here.full_state(f"unused.{name}", "exp_avg_sq") for name in ("weight", "bias")]


def test_the_state_of_what_was_never_used_is_none_on_every_rank() -> None:
    assert run(unused_states, ranks=3) == [[None, None]] * 3


def loaded_in_flight() -> bool:
    here = built("zero1", Host(), delayed_update=True)
    other = {name: torch.full_like(value, 0.5) for name, value in here.model.state_dict().items()}
    steps(here, 0, 2)
    with pytest.raises(RuntimeError, match=r"call stage\.catch_up"):
        here.optimizer.state_dict()
    here.model.load_state_dict(other)
    here.catch_up()
    return all(value.eq(0.5).all() for value in here.model.state_dict().values())


def test_weights_that_are_loaded_stay_though_an_update_was_under_way() -> None:
    assert run(loaded_in_flight, ranks=2) == [True, True]


def momentum_turned_on(disk: Disk) -> None:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = ZeroConfig(optimizer_home=disk, sub_group_size=4096)
    here = STAGES["zero2"](model, optimizer, Group.world(), config)
    steps(here, 0, 1)
    optimizer.param_groups[0]["momentum"] = 0.9
    steps(here, 1, 3)


def test_state_that_nobody_took_room_for_is_named(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="has made state, momentum_buffer, for which no room was taken"):
        run(momentum_turned_on, Disk(tmp_path), ranks=2)


def double(home: Host) -> None:
    model = Net().double()
    STAGES["zero2"](model, adamw(model), Group.world(), ZeroConfig(optimizer_home=home))


@every_home
def test_fp64_is_refused(home: str, tmp_path: Path) -> None:
    with pytest.raises(Exception, match="fp64 parameters: offloaded masters are fp32"):
        run(double, HOMES[home](tmp_path), ranks=2)


def other_slices(ratio: float, size: int) -> None:
    first, second = built("zero2", None), built("zero2", Host(), offload_ratio=ratio, sub_group_size=size)
    steps(first, 0, 1)
    second.load_state_dict(first.state_dict())
    assert differing(weights(second), weights(first)) == []


def test_state_from_other_slices_is_loaded_right_or_refused() -> None:
    run(other_slices, 0.5, 1 << 20, ranks=2)
    with pytest.raises(Exception, match="saved from other slices: offload_ratio, sub_group_size or the home differ"):
        run(other_slices, 1.0, 64, ranks=2)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("offload_ratio", 2.0), ("offload_ratio", float("nan")), ("max_in_host", -5), ("sub_group_size", 1.5),
        ("optimizer_home", "/tmp"), ("optimizer_home", Disk), ("parameter_home", "host"), ("gradient_home", 3),
    ],
)  # fmt: skip
def test_a_wrong_value_is_named(option: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"ZeroConfig\.{option} = "):
        ZeroConfig(**{"optimizer_home": Host(), option: value})  # type: ignore[arg-type]


def test_half_a_buffer_and_half_a_byte_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"buffer_count = 1\.5"):
        Disk(tmp_path, 1.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"aio\.block_size = 1\.5"):
        Aio(block_size=1.5)  # type: ignore[arg-type]


UNHEARD = """
from refimpl.checkpoint.background import Background

def fails():
    raise OSError("the disk is gone")

Background().start(fails, "work")
"""


def test_what_nobody_waited_for_is_told_at_the_end() -> None:
    said = subprocess.run([sys.executable, "-c", UNHEARD], capture_output=True, text=True, check=True).stderr
    assert "nobody has waited for it" in said
    assert "OSError: the disk is gone" in said
