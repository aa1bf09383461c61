"""What rests on a disk can be looked at, changed, saved and loaded, and takes a few buffers of memory."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from training import STAGES, Net, adamw, differing, tokens
from worlds import run

from refimpl.checkpoint.tensors import brought
from refimpl.comm.group import Group
from refimpl.measure.memory import MemoryMeter
from refimpl.offload.blocks import OffloadError, pages
from refimpl.offload.homes import Disk
from refimpl.zero.config import ZeroConfig
from refimpl.zero.offload.offloaded import OffloadedUpdate
from refimpl.zero.portable import parts
from refimpl.zero.stage import Stage

stages = pytest.mark.parametrize("stage", ["zero1", "zero2", "zero3"])
SUB_GROUP = 128


def built(
    stage: str, disk: Disk | None, ratio: float = 1.0, dtype: torch.dtype | None = None, gradients: bool = False
) -> Stage:
    torch.manual_seed(0)
    model = Net()
    config = ZeroConfig(
        reduce_bucket_size=700, optimizer_home=disk, sub_group_size=SUB_GROUP, offload_ratio=ratio, dtype=dtype
    )
    if gradients:
        config = replace(config, gradient_home=disk)
    if stage == "zero3":
        config = replace(config, parameter_home=disk)
    return STAGES[stage](model, adamw(model), Group.world(), config)


def steps(stage: Stage, first: int, last: int) -> None:
    for step in range(first, last):
        stage.backward(stage.model(tokens(step, stage.group.rank)))
        stage.step()


def looked_at(stage: str, disk: Disk | None, ratio: float, dtype: torch.dtype | None) -> dict[str, Tensor | None]:
    """Runs on every rank: each parameter and its state, in the middle of training; then changed, and trained on."""
    here = built(stage, disk, ratio, dtype)
    steps(here, 0, 2)
    found: dict[str, Tensor | None] = {}
    for name in ("embed.weight", "blocks.1.up.bias", "norm.weight"):
        found[name] = here.full_parameter(name)
        found[f"{name} exp_avg"] = here.full_state(name, "exp_avg")
        found[f"{name} step"] = here.full_state(name, "step")
    here.set_full_parameter("blocks.0.up.weight", torch.full((39, 13), 0.01))
    found["set, to more digits than bf16 has"] = here.full_parameter("blocks.0.up.weight")
    here.set_full_state("blocks.0.up.weight", "exp_avg", torch.full((39, 13), 0.02))
    steps(here, 2, 4)
    return found | {f"{name} at the end": here.full_parameter(name) for name in here.names.values()}


@pytest.mark.parametrize(
    ("stage", "ratio", "dtype"),
    [("zero1", 0.3, None), ("zero1", 1.0, torch.bfloat16), ("zero2", 1.0, None), ("zero3", 1.0, torch.bfloat16)],
)
def test_parameters_and_state_by_name(stage: str, ratio: float, dtype: torch.dtype | None, tmp_path: Path) -> None:
    plain, offloaded = (run(looked_at, stage, disk, ratio, dtype, ranks=3)[0] for disk in (None, Disk(tmp_path)))
    assert offloaded.keys() == plain.keys()
    assert [n for n, t in plain.items() if t is not None and not torch.equal(t, offloaded[n])] == []  # type: ignore[arg-type]


class Behind(nn.Module):
    """`late` is used from the third step on, so that its count of steps is another one than its neighbours'."""

    def __init__(self) -> None:
        super().__init__()
        self.after, self.late, self.before = nn.Linear(13, 29), nn.Linear(5, 3), nn.Linear(13, 13)

    def forward(self, step: int) -> Tensor:
        late = self.late.weight.sum() + self.late.bias.sum() if step >= 2 else 0
        return self.after(self.before(torch.ones(13))).square().sum() + late


def counts(stage: str, disk: Disk | None) -> dict[str, float]:
    """Runs on every rank: how often each parameter was updated."""
    torch.manual_seed(0)
    model = Behind()
    config = ZeroConfig(reduce_bucket_size=10**6, optimizer_home=disk, sub_group_size=SUB_GROUP)
    here = STAGES[stage](model, adamw(model), Group.world(), config)
    for step in range(3):
        here.backward(model(step))
        here.step()
    return {name: float(here.full_state(name, "step")) for name in here.names.values()}  # type: ignore[arg-type]


@pytest.mark.parametrize(("stage", "disk"), [("ddp", False), ("zero1", False), ("zero1", True), ("zero3", True)])
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_count_of_steps_is_not_a_neighbours(stage: str, disk: bool, ranks: int, tmp_path: Path) -> None:
    for found in run(counts, stage, Disk(tmp_path) if disk else None, ranks=ranks):
        assert {name: steps for name, steps in found.items() if steps != 3} == {"late.weight": 1, "late.bias": 1}


