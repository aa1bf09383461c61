"""Training loops as people write them around an engine: plain backward, bare models, two engines, graphs kept."""

import copy
import json
import pickle
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import worlds
from test_engine import SIZE, STAGES, Net, batch, close, config, oracle
from torch import Tensor, nn

import refimpl
from refimpl.checkpoint.errors import CheckpointError


def weights_of(engine: Any) -> dict[str, Tensor] | None:
    state = engine.stage.full_state_dict()
    return state and {name: w.clone() for name, w in state.items()}


def plainly(settings: dict[str, Any], steps: int, micros: int, bare: bool) -> dict[str, Any]:
    """`loss.backward(); engine.step()` for each micro-batch, the loss from the engine or from the model itself."""
    engine, *_ = refimpl.initialize(model=Net(), config=settings)
    model, norms = engine.module if bare else engine, []
    for step in range(steps):
        for micro in range(micros):
            model(batch(engine.group.rank, step, micro)).backward()
            engine.step()
        norms.append(engine.get_global_grad_norm())
    calls = engine.group.ledger.calls(by="tag")["gradients"]
    return {
        "weights": weights_of(engine),
        "norms": norms,
        "calls": calls,
        "steps": (engine.global_steps, engine.micro_steps),
    }


@pytest.mark.parametrize("bare", [False, True])
@pytest.mark.parametrize("stage", STAGES)
def test_a_plain_backward_is_divided_by_the_accumulation(stage: int, bare: bool) -> None:
    expected = oracle(2, steps=2, micros=3, divide=3)
    results = worlds.run(plainly, config(stage, gradient_accumulation_steps=3), 2, 3, bare, ranks=2)
    close(results[0]["weights"], expected["weights"])
    assert results[1]["norms"] == pytest.approx(expected["norms"], rel=1e-5)
    assert results[1]["steps"] == (2, 6)
    if not bare:  # the last step's; stage 3 has two units
        assert results[1]["calls"] == (6 if stage == 3 else 3)


def two_engines(stage: int, way: str) -> tuple[Any, Any]:
    """One loss over two engines that accumulate over 2 and over 1 micro-batches."""
    one, *_ = refimpl.initialize(model=Net(), config=config(stage, gradient_accumulation_steps=2))
    other, *_ = refimpl.initialize(model=Net(), config=config(stage))
    for micro in range(2):
        x = batch(one.group.rank, 0, micro)
        loss = one(x) + other(x)
        one.backward(loss) if way == "engine" else loss.backward()
        for engine in (one, other) if way == "plain" else ():  # as old scripts do; it changes nothing
            engine._backward_epilogue()
        one.step()
        other.step()
    return weights_of(one), weights_of(other)


@pytest.mark.parametrize("way", ["engine", "plain"])
@pytest.mark.parametrize("stage", STAGES)
def test_one_loss_over_two_engines(stage: int, way: str) -> None:
    first, second = worlds.run(two_engines, stage, way, ranks=2)[0]
    close(first, oracle(2, steps=1, micros=2, divide=2)["weights"])
    model = Net()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for micro in range(2):
        opt.zero_grad()
        (sum(model(batch(r, 0, micro)) for r in range(2)) / 2).backward()
        opt.step()
    close(second, model.state_dict())


def through_another(stage: int) -> tuple[Any, Any]:
    """A generator's step goes through the discriminator, whose gradients are then dropped: zero_grad of the model."""
    generator, *_ = refimpl.initialize(model=nn.Linear(SIZE, SIZE), config=config(stage))
    critic, *_ = refimpl.initialize(model=Net(), config=config(stage))
    for step in range(2):
        x = batch(generator.group.rank, step, 0)
        critic.module.zero_grad()
        made = generator.module(x)
        critic.backward(critic.module(x))
        critic.backward(-critic.module(made.detach()))
        critic.step()
        generator.module.zero_grad()
        generator.backward(critic.module(made))
        generator.step()
    return weights_of(generator), weights_of(critic)


def test_a_gan(monkeypatch: pytest.MonkeyPatch) -> None:
    def start() -> tuple[nn.Module, nn.Module]:
        torch.manual_seed(1)
        return nn.Linear(SIZE, SIZE), Net()

    generator, critic = start()
    opt_g, opt_c = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (generator, critic))
    for step in range(2):
        xs = [batch(r, step, 0) for r in range(2)]
        made = [generator(x) for x in xs]
        opt_c.zero_grad()
        (sum(critic(x) - critic(m.detach()) for x, m in zip(xs, made, strict=True)) / 2).backward()
        opt_c.step()
        opt_g.zero_grad()
        (sum(critic(m) for m in made) / 2).backward()
        opt_g.step()

    def seeded(stage: int) -> tuple[Any, Any]:
        torch.manual_seed(1)
        return through_another(stage)

    for stage in STAGES:
        mine = worlds.run(seeded, stage, ranks=2)[0]
        close(mine[0], generator.state_dict())
        close(mine[1], critic.state_dict())


