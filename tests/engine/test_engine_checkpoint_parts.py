"""Parts of a checkpoint: the weights alone, all but the optimizer, all but the schedule, all but what is frozen."""

import json
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import worlds
from safetensors.torch import load_file
from saving import SIZE, Net, in_folder, same, settings, start, train, weights
from torch import Tensor, nn

import refimpl
from refimpl.checkpoint.errors import CheckpointError

FROZEN = {"frozen.weight", "frozen.bias"}


def trained(config: dict[str, Any], folder: Path, **how: Any) -> dict[str, Tensor]:
    engine = start(config)
    train(engine, range(2))
    engine.save_checkpoint(folder, client_state={"rank": engine.group.rank}, **how)
    return weights(engine)


def warm_start(config: dict[str, Any], folder: Path, how: dict[str, Any]) -> tuple[dict[str, Tensor], ...]:
    """Weights loaded, and three steps later, beside those of an engine that had these weights from the start."""
    engine = start(config, seed=9)
    rank = engine.group.rank
    path, client = engine.load_checkpoint(folder, **how)
    assert path == str(folder / "global_step2")
    assert client == {"rank": rank if rank < 2 else 0}
    counted = not how.get("load_module_only")
    assert (engine.global_steps, engine.micro_steps) == ((2, 2) if counted else (0, 0))
    loaded = weights(engine)
    rates = [engine.get_lr()]
    train(engine, range(2, 5))  # the first rates of the schedule are 0
    model = Net(11)
    model.load_state_dict(in_folder(folder / "global_step2"))
    fresh = refimpl.initialize(model=model, config=config)[0]
    if counted:
        fresh.lr_scheduler.step(1)
    rates.append(fresh.get_lr())
    train(fresh, range(2, 5))
    assert rates[0] == rates[1]
    assert engine.get_lr() == fresh.get_lr()
    return loaded, weights(engine), weights(fresh)