def resumed(stage: str, disk: Disk, ratio: float) -> bool:
    """Runs on every rank: four steps at once, and two with the state of another stage that took the first two."""
    whole, first = built(stage, disk, ratio), built(stage, disk, ratio)
    steps(whole, 0, 4)
    steps(first, 0, 2)
    second = built(stage, disk, ratio)
    steps(second, 7, 8)  # has state of its own, to be replaced
    second.load_state_dict(first.state_dict())
    theirs = first.model.state_dict()
    assert all(torch.equal(w, theirs[name]) for name, w in second.model.state_dict().items()), "before any step"
    steps(second, 2, 4)
    return all(torch.equal(whole.full_parameter(n), second.full_parameter(n)) for n in whole.names.values())


@stages
@pytest.mark.parametrize("ratio", [1.0, 0.5])
def test_state_is_saved_and_loaded(stage: str, ratio: float, tmp_path: Path) -> None:
    if stage == "zero3":
        ratio = 1.0  # parameters on a disk take their masters with them
    assert all(run(resumed, stage, Disk(tmp_path), ratio, ranks=2))


def saved(disk: Disk) -> tuple[int, int, bool]:
    """Runs on every rank: (bytes read by a save, bytes of all parts, whether what was read is what rests there)."""
    here = built("zero1", disk)
    steps(here, 0, 2)
    update = here.update
    assert isinstance(update, OffloadedUpdate)
    before = disk.file.read_bytes
    found = {f"{key}/{p.name}": brought(t) for p in parts(here) for key, t in {"weight": p.weight, **p.state}.items()}
    read = disk.file.read_bytes - before
    same = all(
        torch.equal(found[f"exp_avg/{name}"].view_as(p), here.full_state(name, "exp_avg"))  # type: ignore[arg-type]
        for p, name in here.names.items()
        if p.requires_grad and f"exp_avg/{name}" in found
    )
    return read, sum(pages(part.nbytes) for part in update.parts), same and len(found) > 2 * len(update.parts)


def test_a_save_reads_a_part_once_for_all_of_its_parameters(tmp_path: Path) -> None:
    read, there, same = run(saved, Disk(tmp_path), ranks=1)[0]
    assert same
    assert read == there


def frozen_after_an_overflow(stage: str, disk: Disk | None) -> dict[str, Tensor]:
    """Runs on every rank: a step is skipped; what had a gradient then has none any more."""
    here = built(stage, disk)
    steps(here, 0, 1)
    here.backward(here.model(tokens(1, here.group.rank)) * float("inf"))
    assert not here.step()
    for name, p in here.model.named_parameters():
        if "blocks.0" in name:
            p.requires_grad_(False)
    steps(here, 2, 4)
    return {name: here.full_parameter(name) for name in here.names.values()}


@stages
def test_a_skipped_steps_gradients_are_not_applied_later(stage: str, tmp_path: Path) -> None:
    plain, offloaded = (run(frozen_after_an_overflow, stage, disk, ranks=2)[0] for disk in (None, Disk(tmp_path)))
    assert differing(offloaded, plain) == []


def thawed(stage: str, disk: Disk | None) -> dict[str, Tensor]:
    """Runs on every rank: a frozen layer is trained from the third step on."""
    here = built(stage, disk)
    steps(here, 0, 2)
    here.model.get_submodule("frozen").requires_grad_(True)
    steps(here, 2, 4)
    return {name: here.full_parameter(name) for name in here.names.values()}


@stages
def test_what_is_unfrozen_later_rests_there_too(stage: str, tmp_path: Path) -> None:
    plain, offloaded = (run(thawed, stage, disk, ranks=2)[0] for disk in (None, Disk(tmp_path)))
    assert differing(offloaded, plain) == []


def kept(stage: str, disk: Disk | None, dtype: torch.dtype) -> tuple[dict[str, int], int, int]:
    """Runs on every rank: (bytes by class after a step, bytes on the disk, elements that this rank owns)."""
    here = built(stage, disk, dtype=dtype)
    steps(here, 0, 2)
    memory = MemoryMeter(here.tensors).now()
    return memory, disk.file.end if disk else 0, sum(mine.numel() for mine in here.update.owned.values())


