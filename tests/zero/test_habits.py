"""Habits of foreign training scripts, found by an attack on the stages: right as in plain torch, or refused by name."""

import copy
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from pairs import pairwise
from test_plain_loop import batch, by_adamw, every_stage, plain, sgd, small
from torch import Tensor, nn
from training import STAGES
from worlds import run

from refimpl.comm.group import Group
from refimpl.launch import RankError
from refimpl.zero.config import ZeroConfig
from refimpl.zero.init import GatheredParameters

Habit = Callable[[nn.Module, torch.optim.Optimizer, list[int], int], None]


class Branching(nn.Module):
    """The second layer is used for rank 1's samples only."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x: Tensor, rank: int) -> Tensor:
        out: Tensor = self.first(x) if rank == 0 else self.second(self.first(x))
        return out.square().mean()


def backwards(model: nn.Module, step: int, ranks: list[int], share: int) -> None:
    for rank in ranks:
        (model(batch(step, rank), rank) / share).backward()


def clipped_after_unequal_micro_batches(model: nn.Module, optimizer: Any, ranks: list[int], share: int) -> None:
    for step in range(6):
        for micro in range(1 + step % 2):
            backwards(model, 10 * step + micro, ranks, share)
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()


class Wrapped:
    """Another object of a class made of its own and the optimizer's, so that `isinstance` sees an optimizer."""

    def __init__(self, optimizer: Any) -> None:
        self.inner = optimizer
        self.__class__ = type("Wrapped", (Wrapped, type(optimizer)), {})

    def step(self) -> None:
        self.inner.step()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def clipped_through_the_optimizer(model: nn.Module, optimizer: Any, ranks: list[int], share: int) -> None:
    """As Lightning does, in a wrapper like its own."""
    wrapped = Wrapped(optimizer)
    assert isinstance(wrapped, torch.optim.Optimizer)
    for step in range(4):
        backwards(model, step, ranks, share)
        nn.utils.clip_grad_norm_([p for g in optimizer.param_groups for p in g["params"]], 0.05)
        wrapped.step()
        optimizer.zero_grad()


HABITS: list[Habit] = [clipped_after_unequal_micro_batches, clipped_through_the_optimizer]


def all_habits(stage_name: str) -> list[dict[str, Tensor]]:
    group, ends = Group.world(), []
    for habit in HABITS:
        model = Branching()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        stage = STAGES[stage_name](model, optimizer, group, ZeroConfig(reduce_bucket_size=20))
        habit(model, optimizer, [group.rank], 1)
        ends.append(dict(model.state_dict()))
        stage.release()
        loss = model(batch(0, 0), 1)
        before = copy.deepcopy(model.state_dict())
        loss.backward()
        optimizer.step()  # an ordinary optimizer of an ordinary model again
        assert not torch.equal(before["first.weight"], model.state_dict()["first.weight"])
    return ends


@pytest.mark.parametrize("stage", ["ddp", "zero1", "zero2"])
def test_clipping_sees_the_whole_gradient_on_every_rank(stage: str) -> None:
    """Also of parameters that this rank did not use. (ZeRO-3 needs the same path on all ranks.)"""
    for ends in run(all_habits, stage, ranks=2):
        for habit, weights in zip(HABITS, ends, strict=True):
            model = Branching()
            habit(model, torch.optim.SGD(model.parameters(), lr=0.5), [0, 1], 2)
            for name, expected in model.state_dict().items():
                torch.testing.assert_close(weights[name], expected, rtol=1e-4, atol=1e-6)


def step_in_backward(model: nn.Module) -> None:
    """An optimizer a parameter, as torch's tutorial saves the gradients' memory, and as FSDP2 may be used."""
    optimizers = {p: torch.optim.AdamW([p]) for p in model.parameters()}

    def step(p: Any) -> None:
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


class Around(nn.Module):
    """A parametrization that comes and goes with the forward, as PEFT's `target_parameters`: it is set to itself."""

    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside = inside

    def forward(self, x: Tensor) -> Tensor:
        nn.utils.parametrize.register_parametrization(self.inside[0], "weight", Doubled())  # type: ignore[index]
        out: Tensor = self.inside(x)
        nn.utils.parametrize.remove_parametrizations(self.inside[0], "weight", leave_parametrized=False)  # type: ignore[index]
        return out