class OldWrapper(nn.Module):
    """GLM's FP16_Module, once Megatron's: its names are those of what it wraps, by signatures of torch 1.4."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x)  # type: ignore[no-any-return]

    def named_parameters(self, prefix: str = "", recurse: bool = True) -> Any:  # type: ignore[override]
        return self.module.named_parameters(prefix=prefix, recurse=recurse)

    def state_dict(self, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:  # type: ignore[override]
        return self.module.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)

    def load_state_dict(self, state_dict: Any, strict: bool = True) -> Any:  # type: ignore[override]
        return self.module.load_state_dict(state_dict, strict=strict)


@pytest.mark.parametrize("stage", [0, 2])
def test_a_wrapper_with_older_signatures_goes_on(stage: int, tmp_path: Path) -> None:
    nets = Net(), Net(9)
    for net in nets:
        net.norm = nn.LayerNorm(SIZE)  # type: ignore[assignment]  # buffers would have the wrapper in their names
    engines = [refimpl.initialize(model=OldWrapper(net), config=settings(stage))[0] for net in nets]
    train(engines[0], range(2))
    engines[0].save_checkpoint(tmp_path)
    engines[1].load_checkpoint(tmp_path)
    assert train(engines[0], range(2, 4)) == train(engines[1], range(2, 4))
    assert in_folder(tmp_path / "global_step2").keys() == nets[0].state_dict().keys()


class RenamesSaved(OldWrapper):
    """Its parameters have the wrapper in their names, as its buffers; what it saves has neither."""

    named_parameters = nn.Module.named_parameters


@pytest.mark.parametrize(("wrapper", "stage"), [(OldWrapper, 0), (OldWrapper, 3), (RenamesSaved, 2), (RenamesSaved, 3)])
def test_a_wrapper_around_buffers_goes_on_by_the_names_that_it_saves(
    wrapper: type[OldWrapper], stage: int, tmp_path: Path
) -> None:
    nets = Net(), Net(9)
    engines = [refimpl.initialize(model=wrapper(net), config=settings(stage))[0] for net in nets]
    train(engines[0], range(2))
    engines[0].save_checkpoint(tmp_path)
    nets[1].norm.running_mean.fill_(7)  # type: ignore[union-attr, operator]
    engines[1].load_checkpoint(tmp_path)
    assert torch.equal(nets[0].norm.running_mean, nets[1].norm.running_mean)  # type: ignore[arg-type]
    assert train(engines[0], range(2, 4)) == train(engines[1], range(2, 4))
    assert in_folder(tmp_path / "global_step2").keys() == nets[0].state_dict().keys()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("how", ["load_module_only", "load_optimizer_states"])
def test_weights_alone_go_anywhere(stage: int, how: str, tmp_path: Path) -> None:
    """Saved by 2 ranks in stage 2, loaded by 1 and 3 in any stage; the next steps are those of a fresh optimizer."""
    saved = worlds.run(trained, settings(2), tmp_path, ranks=2)[0]
    option = {how: how == "load_module_only"}
    three = worlds.run(warm_start, settings(stage), tmp_path, option, ranks=3)[0]
    for loaded, after, fresh in (three, warm_start(settings(stage), tmp_path, option)):
        assert same(loaded, saved)
        assert same(after, fresh)
        assert not torch.equal(after["into.weight"], loaded["into.weight"])


@pytest.mark.parametrize("stage", [0, 3])
def test_weights_alone_into_another_dtype(stage: int, tmp_path: Path) -> None:
    """From shards of stage 3 into the other; fp32 weights rounded to bf16."""
    saved = worlds.run(trained, settings(3), tmp_path, ranks=2)[0]
    config = settings(stage, bf16={"enabled": True})
    loaded = worlds.run(load_only, config, tmp_path, ranks=2)[0]
    assert loaded["into.weight"].dtype == torch.bfloat16
    assert same(loaded, {name: w.to(loaded[name].dtype) for name, w in saved.items()})


def load_only(config: dict[str, Any], folder: Path) -> dict[str, Tensor]:
    engine = start(config, seed=9)
    engine.load_checkpoint(folder, load_module_only=True)
    return weights(engine)


def schedule_of(engine: refimpl.Engine) -> Any:
    return engine.lr_scheduler.last_batch_iteration, engine.get_lr()


@pytest.mark.parametrize("optimizer", [True, False])
@pytest.mark.parametrize("scheduler", [True, False])
def test_the_schedule_is_restored_or_kept(optimizer: bool, scheduler: bool, tmp_path: Path) -> None:
    saved = start(settings(1))
    train(saved, range(3))
    saved.save_checkpoint(tmp_path)
    engine = start(settings(1), seed=9)
    fresh = schedule_of(engine)
    assert schedule_of(saved) != fresh
    engine.load_checkpoint(tmp_path, load_optimizer_states=optimizer, load_lr_scheduler_states=scheduler)
    assert schedule_of(engine) == (schedule_of(saved) if scheduler else fresh)
    assert bool(engine.optimizer.state) == optimizer
    assert same(weights(engine), weights(saved))
    assert engine.global_steps == 3


def test_one_cycle_keeps_its_momentum_too(tmp_path: Path) -> None:
    config = settings(1, scheduler={"type": "OneCycle", "params": {"cycle_min_lr": 0.001, "cycle_max_lr": 0.01}})
    saved = start(config)
    train(saved, range(3))
    saved.save_checkpoint(tmp_path)
    engine = start(config)
    before = engine.optimizer.param_groups[0]["betas"]
    engine.load_checkpoint(tmp_path, load_lr_scheduler_states=False)
    assert engine.optimizer.param_groups[0]["betas"] == before
    engine.load_checkpoint(tmp_path)
    assert engine.optimizer.param_groups[0]["betas"] == saved.optimizer.param_groups[0]["betas"] != before


def test_a_group_that_is_younger_than_the_schedules_last_step(tmp_path: Path) -> None:
    def engine() -> refimpl.Engine:
        model = Net()
        model.into.bias.requires_grad_(False)
        optimizer = torch.optim.AdamW([model.into.weight], lr=0.1)
        config = {key: value for key, value in settings(1).items() if key not in ("scheduler", "optimizer")}
        schedule = lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)  # noqa: E731
        return refimpl.initialize(model=model, config=config, optimizer=optimizer, lr_scheduler=schedule)[0]

    def grow(engine: refimpl.Engine) -> None:
        engine.optimizer.add_param_group({"params": [engine.module.into.bias.requires_grad_()], "lr": 0.3})

    saved, again = engine(), engine()
    train(saved, range(2))
    grow(saved)
    saved.save_checkpoint(tmp_path)
    grow(again)
    again.load_checkpoint(tmp_path)
    assert again.get_lr() == saved.get_lr() == [0.025, 0.3]
    for each in (saved, again):
        train(each, range(2, 4))
    assert same(weights(again), weights(saved))


@pytest.mark.parametrize("stage", [0, 3])
def test_what_was_thawed_before_the_load_takes_its_state_too(stage: int, tmp_path: Path) -> None:
    def engine() -> refimpl.Engine:
        model = Net()
        model.into.bias.requires_grad_(False)
        optimizer = torch.optim.AdamW([model.into.weight, model.into.bias], lr=0.1)
        config = {key: value for key, value in settings(stage).items() if key != "optimizer"}
        return refimpl.initialize(model=model, optimizer=optimizer, config=config)[0]

    saved, again = engine(), engine()
    saved.module.into.bias.requires_grad_(True)
    train(saved, range(2))
    saved.save_checkpoint(tmp_path)
    again.module.into.bias.requires_grad_(True)
    again.load_checkpoint(tmp_path)
    for key in ("exp_avg", "exp_avg_sq"):
        moment = saved.stage.full_state("into.bias", key)
        assert moment is not None
        assert moment.any()
        assert torch.equal(again.stage.full_state("into.bias", key), moment)


def test_torchs_schedule_with_a_fresh_optimizer_stands_at_the_saved_rate(tmp_path: Path) -> None:
    def engine() -> refimpl.Engine:
        config = {key: value for key, value in settings(1).items() if key != "scheduler"}
        schedule = lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)  # noqa: E731
        return refimpl.initialize(model=Net(), config=config, lr_scheduler=schedule)[0]

    saved = engine()
    train(saved, range(2))
    saved.save_checkpoint(tmp_path)
    again = engine()
    again.load_checkpoint(tmp_path, load_optimizer_states=False)
    assert again.get_lr() == saved.get_lr() == [0.01 / 4]
    train(again, range(1))
    assert again.get_lr() == [0.01 / 8]


@pytest.mark.parametrize(("how", "counted"), [({"load_optimizer_states": False}, 1), ({"load_module_only": True}, 0)])
def test_skipped_steps_are_loaded_with_the_other_counters(how: dict[str, bool], counted: int, tmp_path: Path) -> None:
    saved, again = start(settings(1)), start(settings(1))
    saved.backward(saved(torch.full((4, SIZE), torch.inf)))
    with pytest.warns(UserWarning, match="update is skipped"):
        saved.step()
    saved.save_checkpoint(tmp_path)
    again.load_checkpoint(tmp_path, **how)
    assert again.skipped_steps == again.global_steps == counted


def without_frozen(config: dict[str, Any], folder: Path) -> None:
    engine = start(config)
    train(engine, range(2))
    engine.save_checkpoint(folder, "all")
    engine.save_checkpoint(folder, "less", exclude_frozen_parameters=True)
    if engine.group.rank == 0:
        everything, less = (in_folder(folder / tag).keys() for tag in ("all", "less"))
        assert everything - less == FROZEN
        assert json.loads((folder / "less/checkpoint.json").read_text())["left_out"] == sorted(FROZEN)
    mine = f"rank{engine.group.rank:05d}.safetensors"
    there, here = (load_file(folder / tag / mine).keys() for tag in ("all", "less"))
    assert there - here == {f"weight/{name}" for name in FROZEN}
    saved, after = weights(engine), train(engine, range(2, 3))
    for how in ({}, {"load_module_only": True}, {"load_optimizer_states": False}):
        again = start(config, seed=9)
        own = weights(again)
        again.load_checkpoint(folder, "less", **how)
        expected = {name: (own if name in FROZEN else saved)[name] for name in saved}
        assert same(weights(again), expected)
    base = start(config)  # the frozen weights of the run that saved, as a base model has them
    base.load_checkpoint(folder, "less")
    assert train(base, range(2, 3)) == after


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_frozen_weights_left_out(stage: int, tmp_path: Path) -> None:
    worlds.run(without_frozen, settings(stage), tmp_path, ranks=2)


def test_a_16bit_model_without_frozen_weights(tmp_path: Path) -> None:
    start(settings(0)).save_16bit_model(tmp_path, "m.safetensors", exclude_frozen_parameters=True)
    assert Net().state_dict().keys() - load_file(tmp_path / "m.safetensors").keys() == FROZEN


class Quiet(Net):
    """Its state_dict names one layer alone, as that of TRL's value head over a PEFT model does."""

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        return {f"into.{name}": w for name, w in self.into.state_dict(*args, **kwargs).items()}


