"""A run that stops and goes on gives the bits of one that never stopped; what cannot be resumed says why."""

import json
import warnings
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import worlds
from safetensors.torch import load_file
from saving import Net, in_folder, same, settings, start, train, weights
from torch import distributed, nn, optim

import refimpl
from refimpl.checkpoint.errors import CheckpointError
from refimpl.checkpoint.write import SCRIPTS
from refimpl.launch import RankError
from refimpl.optim.muon import Muon


def stop_and_go_on(config: dict[str, Any], folder: Path) -> None:
    engine = start(config)
    rank = engine.group.rank
    train(engine, range(2))
    assert engine.save_checkpoint(folder, client_state={"step": 2, "rank": rank, "rng": torch.get_rng_state()})
    saved = weights(engine)
    if rank == 0:
        assert (folder / "latest").read_text() == "global_step2"
        file = in_folder(folder / "global_step2")
        assert file.keys() == saved.keys()
        assert all(torch.equal(file[name], saved[name]) for name in saved)
    expected = train(engine, range(2, 4)), weights(engine), engine.get_lr()

    again = start(config, seed=7)
    path, client = again.load_checkpoint(folder)
    assert path == str(folder / "global_step2")
    assert (client["step"], client["rank"]) == (2, rank)
    assert (again.global_steps, again.micro_steps, again.global_samples) == (2, 2, 2 * 4 * again.group.size)
    restored = weights(again)
    assert all(torch.equal(restored[name], saved[name]) for name in saved)
    losses, end, rates = train(again, range(2, 4)), weights(again), again.get_lr()
    assert (losses, rates) == (expected[0], expected[2])
    assert all(torch.equal(end[name], expected[1][name]) for name in end)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_going_on_gives_the_same_bits(stage: int, ranks: int, tmp_path: Path) -> None:
    worlds.run(stop_and_go_on, settings(stage), tmp_path, ranks=ranks)


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("section", ["bf16", "fp16"])
def test_going_on_in_low_precision(stage: int, section: str, tmp_path: Path) -> None:
    worlds.run(stop_and_go_on, settings(stage, **{section: {"enabled": True}}), tmp_path, ranks=2)


@pytest.mark.parametrize(("stage", "name"), [(0, "Lamb"), (0, "Muon"), (1, "Lamb")])
def test_going_on_with_state_that_is_cut_by_parameters(stage: int, name: str, tmp_path: Path) -> None:
    """In stage 0 each has its parameter's shape: that of a number is the shape of its count of steps, too."""
    optimizer = {"type": name, "params": {"lr": 0.01}}
    worlds.run(stop_and_go_on, settings(stage, optimizer=optimizer), tmp_path, ranks=3)


@pytest.mark.parametrize(("kind", "group"), [(False, 0), (True, 1)])
def test_what_muon_moved_is_not_gone_on_with_by_adamw(kind: bool, group: int, tmp_path: Path) -> None:
    """A KeyError in the next step, else; nor are groups in another order, whose options are saved by number."""
    engine = start(settings(0, optimizer={"type": "Muon", "params": {"lr": 0.01}}))
    train(engine, range(1))
    engine.save_checkpoint(tmp_path)
    net = Net()
    groups = [{"params": [p for p in net.parameters() if p.ndim < 2], "use_muon": False}]
    groups.insert(group, {"params": [p for p in net.parameters() if p.ndim > 1], "use_muon": kind})
    here = refimpl.initialize(model=net, optimizer=Muon(groups), config={"train_micro_batch_size_per_gpu": 4})[0]
    said = (
        "was trained with use_muon=(True, in group 0|False, in group 1), and has use_muon=False here, in group 0: mark"
    )
    with pytest.raises(CheckpointError, match=said):
        here.load_checkpoint(tmp_path)
    here.load_checkpoint(tmp_path, load_module_only=True)
    train(here, range(1))