def by_set(model: Any, optimizer: Any, ranks: list[int], how: str) -> list[Tensor]:
    """Parameters that torch sets: to themselves, or to other values, as where a parametrization ends."""
    for step in range(3):
        for rank in ranks:
            (model(batch(step, rank)).square().mean() / len(ranks)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if how == "other values":
            with GatheredParameters(model, modifier_rank=0), torch.no_grad():
                model.inside[0].weight.set_(model.inside[0].weight.detach() / 2)
    return [w.clone() for w in model.state_dict().values()]


def by_set_in(stage: str, how: str) -> list[Tensor]:
    model, group = Around(small()), Group.world()
    optimizer = sgd(model)
    STAGES[stage](model, optimizer, group)
    return by_set(model, optimizer, [group.rank], how)


@every_stage
@pytest.mark.parametrize("how", ["itself", "other values"])
def test_parameters_may_be_set(stage: str, how: str) -> None:
    model = Around(small())
    expected = by_set(model, sgd(model), [0, 1], how)
    for weights in run(by_set_in, stage, how, ranks=2):
        for found, right in zip(weights, expected, strict=True):
            torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-6)


def torch_steps_in_backward(model: nn.Module) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch.jit, which the import uses
        from torch.distributed.optim import _apply_optimizer_in_backward
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})


def refused(stage_name: str, how: str) -> None:
    group = Group.world()
    model: Any = small()
    optimizer: Any = by_adamw(model)
    if how == "complex":
        model.register_parameter("wave", nn.Parameter(torch.ones(3, dtype=torch.complex64)))
    if how == "one memory":
        model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
        model[1].weight.data = model[0].weight.data
    if how == "reduced by torch":
        model = nn.Sequential(nn.parallel.DistributedDataParallel(model))
    if how == "momentum":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        plain(model, optimizer, lambda step: batch(step, 0))
    if how == "inference":
        with torch.inference_mode():
            model = small()
    if how == "built in inference":
        with torch.inference_mode():
            STAGES[stage_name](model, optimizer, group)
    if how == "lazy":
        model = nn.Sequential(nn.LazyLinear(7))
    if how in ("complex", "one memory", "reduced by torch", "inference", "lazy"):
        optimizer = by_adamw(model)
    if how == "steps in backward":
        step_in_backward(model)
    if how == "torch's in backward":
        torch_steps_in_backward(model)
    STAGES[stage_name](model, optimizer, group)
    if how == "torch's in backward, later":
        torch_steps_in_backward(model)
    if how == "steps in backward, later":
        step_in_backward(model)
    plain(model, optimizer, lambda step: batch(step, group.rank))
    if how == "data":
        model[0].weight.data = torch.zeros(7, 5)
    if how == "swapped":
        with mock.patch.object(torch.__future__, "_swap_module_params_on_conversion", True):
            model.load_state_dict(model.state_dict())
    if how == "state of another":
        optimizer.load_state_dict(group.all_gather_object(optimizer.state_dict())[0])
    if how in ("step", "zero_grad"):
        model[0].weight.register_hook(lambda _: getattr(optimizer, how)())
        model(batch(9, group.rank)).square().mean().backward()
    if how == "script":
        torch.jit.script(model)
    if how == "late backward":
        loss = model(batch(9, group.rank)).square().mean()
        plain(model, optimizer, lambda step: batch(step, group.rank))
        loss.backward()