def unnamed(stage: int, folder: Path) -> None:
    engine, again = (refimpl.initialize(model=Quiet(seed), config=settings(stage))[0] for seed in (0, 9))
    train(engine, range(2))
    engine.save_checkpoint(folder)
    whole = engine._zero3_consolidated_16bit_state_dict()
    if engine.group.rank == 0:
        saved = in_folder(folder / "global_step2")
        assert saved.keys() == {engine.stage.names[p] for p in engine.module.parameters()}
        assert whole.keys() == (saved.keys() if stage == 3 else {"into.weight", "into.bias"})
        assert same({name: saved[name] for name in whole}, whole)
    again.load_checkpoint(folder)
    assert train(again, range(2, 5)) == train(engine, range(2, 5))


@pytest.mark.parametrize("stage", [0, 3])
def test_weights_that_the_model_does_not_name(stage: int, tmp_path: Path) -> None:
    """A checkpoint has them all, as do in stage 3 the whole weights that Hugging Face's libraries save."""
    worlds.run(unnamed, stage, tmp_path, ranks=2)


class Grown(Net):
    """One layer more than was saved."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.more = nn.Linear(SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.more(x))


class Wide(Net):
    """A frozen layer of another shape."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.frozen = nn.Linear(SIZE, 2 * SIZE).requires_grad_(False)