def half(way: str) -> tuple[Any, float]:
    settings = config(1, fp16={"enabled": True, "initial_scale_power": 8})
    engine, optimizer, *_ = refimpl.initialize(model=Net(), config=settings)
    for step in range(2):
        loss = engine(batch(engine.group.rank, step, 0).half())
        if way == "engine":
            engine.backward(loss)
        elif way == "scaled":
            engine.scale(loss).backward()
        else:
            loss.backward()
            with pytest.raises(RuntimeError, match=r"scale\(loss\)"):
                engine.step()
            engine.zero_grad()
            continue
        engine.step()
    return weights_of(engine), optimizer.loss_scale


def test_fp16_by_hand_needs_the_scale_and_says_so() -> None:
    (expected, scale), *_ = worlds.run(half, "engine", ranks=2)
    (by_hand, _), *_ = worlds.run(half, "scaled", ranks=2)
    assert scale == 256
    assert all(torch.equal(by_hand[name], w) for name, w in expected.items())
    (unmoved, _), *_ = worlds.run(half, "unscaled", ranks=2)
    close(unmoved, {name: w.half() for name, w in Net().state_dict().items()})


def kept(stage: int) -> float:
    engine, *_ = refimpl.initialize(model=Net(), config=config(stage))
    loss = engine(batch(engine.group.rank, 0, 0))
    engine.backward(loss, retain_graph=True)
    engine.backward(loss)
    engine.step()
    norm: float = engine.get_global_grad_norm()
    return norm


@pytest.mark.parametrize("stage", STAGES)
def test_a_graph_may_be_kept(stage: int) -> None:
    twice = [2 * oracle(2, steps=1, micros=1)["norms"][0]] * 2
    assert worlds.run(kept, stage, ranks=2) == pytest.approx(twice, rel=1e-5)


def nested() -> tuple[int, int]:
    engine, *_ = refimpl.initialize(model=Net(), config=config(1))
    with engine.no_sync():
        with engine.no_sync():
            engine.backward(engine(batch(0, 0, 0)))
        engine.backward(engine(batch(0, 0, 1)))
        engine(batch(0, 0, 2)).backward()
        with pytest.raises(RuntimeError, match="inside no_sync"):
            engine.step()
    silent = engine.group.ledger.sent_bytes("tag").get("gradients", 0)
    engine.backward(engine(batch(0, 0, 3)))
    return silent, engine.group.ledger.sent_bytes("tag")["gradients"]


def test_nested_no_sync_stays_silent() -> None:
    for silent, sent in worlds.run(nested, ranks=2):
        assert silent == 0
        assert sent > 0


def dropped(stage: int, who: str) -> float:
    engine, optimizer, *_ = refimpl.initialize(model=Net(), config=config(stage))
    engine.backward(100 * engine(batch(engine.group.rank, 1, 1)))
    {"engine": engine, "optimizer": optimizer, "module": engine.module}[who].zero_grad()
    engine.backward(engine(batch(engine.group.rank, 0, 0)))
    engine.step()
    norm: float = engine.get_global_grad_norm()
    return norm


@pytest.mark.parametrize("who", ["engine", "optimizer", "module"])
@pytest.mark.parametrize("stage", STAGES)
def test_zero_grad_drops_what_was_not_applied(stage: int, who: str) -> None:
    norm = oracle(2, steps=1, micros=1)["norms"][0]
    assert worlds.run(dropped, stage, who, ranks=2) == pytest.approx([norm, norm], rel=1e-5)


def logged(stage: int) -> tuple[float, ...]:
    """The gradient's norm in all the ways in which scripts log it."""
    engine, optimizer, *_ = refimpl.initialize(model=Net(), config=config(stage))
    assert engine.get_global_grad_norm() is None
    assert optimizer._global_grad_norm == 0.0  # InternImage's loop takes its mean from the first micro-batch on
    engine.backward(engine(batch(engine.group.rank, 0, 0)))
    engine.step()
    norm = engine.get_global_grad_norm()
    assert torch.isfinite(norm)
    assert not torch.isnan(norm)
    assert torch.equal(torch.ones(2) * norm, torch.full((2,), norm.item()))
    return norm, norm.item(), json.loads(json.dumps(norm)), optimizer._global_grad_norm.item(), float(f"{norm:.17g}")


@pytest.mark.parametrize("stage", STAGES)
def test_the_norm_is_a_number_that_scripts_may_take_for_a_tensor(stage: int) -> None:
    expected = oracle(3, steps=1, micros=1)["norms"][0]
    for ways in worlds.run(logged, stage, ranks=3):
        assert ways == (ways[0],) * 5
        assert ways[0] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("section", "key"), [("bf16", "bf16.enabled"), ("fp16", "fp16.enabled")])
