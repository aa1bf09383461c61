"""Saved at any stage, world size and bucket size, loaded at any other: every bit, and no rank holds a whole copy."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import worlds
from anywhere import Late, begin, engine_of, go_on, joined, optimizer, train
from torch import Tensor, nn
from training import tokens

import refimpl
from refimpl.checkpoint import export
from refimpl.checkpoint.find import given
from refimpl.checkpoint.folder import Folder
from refimpl.checkpoint.place import Place
from refimpl.engine.resume import CheckpointSource
from refimpl.measure.memory import MemoryMeter
from refimpl.zero.portable import restore, room

STATES = ("exp_avg", "exp_avg_sq")


def differing(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[str]:
    return sorted(a.keys() ^ b.keys()) or [name for name in a if not torch.equal(a[name].float(), b[name].float())]


def one_process(before: int, after: int) -> dict[str, Tensor]:
    """Plain torch: the micro-batches of as many ranks as there were, added in their order."""
    torch.manual_seed(0)
    model = Late()
    adam = optimizer(model)
    for step in range(5):
        ranks, model.late = before if step < 2 else after, step >= 3
        for rank in range(ranks):
            model(tokens(step, rank)).backward()
        for p in model.parameters():
            if p.grad is not None:
                p.grad /= ranks
        adam.step()
        adam.zero_grad()
    found = {name: p.detach().flatten() for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        found |= {f"{key} {name}": adam.state[p][key].flatten() for key in (*STATES, "step") if p in adam.state}
    return found


TO = [(0, 3, 700), (1, 2, 5000), (2, 1, 100), (2, 4, 900), (3, 2, 60), (3, 3, 5000)]  # stage, ranks, bucket size


@pytest.mark.parametrize(("stage", "ranks"), [(0, 2), (1, 3), (2, 4), (3, 2), (3, 1)])
def test_from_any_to_any_and_on_as_one_process_would(stage: int, ranks: int, tmp_path: Path) -> None:
    saved = joined(worlds.run(begin, stage, 700, "fp32", tmp_path, ranks=ranks))
    oracles = {n: one_process(ranks, n) for n in {n for _, n, _ in TO}}
    for other, n, bucket in TO:
        loaded, end = map(joined, zip(*worlds.run(go_on, other, bucket, "fp32", tmp_path, ranks=n), strict=True))
        assert differing(loaded, saved) == []
        assert differing(end, oracles[n]) == []


@pytest.mark.parametrize(("section", "stage", "ranks"), [("bf16", 1, 2), ("bf16", 3, 4), ("fp16", 2, 2)])
def test_masters_travel_in_full_precision(section: str, stage: int, ranks: int, tmp_path: Path) -> None:
    saved = joined(worlds.run(begin, stage, 700, section, tmp_path, ranks=ranks))
    assert any((w != w.bfloat16()).any() for name, w in saved.items() if "exp" not in name)
    expected = joined([end for _, end in worlds.run(go_on, 0, 700, section, tmp_path, ranks=3)])
    for other in (1, 2, 3):
        loaded, end = map(joined, zip(*worlds.run(go_on, other, 5000, section, tmp_path, ranks=3), strict=True))
        assert differing(loaded, saved) == []
        assert differing(end, expected) == []


def test_into_another_precision(tmp_path: Path) -> None:
    saved = joined(worlds.run(begin, 2, 700, "fp32", tmp_path, ranks=2))
    loaded = joined([loaded for loaded, _ in worlds.run(go_on, 3, 900, "bf16", tmp_path, ranks=3)])
    trained = {name for name in saved if name.startswith(STATES)}
    assert differing({n: loaded[n] for n in trained}, {n: saved[n] for n in trained}) == []
    assert torch.equal(loaded["embed.weight"], saved["embed.weight"])
    assert torch.equal(loaded["frozen.weight"], saved["frozen.weight"].bfloat16())


def borders(folder: Path, load: bool) -> list[list[int]]:
    """Runs on every rank: where the optimizer's slices are cut, in a run that has saved, or in one that goes on."""
    engine = engine_of(2, 10**6, seed=9 * load)
    if load:
        engine.load_checkpoint(folder)
    else:
        train(engine, range(4))  # from the fourth step on `unused` is used: fewer steps than its neighbours
        engine.save_checkpoint(folder)
    return [[s.start for s in cuts] for cuts in engine.stage.update.slices.of.values()]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_that_goes_on_cuts_its_slices_where_it_did(ranks: int, tmp_path: Path) -> None:
    """Another cut is other bits: fused AdamW computes the first and last few elements of a slice in another way."""
    saving, loading = (worlds.run(borders, tmp_path, load, ranks=ranks) for load in (False, True))
    assert max(len(cuts) for rank in saving for cuts in rank) > 1
    assert saving == loading


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(128, 128, bias=False) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x.square().mean()


def wide(stage: int) -> refimpl.Engine:
    zero = {"stage": stage, "reduce_bucket_size": 20_000, "stage3_param_persistence_threshold": 0}
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero, "optimizer": {"type": "AdamW"}}
    engine = refimpl.initialize(model=Wide(), config=config)[0]
    engine.backward(engine(torch.ones(1, 128)))
    engine.step()
    return engine


def metered(folder: Path, stage: int, save: bool) -> int:
    """Bytes beyond what the stage itself keeps, at the peak of a save or a load."""
    engine = wide(stage)
    meter = MemoryMeter(engine.stage.tensors)
    with meter:
        engine.save_checkpoint(folder) if save else engine.load_checkpoint(folder)
    return meter.peak["other"] + meter.peak["activations"] + meter.peak["gathered"]