@stages
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_between_steps_only_buffers_are_in_memory(stage: str, dtype: torch.dtype, tmp_path: Path) -> None:
    memory, on_disk, owned = run(kept, stage, Disk(tmp_path, buffer_count=2), dtype, ranks=2)[0]
    slices_steps = memory["optimizer"] // 4  # AdamW's count of steps, 4 bytes a slice
    assert memory["master weights"] == 0
    assert slices_steps <= owned // SUB_GROUP + 40
    assert on_disk % 4096 == 0
    assert on_disk >= 12 * owned + (dtype.itemsize * owned if stage == "zero3" else 0)
    part, spare = 4096, 4096 if stage != "zero3" else 2 * 4096  # pages of 128 elements; of a unit that nobody foresaw
    ahead = 0 if stage != "zero3" else 2 * (2 * 4096) + 2 * part  # read before they are needed, and on their way back
    assert memory["offload buffers"] == 2 * part + ahead + spare, "no byte more than buffer_count says"
    if stage == "zero3":
        frozen_and_small = memory["parameters"]
        assert frozen_and_small == 0


def looked_at_locally(disk: Disk) -> None:
    here = built("zero2", disk)
    here.backward(here.model(tokens(0, here.group.rank)))
    assert here.local_gradient("norm.weight") is not None, "gradients are in memory"
    with pytest.raises(RuntimeError, match="rests on a disk, there is no view of it: read_local copies it"):
        here.local_parameter("norm.weight")


def test_a_view_of_what_is_away_is_refused(tmp_path: Path) -> None:
    run(looked_at_locally, Disk(tmp_path), ranks=2)


def altered(disk: Disk) -> list[str]:
    """Runs on every rank: a byte changes on the disk; what the next steps say."""
    here = built("zero2", disk)
    steps(here, 0, 1)
    file = disk.file
    buffered = os.open(f"/dev/fd/{file.descriptor}", os.O_RDWR)
    page = bytearray(os.pread(buffered, 4096, 0))
    page[17] ^= 1
    os.pwrite(buffered, page, 0)
    os.utime(buffered, (0, 0))  # dates stand still for some milliseconds
    os.close(buffered)
    said: list[str] = []
    for step in (1, 2):
        with pytest.raises(OffloadError) as error:
            steps(here, step, step + 1)
        said.append(str(error.value))
    return said


def test_a_byte_that_changed_on_the_disk_is_noticed(tmp_path: Path) -> None:
    for said in run(altered, Disk(tmp_path), ranks=2)[0]:
        assert "are not what was written there" in said
        assert "Nothing was updated" in said


def clipped_by_hand(stage: str, disk: Disk | None) -> dict[str, Tensor]:
    """Runs on every rank: gradients at rest are read, clipped by torch, replaced by name, and used."""
    here = built(stage, disk, gradients=disk is not None)
    found: dict[str, Tensor] = {}
    for step in range(3):
        here.backward(here.model(tokens(step, here.group.rank)))
        found[f"norm {step}"] = torch.nn.utils.clip_grad_norm_(here.model.parameters(), 0.05)
        here.set_full_gradient("norm.weight", torch.full((13,), 0.01))
        own = here.read_local("blocks.1.up.weight", "grad")
        assert own is not None
        here.write_local("blocks.1.up.weight", own * 2, "grad")
        changed = here.model.get_parameter("blocks.1.up.weight").grad
        assert changed is not None
        found[f"changed norm {step}"] = changed.norm()
        for name in ("embed.weight", "blocks.1.up.weight", "norm.weight"):
            gradient = here.full_gradient(name)
            assert gradient is not None
            found[f"{name} {step}"] = gradient
        here.step()
    return found | {name: here.full_parameter(name) for name in here.names.values()}


@pytest.mark.parametrize("stage", ["zero2", "zero3"])
def test_gradients_at_rest_are_read_and_changed(stage: str, tmp_path: Path) -> None:
    plain, resting = (run(clipped_by_hand, stage, disk, ranks=3)[0] for disk in (None, Disk(tmp_path)))
    assert differing(resting, plain) == []


def inferring(disk: Disk) -> bool:
    """Runs on every rank: without an optimizer, for inference."""
    torch.manual_seed(0)
    model = Net()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    loss = model(tokens(0, 0))
    config = ZeroConfig(optimizer_home=disk, parameter_home=disk, sub_group_size=SUB_GROUP)
    here = STAGES["zero3"](model, None, Group.world(), config)
    known = all(torch.equal(here.full_parameter(name), weight) for name, weight in before.items())
    return known and torch.equal(here.model(tokens(0, 0)), loss)


def test_a_model_without_an_optimizer_rests_there(tmp_path: Path) -> None:
    assert all(run(inferring, Disk(tmp_path), ranks=2))


def optimizers(disk: Disk) -> None:
    model = torch.nn.Linear(4, 4)
    STAGES["ddp"](model, torch.optim.LBFGS(model.parameters()), Group.world(), ZeroConfig(optimizer_home=disk))


def test_an_optimizer_of_whole_parameters_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        Exception,
        match=r"LBFGS is not known to be element-wise: it cannot be updated part by part; .*refimpl\.optim\.muon\.Muon",
    ):
        run(optimizers, Disk(tmp_path), ranks=2)