@every_stage
@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("complex", "parameter wave is complex"),
        ("one memory", "parameters 0.weight and 1.weight share their memory"),
        ("reduced by torch", "0 is torch's DistributedDataParallel, .*: hand over its .module"),
        ("momentum", "SGD has already taken steps"),
        ("data", r"parameter 0.weight\.data = .*p.data.copy_|parameter 0.weight: data needs its values"),
        ("swapped", r"load_state_dict would put another tensor in .*set_swap_module_params_on_conversion\(False\)"),
        ("state of another", r"this state is rank 0's of 2, Zero\d; here is rank 1 of 2"),
        ("late backward", "modified by an inplace operation"),
        ("inference", r"parameter 0\.weight: it was made, .*, under torch\.inference_mode"),
        ("built in inference", r"parameter 0\.weight: .*, or its stage is built, under torch\.inference_mode"),
        ("lazy", r"parameter 0\.weight is a UninitializedParameter: run a forward first"),
        ("step", r"step\(\) inside backward, by a hook"),
        ("zero_grad", r"zero_grad\(\) inside backward, by a hook"),
        ("steps in backward", r"weight.* written in backward, by a hook: an optim|was written while it was gathered"),
        ("steps in backward, later", r"written in backward, by a hook: an optim|was written while it was gathered"),
        ("torch's in backward", r"parameter 0\.weight has an optimizer that steps in backward"),
        ("torch's in backward, later", r"0\.weight has an optimizer that steps in backward|needs its values"),
        ("script", "a stage's hooks cannot be compiled"),
    ],
)
def test_what_would_go_wrong_unseen_is_refused(stage: str, how: str, message: str) -> None:
    if (how, stage) == ("state of another", "ddp"):
        return  # every rank of DDP has the same state
    with pytest.raises(RankError, match=f"(?s){message}"):
        run(refused, stage, how, ranks=2)


class Renormed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 8, max_norm=0.1)

    def forward(self) -> Tensor:
        out: Tensor = self.embed(torch.arange(6))
        return out.sum()


def written_in_forward() -> None:
    model = Renormed()
    STAGES["zero3"](model, by_adamw(model))
    model().backward()


def traced() -> None:
    """It crashed."""
    model = small()
    STAGES["zero3"](model, by_adamw(model))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.trace(model, batch(0, 0))


def test_a_trace_of_zero3_is_refused() -> None:
    with pytest.raises(RankError, match=r"trace copy\.deepcopy\(model\)"):
        run(traced, ranks=2)


def test_a_weight_written_in_forward_is_refused_by_zero3() -> None:
    with pytest.raises(RankError, match="a parameter of embed was written while it was gathered"):
        run(written_in_forward, ranks=2)


def in_double(stage_name: str) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, tuple[Any, Any]]]:
    """The weights, one process's, and of each name what the stage tells of the weight and of its first moment."""

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        plain(model, optimizer, lambda step: batch(step, 0).double())
        return dict(model.state_dict())

    model = small().double()
    optimizer = by_adamw(model)
    stage = STAGES[stage_name](model, optimizer)
    twin = small().double()
    weights, expected = train(model, optimizer), train(twin, by_adamw(twin))
    return weights, expected, {n: (stage.full_parameter(n), stage.full_state(n, "exp_avg")) for n in weights}


@every_stage
def test_fp64_stays_fp64(stage: str) -> None:
    for weights, expected, told in run(in_double, stage, ranks=2):
        for name, w in weights.items():
            weight, moment = told[name]
            assert torch.equal(weight, w)
            assert moment.dtype == torch.float64
            assert not torch.equal(moment, moment.float().double())
            torch.testing.assert_close(w, expected[name], rtol=1e-12, atol=1e-12)
            assert not torch.equal(w, w.float().double())


def two_stages_share(stage_name: str) -> list[Tensor]:
    """An optimizer, and so a stage, for each half of a model; gradients of one half kept for later."""
    group, model = Group.world(), small()
    first: Any = model
    one = torch.optim.SGD(first[0].parameters(), lr=0.1)
    two = torch.optim.SGD(first[2].parameters(), lr=0.2)
    if group.size > 1:
        STAGES[stage_name](model, one, group)
        STAGES[stage_name](model, two, group)
    data = batch(0, group.rank) if group.size > 1 else torch.cat([batch(0, 0), batch(0, 1)])
    kept = []
    for scale in (1.0, 3.0):
        model(scale * data).square().mean().backward()
        one.step()
        if stage_name == "ddp":
            kept.append(first[2].weight.grad)
        one.zero_grad()
        two.step()
        two.zero_grad()
    if kept and group.size > 1:
        assert not torch.equal(kept[0], kept[1]), "what was kept is not overwritten by the next backward"
    return list(model.state_dict().values())