@pytest.mark.parametrize("stage", [1, 3])
def test_weights_of_another_model(stage: int, tmp_path: Path) -> None:
    saved = trained(settings(stage), tmp_path)
    grown = refimpl.initialize(model=Grown(9), config=settings(stage))[0]
    before = weights(grown)
    with pytest.raises(CheckpointError, match=r"more.weight is not in the file.*more.bias.*load_module_strict=False"):
        grown.load_checkpoint(tmp_path, load_module_only=True)
    assert same(weights(grown), before)
    grown.load_checkpoint(tmp_path, load_module_only=True, load_module_strict=False)
    assert same(weights(grown), saved | {name: w for name, w in before.items() if name.startswith("more")})
    wide = refimpl.initialize(model=Wide(9), config=settings(stage))[0]
    before = weights(wide)
    for how in ({}, {"load_module_only": True}, {"load_module_only": True, "load_module_strict": False}):
        with pytest.raises(CheckpointError, match=r"frozen.weight"):
            wide.load_checkpoint(tmp_path, **how)
        assert same(weights(wide), before)


def load_by_hand(config: dict[str, Any], folder: Path, broken: bool) -> dict[str, Tensor]:
    engine = start(config, seed=9)
    before = weights(engine)

    def load(src: dict[str, Tensor], dst: nn.Module) -> None:
        if broken and engine.group.rank == 1:
            raise KeyError("into.weight")
        dst.load_state_dict({name: -w if w.is_floating_point() else w for name, w in src.items()})

    if broken:
        with pytest.raises(CheckpointError, match=r"rank 1: KeyError\('into.weight'\)"):
            engine.load_checkpoint(folder, load_module_only=True, custom_load_fn=load)
        return before
    engine.load_checkpoint(folder, load_module_only=True, custom_load_fn=load)
    return weights(engine)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_custom_load_fn(stage: int, tmp_path: Path) -> None:
    saved = worlds.run(trained, settings(2), tmp_path, ranks=2)[0]
    loaded = worlds.run(load_by_hand, settings(stage), tmp_path, False, ranks=2)[0]
    assert same(loaded, {name: -w if w.is_floating_point() else w for name, w in saved.items()})
    worlds.run(load_by_hand, settings(stage), tmp_path, True, ranks=2)


def test_custom_load_fn_beside_the_saved_optimizer_is_refused(tmp_path: Path) -> None:
    engine = start(settings(0))
    engine.save_checkpoint(tmp_path)
    with pytest.raises(ValueError, match="add load_optimizer_states=False"):
        engine.load_checkpoint(tmp_path, custom_load_fn=print)


