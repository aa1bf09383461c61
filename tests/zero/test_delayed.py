"""An update one step late: its learning rate is its own step's, nobody looks at half of it, its errors arrive."""

import copy
import pickle
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from training import STAGES, Net, adamw, differing, tokens
from worlds import run

from refimpl.comm.group import Group
from refimpl.offload.blocks import OffloadError
from refimpl.offload.homes import Disk, Host
from refimpl.zero.config import ZeroConfig
from refimpl.zero.stage import Stage

STEPS = 4


def built(stage: str, home: Host) -> Stage:
    torch.manual_seed(0)
    model = Net()
    config = ZeroConfig(reduce_bucket_size=700, optimizer_home=home, sub_group_size=128, delayed_update=True)
    return STAGES[stage](model, adamw(model), Group.world(), config)


def scheduled(stage: str) -> dict[str, Tensor]:
    """Runs on every rank: the rate falls to a tenth after each step, in plain torch's order."""
    here = built(stage, Host())
    schedule = torch.optim.lr_scheduler.ExponentialLR(here.optimizer, 0.1)
    for step in range(STEPS):
        here.model(tokens(step, 0)).backward()
        here.optimizer.step()
        schedule.step()
    if stage == "ddp":
        saved = copy.deepcopy(here.state_dict())  # finishes it too
        here.model(tokens(0, 0)).backward()
        here.optimizer.step()
        here.load_state_dict(saved)  # in spite of the update under way
    else:
        here.release()  # which finishes it too
    return {name: p.detach().clone() for name, p in here.model.named_parameters()}


def one_process() -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = Net()
    optimizer = adamw(model)
    late: list[tuple[Tensor | None, float]] | None = None
    for step in range(STEPS + 1):
        model(tokens(step, 0)).backward()
        now = [(p.grad, 0.1**step) for p in model.parameters()]
        if late is not None:
            for p, (gradient, factor) in zip(model.parameters(), late, strict=True):
                p.grad = gradient
                for group in optimizer.param_groups:
                    group["lr"] = 1e-2 * factor
            optimizer.step()
        optimizer.zero_grad()
        late = now
    return {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize("stage", ["ddp", "zero2"])
def test_the_rate_is_that_of_the_gradients_step(stage: str) -> None:
    found, expected = run(scheduled, stage, ranks=2)[0], one_process()
    assert [n for n in expected if not torch.allclose(found[n], expected[n], rtol=1e-5, atol=1e-8)] == []


def looked_at(home: Host) -> dict[str, Tensor]:
    """Runs on every rank: between two steps nothing is to be seen but what `catch_up` has finished."""
    here = built("zero2", home)
    for step in range(2):
        here.backward(here.model(tokens(step, here.group.rank)))
        here.step()
    for look in (here.update.state_dict, lambda: here.full_parameter("norm.weight")):
        with pytest.raises(RuntimeError, match=r"still under way: call stage\.catch_up"):
            look()
    before = {n: p.detach().clone() for n, p in here.model.named_parameters()}
    here.catch_up()
    after = {n: p.detach().clone() for n, p in here.model.named_parameters()}
    assert [n for n in after if not torch.equal(after[n], before[n])] != []
    here.catch_up()
    assert differing(dict(here.model.named_parameters()), after) == []
    return after


def test_nobody_looks_at_an_update_under_way(tmp_path: Path) -> None:
    host, disk = run(looked_at, Host(), ranks=2), run(looked_at, Disk(tmp_path), ranks=2)
    assert differing(host[0], host[1]) == differing(host[0], disk[0]) == []


def test_a_copy_of_the_model_is_plain() -> None:
    here = built("zero1", Host())
    for twin in (copy.deepcopy(here.model), pickle.loads(pickle.dumps(here.model))):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(here, "catch_up", lambda: pytest.fail("it is of the stage's own model"))
            twin.load_state_dict(twin.state_dict())
    here.release()


def failing(disk: Disk) -> list[str]:
    """Runs on every rank: what was written is not what will be read; what the next steps say."""
    here = built("zero2", disk)
    disk.file._sums = dict.fromkeys(disk.file._sums, 1)
    said = []
    for step in range(4):
        try:
            here.backward(here.model(tokens(step, here.group.rank)))
            here.step()
        except OffloadError as error:
            said.append(str(error))
    return said


def optimizer_alone_loaded(disk: Disk) -> list[str]:
    """Runs on every rank: a bucket is given state, which makes no whole of a half step; a whole saved state does."""
    here = built("zero2", disk)
    saved = here.state_dict()
    disk.file._sums, sums = dict.fromkeys(disk.file._sums, 1), dict(disk.file._sums)
    for step in range(2):
        with suppress(OffloadError):
            here.backward(here.model(tokens(step, here.group.rank)))
            here.step()
    disk.file._sums = sums  # the disk is well again
    said = []
    for heal in (lambda: here.update.keep_state(here.buckets[0]), lambda: here.load_state_dict(saved)):
        heal()
        try:
            here.backward(here.model(tokens(2, here.group.rank)))
            here.step()
            here.catch_up()
            said.append("trained")
        except OffloadError as error:
            said.append(str(error))
    return said


def test_only_a_whole_saved_state_ends_half_a_step(tmp_path: Path) -> None:
    torn, healed = run(optimizer_alone_loaded, Disk(tmp_path), ranks=2)[0]
    assert "A step was interrupted in the middle of its update" in torn
    assert healed == "trained"


def test_what_went_wrong_behind_reaches_the_next_step(tmp_path: Path) -> None:
    first, second, third = run(failing, Disk(tmp_path), ranks=2)[0]
    assert "are not what was written there" in first
    assert "A step was interrupted in the middle of its update" in second
    assert "A step was interrupted in the middle of its update" in third


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ({"optimizer_home": None}, "needs an optimizer_home"),
        ({"offload_ratio": 0.5}, "needs an optimizer_home for all"),
        ({"gradient_home": "disk"}, r"would write over the gradients.*gradient_home = Host\(\), or leave it out"),
        ({"parameter_home": "disk"}, r"reads the parameters.*leave parameter_home out, or delayed_update"),
    ],
)
def test_what_it_does_not_go_with(other: dict[str, object], says: str, tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    fits = ZeroConfig(optimizer_home=disk, delayed_update=True)
    with pytest.raises(ValueError, match=rf"ZeroConfig\.delayed_update.*{says}"):
        replace(fits, **{key: disk if value == "disk" else value for key, value in other.items()})  # type: ignore[arg-type]