@pytest.mark.parametrize("stage", ["ddp", "zero1", "zero2"])
def test_two_optimizers_of_one_model_have_a_stage_each(stage: str) -> None:
    expected = run(two_stages_share, stage, ranks=1)[0]
    for got in run(two_stages_share, stage, ranks=2):
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def seen_by_a_hook(stage_name: str) -> tuple[list[Tensor], list[Tensor]]:
    """By one that came after the stage, and doubles what it sees; and the weights after a step."""
    model: Any = small()
    stage = STAGES[stage_name](model, sgd(model))
    seen: list[Tensor] = []

    def hook(p: Tensor) -> None:
        assert p.grad is not None
        seen.append(p.grad.clone())
        p.grad.mul_(2)

    handles = [p.register_post_accumulate_grad_hook(hook) for p in model.parameters()]
    model(batch(0, Group.world().rank)).square().mean().backward()
    stage.step()
    [handle.remove() for handle in handles]
    model(batch(1, 0)).square().mean().backward()
    stage.zero_grad()
    return seen, [stage.full_parameter(name) for name in stage.names.values()]


@pytest.mark.parametrize(("stage", "ranks"), pairwise(list(STAGES), [2, 3]))
def test_a_hook_of_the_users_sees_this_ranks_gradient_before_it_travels(stage: str, ranks: int) -> None:
    """As under torch's DDP."""
    found = run(seen_by_a_hook, stage, ranks=ranks)
    model = small()
    optimizer, means = sgd(model), [torch.zeros_like(p) for p in model.parameters()]
    for rank, (seen, _) in enumerate(found):
        own = torch.autograd.grad(model(batch(0, rank)).square().mean(), list(model.parameters()))
        assert len(seen) == len(own)
        assert all(any(torch.equal(g, s) for s in seen) for g in own)
        torch._foreach_add_(means, own, alpha=2 / ranks)
    for p, mean in zip(model.parameters(), means, strict=True):
        p.grad = mean
    optimizer.step()
    for got, expected in zip(found[0][1], model.parameters(), strict=True):
        torch.testing.assert_close(got, expected.detach())


def told_of_what_is_dropped(stage_name: str) -> list[str]:
    model: Any = small()
    optimizer = by_adamw(model)
    STAGES[stage_name](model, optimizer)
    model(batch(0, 0)).sum().backward()
    hook = model[0].weight.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(batch(1, 0)).sum().backward()
    hook.remove()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        model(batch(2, 0)).sum().backward()
    return [str(w.message) for w in seen]


@every_stage
def test_gradients_dropped_with_an_exception_are_told(stage: str) -> None:
    for (told,) in run(told_of_what_is_dropped, stage, ranks=2):
        assert "the backward before this forward raised" in told


def with_nothing_in_it(kind: str, dtype: torch.dtype) -> list[Tensor]:
    """A layer whose weight has no elements, trained beside another; the weights of the other at the end."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"some": nn.Linear(5, 3), "none": nn.Linear(0, 3, bias=False)}).to(dtype)
    stage = STAGES[kind](model, torch.optim.AdamW(model.parameters(), lr=1e-2), Group.world(), ZeroConfig())  # type: ignore[call-arg]
    for step in range(2):
        x = batch(step, Group.world().rank).to(dtype)
        stage.backward((model["some"](x) + model["none"](x[:, :0])).float().square().mean())
        assert stage.step()
    return [stage.full_parameter("some.weight"), stage.full_parameter("none.weight")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_parameter_without_elements_is_trained_along(dtype: torch.dtype) -> None:
    expected, nothing = run(with_nothing_in_it, "ddp", dtype, ranks=3)[0]
    assert nothing.numel() == 0
    for kind in ("zero1", "zero2", "zero3"):
        for found, _ in run(with_nothing_in_it, kind, dtype, ranks=3):
            assert torch.equal(found, expected), kind