def test_saving_what_was_just_loaded_gives_the_same_files(tmp_path: Path) -> None:
    """DeepSpeed's test_load_immediate_save, and its inverse."""
    engine = start(settings(2))
    engine.save_checkpoint(tmp_path, "a")
    engine.load_checkpoint(tmp_path, load_optimizer_states=False, load_lr_scheduler_states=False)
    engine.save_checkpoint(tmp_path, "b")
    assert same(in_folder(tmp_path / "a"), in_folder(tmp_path / "b"))


def resumed_between_micro_batches(stage: int, folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights of who goes on from a save in the middle of a batch, and of who has never seen that half."""
    config = settings(stage, gradient_accumulation_steps=2)
    saving, resumed, expected = (start(config, seed) for seed in (0, 5, 0))
    train(saving, range(5))
    with pytest.warns(UserWarning, match=r"1 micro-batch.*not saved") if saving.group.rank == 0 else nullcontext():
        saving.save_checkpoint(folder)
    train(resumed, range(9, 12))  # has half a batch of its own
    resumed.load_checkpoint(folder)
    train(resumed, range(5, 9))
    train(expected, range(4))
    train(expected, range(5, 9))
    assert resumed.global_steps == expected.global_steps == 4
    names = dict(resumed.module.named_parameters())
    of = [{name: w for name, w in weights(engine).items() if name in names} for engine in (resumed, expected)]
    return of[0], of[1]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_who_goes_on_from_the_middle_of_a_batch_begins_it_anew(stage: int, tmp_path: Path) -> None:
    resumed, expected = worlds.run(resumed_between_micro_batches, stage, tmp_path, ranks=2)[0]
    assert len(expected) == 8
    assert same(resumed, expected)


def test_a_step_of_the_optimizer_itself_leaves_no_gradient_that_a_save_could_lose(tmp_path: Path) -> None:
    """As Lightning's Fabric steps with its DeepSpeed strategy."""
    engine = start(settings(2))
    engine.backward(engine(torch.randn(4, SIZE)))
    engine.optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.save_checkpoint(tmp_path)


class Cached(nn.Module):
    """A table that is as long as this run needs, and no part of the weights."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("table", torch.arange(float(length)), persistent=False)


def test_a_16bit_model_has_buffers_as_they_are(tmp_path: Path) -> None:
    """They stay in fp32 while it trains, and were rounded to fp16 in the file: this one to inf."""
    model = nn.Linear(4, 4)
    model.register_buffer("largest", torch.tensor([1e6]))
    engine = refimpl.initialize(model=model, config=settings(0, scheduler=None, fp16={"enabled": True}))[0]
    engine.save_16bit_model(tmp_path, "model.safetensors")
    saved = load_file(tmp_path / "model.safetensors")
    assert saved["weight"].dtype == torch.float16
    assert torch.equal(saved["largest"], torch.tensor([1e6]))


def test_a_cache_of_another_length_stays_as_it_is(tmp_path: Path) -> None:
    short, long = (refimpl.initialize(model=Cached(n), config=settings(1, scheduler=None))[0] for n in (8, 16))
    short.save_checkpoint(tmp_path)
    long.load_checkpoint(tmp_path)
    assert torch.equal(long.module.table, torch.arange(16.0))
    assert torch.equal(long.module.layer.weight, short.module.layer.weight)


class Shared(nn.Module):
    """A mask that two layers have, as causal masks are, and a layer with running means in two places."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.norm = nn.BatchNorm1d(4)
        self.again, mask = self.norm if tied else nn.BatchNorm1d(4), torch.ones(4)
        for layer in self.layers:
            layer.register_buffer("mask", mask if tied else mask.clone())

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.again(self.norm(layer(x) * layer.mask))
        return x.square().mean()


@pytest.mark.parametrize("tied", [True, False])
def test_a_buffer_in_two_places_is_saved_under_each_of_its_names(tied: bool, tmp_path: Path) -> None:
    """It was under its first name alone: the run could not go on, nor could its weights be loaded."""
    engine, fresh = (
        refimpl.initialize(model=Shared(is_), config=settings(0, scheduler=None))[0] for is_ in (True, tied)
    )
    engine.backward(engine(torch.randn(3, 4)))
    engine.step()
    engine.save_checkpoint(tmp_path)
    fresh.load_checkpoint(tmp_path)
    state = engine.module.state_dict()
    assert same(dict(fresh.module.state_dict()), state)
    assert same(in_folder(tmp_path / "global_step1"), state)