class Sharing(optim.Optimizer):
    """As Keller Jordan's Muon: each rank steps every Nth parameter, keeps momentum of those alone, and sends them."""

    def __init__(self, params: Iterable[Any], lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for i, p in enumerate(group["params"]):
                if i % distributed.get_world_size() == distributed.get_rank():
                    state = self.state[p]
                    state["momentum"] = 0.9 * state.get("momentum", 0) + p.grad
                    state["step"] = state.get("step", 0) + 1
                    p.sub_(group["lr"] / state["step"] * state["momentum"])
                distributed.broadcast(p, i % distributed.get_world_size())


@pytest.mark.parametrize("section", [{}, {"bf16": {"enabled": True}}])
def test_going_on_with_state_that_each_rank_has_of_other_parameters(section: dict[str, Any], tmp_path: Path) -> None:
    config = settings(0, optimizer=Sharing, **section)
    worlds.run(stop_and_go_on, config, tmp_path, ranks=3)
    said = worlds.run(caught_at_load, config, tmp_path, ranks=2)
    assert len(said) == 2
    assert all("Sharing, kept state of other parameters on each of 3 ranks, here are 2: " in text for text in said)


def caught_at_load(config: dict[str, Any], folder: Path) -> str:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine = start(config)
        engine.load_checkpoint(folder)
    assert engine.optimizer.state_dict()["state"] == {}
    return "\n".join(str(each.message) for each in caught)


def save(config: dict[str, Any], folder: Path, tag: Any = None) -> None:
    engine = start(config)
    train(engine, range(1))
    engine.save_checkpoint(folder, f"rank{engine.group.rank}" if tag == "own" else tag)


def test_another_tag_is_named(tmp_path: Path) -> None:
    worlds.run(save, settings(2), tmp_path, ranks=2)
    with pytest.raises(CheckpointError, match=r"no-such-tag.*complete checkpoints.*global_step1"):
        start(settings(2)).load_checkpoint(tmp_path, "no-such-tag")


def test_a_shard_is_saved_without_the_buffer_it_is_cut_from(tmp_path: Path) -> None:
    worlds.run(save, settings(2), tmp_path, ranks=4)
    whole = sum(w.nbytes for w in in_folder(tmp_path / "global_step1").values())
    sizes = [(tmp_path / f"global_step1/rank{rank:05d}.safetensors").stat().st_size for rank in range(4)]
    assert max(sizes) < 12 / 16 * whole + 4000 < whole  # 12 of the 4 bytes a parameter in four files, and their headers


def test_no_checkpoint_is_a_fresh_start(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="no file `latest`"):
        assert start(settings(0)).load_checkpoint(tmp_path) == (None, None)


def test_save_latest_false_leaves_latest_alone(tmp_path: Path) -> None:
    engine = start(settings(0))
    train(engine, range(1))
    engine.save_checkpoint(tmp_path, tag="kept")
    engine.save_checkpoint(tmp_path, tag=0.25, save_latest=False)
    assert (tmp_path / "latest").read_text() == "kept"
    assert json.loads((tmp_path / "0.25/checkpoint.json").read_text())["world_size"] == 1
    assert not list(tmp_path.rglob("*.part"))
    assert engine.load_checkpoint(tmp_path, 0.25)[0] == str(tmp_path / "0.25")


def test_ranks_that_name_different_tags(tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"rank 0: 'rank0', rank 1: 'rank1'"):
        worlds.run(save, settings(1, checkpoint={"tag_validation": "Fail"}), tmp_path, "own", ranks=2)
    worlds.run(save, settings(1, checkpoint={"tag_validation": "Ignore"}), tmp_path, "own", ranks=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "rank0", *SCRIPTS]
    assert len(list((tmp_path / "rank0").glob("*.safetensors"))) == 2


def save_on_rank_0_alone(config: dict[str, Any], folder: Path) -> None:
    engine = start(config)
    train(engine, range(1))
    if engine.group.rank == 0:
        engine.save_checkpoint(folder)
    train(engine, range(1))


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_save_on_rank_0_alone_is_told_at_once(stage: int, tmp_path: Path) -> None:
    with pytest.raises(RankError, match=rf"rank 0: all_gather_object at {__file__}(?s:.*)rank 1: "):
        worlds.run(save_on_rank_0_alone, settings(stage), tmp_path, ranks=2)


def with_an_update_that_one_rank_has_not_made(config: dict[str, Any], folder: Path) -> str:
    """A hook of the optimizer's step raises there, and the script catches it. A checkpoint that is loaded ends it."""
    engine = start(config)
    train(engine, range(1))
    engine.save_checkpoint(folder)
    before = weights(engine)

    def hook(*_: Any) -> None:
        raise KeyError("of the script's own")

    handle = engine.optimizer.register_step_pre_hook(hook) if engine.group.rank == 1 else None
    with pytest.raises(KeyError) if handle else nullcontext():
        train(engine, range(1))
    with pytest.raises(CheckpointError) as told:
        engine.save_checkpoint(folder)
    if config["zero_optimization"] != OFFLOADED:  # where this rank computes nothing more with half a step
        with pytest.raises(ValueError, match=r"rank 1, step 2: KeyError"):
            train(engine, range(1))
    if handle:
        handle.remove()
    engine.load_checkpoint(folder)
    assert same(weights(engine), before)
    train(engine, range(1))
    engine.save_checkpoint(folder)
    return str(told.value)


OFFLOADED = {"stage": 3, "offload_optimizer": {"device": "cpu"}}


@pytest.mark.parametrize("zero", [{"stage": 0}, {"stage": 2}, {"stage": 3}, OFFLOADED])
def test_an_update_that_one_rank_has_not_made_is_not_saved(zero: dict[str, Any], tmp_path: Path) -> None:
    config = settings(0) | {"zero_optimization": zero}
    texts = worlds.run(with_an_update_that_one_rank_has_not_made, config, tmp_path, ranks=2)
    assert len(set(texts)) == 1
    assert "raised on some ranks alone (rank 1, step 2: KeyError: " in texts[0]


def in_time_stamped_folders(folder: Path) -> list[str]:
    engine = start(settings(1))
    train(engine, range(1))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        engine.save_checkpoint(folder / f"run.{engine.group.rank}", tag="t")
    assert engine.load_checkpoint(folder / "run.0")[0] == str(folder / "run.0" / "t")
    return [str(warning.message) for warning in said]


def test_ranks_that_name_different_folders_save_in_that_of_rank_0(tmp_path: Path) -> None:
    said = worlds.run(in_time_stamped_folders, tmp_path, ranks=3)
    assert [len(ranks) for ranks in said] == [1, 0, 0]
    assert f"rank 2: '{tmp_path / 'run.2'}'; rank 0's is taken" in said[0][0]
    assert [path.name for path in tmp_path.iterdir()] == ["run.0"]


def test_client_state_that_could_not_be_loaded_fails_at_the_save(tmp_path: Path) -> None:
    engine = start(settings(0))
    train(engine, range(1))
    with pytest.raises(CheckpointError, match="client_state"):
        engine.save_checkpoint(tmp_path, client_state={"print": print})
    with pytest.raises(CheckpointError, match="client_state is a list: give a dictionary"):
        engine.save_checkpoint(tmp_path, client_state=[1])  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


def save_16bit(config: dict[str, Any], folder: Path, name: str) -> bool:
    engine = start(config)
    train(engine, range(1))
    return engine.save_16bit_model(folder, name)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors"])
def test_save_16bit_model(name: str, tmp_path: Path) -> None:
    zero = {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True}
    config = settings(3, bf16={"enabled": True}, zero_optimization=zero)
    assert worlds.run(save_16bit, config, tmp_path, name, ranks=2) == [True, True]
    path = tmp_path / name
    loaded = load_file(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=True)
    assert {w.dtype for w in loaded.values() if w.is_floating_point()} == {torch.bfloat16}
    Net().load_state_dict(loaded)


def save_with_nothing(stage: int, folder: Path) -> bool:
    """A parameter without elements, in a bucket of its own."""
    model = Net()
    model.empty = nn.Parameter(torch.empty(0, 3))
    zero = {"stage": stage, "reduce_bucket_size": 1, "stage3_gather_16bit_weights_on_model_save": True}
    engine = refimpl.initialize(model=model, config=settings(stage, zero_optimization=zero))[0]
    return engine.save_16bit_model(folder)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_parameter_without_elements_can_be_read_again(stage: int, tmp_path: Path) -> None:
    worlds.run(save_with_nothing, stage, tmp_path, ranks=2)
    assert torch.load(tmp_path / "pytorch_model.bin", weights_only=True)["empty"].shape == (0, 3)


def test_save_16bit_model_needs_its_key_in_stage_3(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="stage3_gather_16bit_weights_on_model_save"):
        assert save_16bit(settings(3), tmp_path, "m.bin") is False
    assert not list(tmp_path.iterdir())