@pytest.mark.parametrize("stage", [1, 3])
def test_no_rank_ever_holds_a_whole_copy(stage: int, tmp_path: Path) -> None:
    psi = 8 * 128 * 128
    saving = worlds.run(metered, tmp_path, stage, True, ranks=4)
    loading = worlds.run(metered, tmp_path, stage, False, ranks=3)
    assert max(saving) < 4 * psi / 8, "nothing is copied: less than one of the eight layers"
    assert max(loading) < 12 * psi / 3 + 4 * psi / 8, "the new state of the optimizer, and less than one layer"


def away(folder: Path, home: str, save: bool) -> int:
    """As `metered`, with stage 3's state at the host or on a disk."""
    nvme = {"device": "nvme", "nvme_path": str(folder / "disk")}
    zero: dict[str, Any] = {"stage": 3, "stage3_param_persistence_threshold": 0, "sub_group_size": 4000}
    if home != "device":
        zero |= {"offload_param": nvme}  # then the optimizer's state is at the host, if it is not on the disk too
    if home == "disk":
        zero |= {"offload_optimizer": nvme}
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero, "optimizer": {"type": "AdamW"}}
    engine = refimpl.initialize(model=Wide(), config=config | {"aio": {"block_size": 16_000}})[0]
    for _ in range(2 if save else 1):
        engine.backward(engine(torch.ones(1, 128)))
        engine.step()
    meter = MemoryMeter(engine.stage.tensors)
    with meter:
        engine.save_checkpoint(folder) if save else engine.load_checkpoint(folder)
    return meter.peak["other"] + meter.peak["activations"] + meter.peak["gathered"]


@pytest.mark.parametrize(
    ("there", "here"), [("disk", "disk"), ("disk", "device"), ("host", "host"), ("device", "disk")]
)
def test_in_any_home_no_more_than_a_layer_is_in_memory(there: str, here: str, tmp_path: Path) -> None:
    layer, sub_group = 128 * 128, 4 * 4000
    saving = worlds.run(away, tmp_path, there, True, ranks=2)
    loading = worlds.run(away, tmp_path, here, False, ranks=3)
    assert max(saving) <= 12 * layer / 2 + sub_group, "weights and both moments of one layer of eight"
    assert max(loading) <= 12 * layer / 2 + 4 * layer
    with Folder(*given(tmp_path)) as opened, MemoryMeter(dict) as meter:
        export.export(opened, tmp_path / "out", torch.float32, 4 * layer)
    assert meter.peak["other"] + meter.peak["activations"] <= 2 * 4 * layer, "a layer, and a file's pieces of it"


def resident() -> int:
    """Bytes of this process's own memory."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("RssAnon:")[1].split()[0])


@pytest.mark.skipif(sys.platform != "linux", reason="it is glibc's malloc that must give memory back")
def test_state_on_its_way_to_a_disk_gives_its_memory_back() -> None:
    """malloc keeps what lies below something that stays, once it has had pieces of that size back."""
    n = 4 << 20
    torch.ones(n + 1024)
    before = resident()
    state = room(torch.empty(1).expand(n), torch.float32, passing=True).fill_(1)
    stays = [torch.ones(1000) for _ in range(20)]
    assert resident() - before > 3 * n
    del state
    assert resident() - before < n, len(stays)


class Hollow(nn.Module):
    """One parameter has no elements, and a buffer of its own where stage 3 keeps what is small."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.none = nn.Linear(8, 8), nn.Parameter(torch.empty(0, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).square().mean() + self.none.sum()


def hollow(folder: Path, stage: int, save: bool) -> list[float]:
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero, "optimizer": {"type": "AdamW"}}
    engine = refimpl.initialize(model=Hollow(), config=config)[0]
    if save:
        engine.backward(engine(torch.ones(1, 8)))
        engine.step()
        engine.save_checkpoint(folder)
    else:
        engine.load_checkpoint(folder)
    return engine.stage.full_parameter("linear.weight").flatten().tolist()


@pytest.mark.parametrize(("saved", "loaded"), [(3, 1), (3, 3), (0, 3)])
def test_a_parameter_without_elements(saved: int, loaded: int, tmp_path: Path) -> None:
    assert (
        worlds.run(hollow, tmp_path, saved, True, ranks=2)[0] == worlds.run(hollow, tmp_path, loaded, False, ranks=3)[0]
    )


def test_nothing_at_the_end_of_a_buffer_is_the_last_ranks() -> None:
    place = Place((0,), "float32", at=8, of=8, group=0, trained=True)
    assert [place.held(rank, 2) for rank in range(2)] == [(0, 0), (0, 0)]
    assert place.first(2) == 1
    assert replace(place, at=0, of=0).first(2) == 0


def read_here(folder: Path, stage: int) -> tuple[int, int]:
    engine = wide(stage)
    with Folder(*given(folder)) as opened:
        names = list(opened.places)
        restore(engine.stage, CheckpointSource(opened), names, True, ())
        mine = sum(state.nbytes for state in engine.stage.update.state()) + sum(
            master.nbytes for master in engine.stage.update.masters.values()
        )
        return opened.read_bytes, mine


@pytest.mark.parametrize(("stage", "ranks"), [(0, 2), (2, 3), (3, 4), (3, 2)])
def test_a_rank_reads_what_it_holds_and_no_more(stage: int, ranks: int, tmp_path: Path) -> None:
    worlds.run(metered, tmp_path, 2, True, ranks=4)
    read = worlds.run(read_here, tmp_path, stage, ranks=ranks)
    padding = 12 * 20_000
    for count, mine in read:
        assert mine - padding <= count - 300 * 4 <= mine, "a count of steps for each parameter comes on top"
    if stage:
        assert sum(count for count, _ in read) < 12 * 8 * 128 * 128 + 4000