def test_an_input_of_another_dtype_is_told_the_key(section: str, key: str) -> None:
    engine, *_ = refimpl.initialize(model=nn.Linear(4, 4), config=config(0, **{section: {"enabled": True}}))
    with pytest.raises(RuntimeError, match="dtype") as error:
        engine(torch.ones(1, 4))
    assert key in error.value.__notes__[0]
    if key == "bf16.enabled":  # in fp32 no key is the reason
        engine.destroy()
        engine, *_ = refimpl.initialize(model=nn.Linear(4, 4), config=config(0))
        with pytest.raises(RuntimeError, match="dtype") as error:
            engine(torch.ones(1, 4, dtype=torch.float64))
        assert not hasattr(error.value, "__notes__")
    with pytest.raises(RuntimeError, match="cannot be multiplied") as error:  # another mistake is not explained so
        engine(torch.ones(1, 3, dtype=engine.config.dtype))
    assert not hasattr(error.value, "__notes__")


class Shifted(nn.Linear):
    """x + a buffer, then a product, as in Segment Anything's mask decoder (LISA)."""

    shift: Tensor

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.register_buffer("shift", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.shift)


def test_a_buffer_of_another_dtype_is_told_its_name_and_the_key() -> None:
    sixteen = {"bf16": {"enabled": True}}
    engine, *_ = refimpl.initialize(model=Shifted(), config=config(0, **sixteen))
    with pytest.raises(RuntimeError, match="dtype") as error:
        engine(torch.ones(1, 4, dtype=torch.bfloat16))
    (note,) = error.value.__notes__
    assert 'shift is torch.float32; "data_types": {"buffer_dtype": "bf16"}' in note
    engine.destroy()
    engine, *_ = refimpl.initialize(model=Shifted(), config=config(0, **sixteen, data_types={"buffer_dtype": "bf16"}))
    assert engine(torch.ones(1, 4, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_a_step_without_an_optimizer_says_where_one_is_given() -> None:
    engine, *_ = refimpl.initialize(model=Net(), config={"train_micro_batch_size_per_gpu": 1})
    with pytest.raises(RuntimeError, match='give one to `initialize`, or its configuration a section "optimizer"'):
        engine.step()


def test_an_engine_says_what_to_copy_in_its_place() -> None:
    engine, *_ = refimpl.initialize(model=Net(), config=config(2))
    for copier in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=r"Engine\) cannot be copied or pickled: copy\.deepcopy\(engine\.module\)"):
            copier(engine)
        with pytest.raises(TypeError, match=r"SGD that Zero2 has taken over cannot be copied or pickled: optimizer\."):
            copier(engine.optimizer)


@pytest.mark.parametrize("stage", STAGES)
def test_torchs_ddp_around_an_engine_or_its_model_is_refused(stage: int) -> None:
    """... and around a copy of the model, or the model once it is let go, it is not."""

    def wrapped() -> None:
        engine, *_ = refimpl.initialize(model=Net(), config=config(stage))
        model, copied = engine.module, copy.deepcopy(engine.module)
        for what, who in ((engine, "an Engine"), (model, f"a model that {type(engine.stage).__name__} trains")):
            with pytest.raises(TypeError, match=f"DistributedDataParallel around {who}, which averages gradients"):
                nn.parallel.DistributedDataParallel(what)
        nn.parallel.DistributedDataParallel(copied)
        engine.destroy()
        if stage < 3:  # which leaves it in shards
            nn.parallel.DistributedDataParallel(model)

    worlds.run(wrapped, ranks=2)


@pytest.mark.parametrize("stage", STAGES)
def test_a_layer_that_comes_behind_the_engine_is_named(stage: int, tmp_path: Path) -> None:
    """Nobody trains it, as in torch, whose optimizer does not know it; a parameter without a gradient is no news."""

    def told() -> list[str]:
        engine, *_ = refimpl.initialize(model=Net(), config=config(stage))
        engine.module.late, engine.module.idle = nn.Linear(1, 1), nn.Linear(1, 1)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step in range(3):
                engine.backward(engine.module.late(engine(batch(engine.group.rank, step, 0)).view(1)).sum())
                engine.step()
        with pytest.raises(CheckpointError, match=r"late\.weight, late\.bias, idle\.weight, idle\.bias: added"):
            engine.save_checkpoint(tmp_path)
        return [str(w.message) for w in caught]

    for texts in worlds.run(told, ranks=2):
        assert len(texts) == 2  # the first and the second step
        assert all(text.startswith("late.weight, late.bias: added to the model since") for text in texts)


@pytest.mark.parametrize("stage", STAGES)
def test_an_adapter_that_comes_behind_the_engine_and_is_all_that_has_a_gradient(stage: int) -> None:
    """PEFT's add_adapter and set_adapter: the rest is frozen, and the step has nothing. By `step` or by hand."""

    def told(by_hand: bool) -> None:
        engine, *_ = refimpl.initialize(model=Net(), config=config(stage))
        for step in range(2):
            engine.backward(engine(batch(engine.group.rank, step, 0)))
            engine.step()
        engine.module.requires_grad_(False)
        engine.module.late = nn.Linear(1, 1)
        said = "late.weight, late.bias: added to the model since the stage was built, so not trained: complete"
        for _ in range(2):
            engine.module.late(engine(batch(engine.group.rank, 3, 0)).view(1)).sum().backward()
            refused = pytest.raises(RuntimeError, match=f"there are no gradients but of {said}")
            with pytest.warns(UserWarning, match=f"^{said}"), nullcontext() if by_hand else refused:
                (engine.optimizer if by_hand else engine).step()

    for by_hand in (True, False):
        worlds.run(told, by_hand, ranks=2)


@pytest.mark.parametrize("stage", STAGES)
def test_a_destroyed_engine_says_so(stage: int) -> None:
    engine, *_ = refimpl.initialize(model=Net(), config=config(stage))
    engine.destroy()
    engine.destroy()
    with pytest.raises(RuntimeError, match=r"step\(\) of a \w+ that was released \(an engine's destroy\(\)\)"):
        engine.step()
    if stage == 3:
        with pytest.raises(RuntimeError, match=r"before `initialize`, and after destroy\(\), this rank has 1/N"):
            engine(batch(0, 0, 0))


@pytest.mark.parametrize("stage", STAGES)
def test_a_step_that_trains_nothing_says_so(stage: int) -> None:
    """The loss is another engine's."""

    def told() -> list[str]:
        engine, other = (refimpl.initialize(model=Net(), config=config(stage))[0] for _ in range(2))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            other.backward(engine(batch(0, 0, 0)))
            other.step()
        return [f"{w.message} {w.filename}" for w in caught]

    for texts in worlds.run(told, ranks=2):
        assert len(texts) == 1
        assert texts[0].endswith(__file__), "the line of the script, not ours"
        assert "step() has nothing to update: the loss of no rank depends on a parameter" in texts[0]


@pytest.mark.parametrize("stage", STAGES)
def test_what_is_frozen_between_forward_and_backward_gets_no_gradient(stage: int) -> None:
    engine, *_ = refimpl.initialize(model=Net(), config=config(stage))
    before = weights_of(engine)
    loss = engine(batch(0, 0, 0))
    name, frozen = next(engine.module.named_parameters())
    frozen.requires_grad_(False)
    engine.backward(loss)
    engine.step()
    after = weights_of(engine)
    assert before is not None
    assert after is not None
    assert [torch.equal(before[key], after[key]) for key in after] == [key == name for key in after]


@pytest.mark.parametrize(("model", "said"), [(Net, "the class Net"), ([Net()], "a list")])
def test_what_is_no_module_is_refused(model: Any, said: str) -> None:
    with pytest.raises(TypeError, match=rf"model must be a torch\.nn\.Module, not {said}"):
        refimpl.initialize(model=model, config=config(0))


def another_optimizer(stage: int) -> dict[str, Tensor] | None:
    """An engine takes no other optimizer; the way that its error names trains on from the same weights."""
    engine, *_ = refimpl.initialize(model=Net(), config=config(stage))
    engine.optimizer = engine.optimizer  # as a helper does that gives back what it was given
    before = weights_of(engine)
    for other in (torch.optim.SGD([torch.zeros(1)], lr=0.1), None):
        with pytest.raises(AttributeError, match=r"cannot be replaced.*param_groups.*engine\.destroy\(\)"):
            engine.optimizer = other
        with pytest.raises(AttributeError, match="cannot be replaced"):
            engine.stage.optimizer = other
    engine.destroy()
    settings = {key: value for key, value in config(stage).items() if key != "optimizer"}
    sgd = torch.optim.SGD(engine.module.parameters(), lr=0.0)
    anew, *_ = refimpl.initialize(model=engine.module, optimizer=sgd, config=settings)
    anew.backward(anew(batch(anew.group.rank, 0, 0)))
    anew.step()
    after = weights_of(anew)
    assert before is None or after is None or all(torch.equal(after[name], w) for name, w in before.items())
    return after


@pytest.mark.parametrize("stage", STAGES)
def test_another_optimizer_is_another_engine(stage: int) -> None:
    assert worlds.run(another_optimizer, stage, ranks=2)[0] is not None
