"""A stage in loops that nobody wrote for it: plain backward and step, several losses, closures, exceptions."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from training import STAGES, Net, adamw, tokens
from worlds import run

from refimpl.comm.group import Group
from refimpl.launch import RankError
from refimpl.optim.loss_scale import DynamicLossScaler
from refimpl.zero.config import ZeroConfig
from refimpl.zero.stage import Stage

every_stage = pytest.mark.parametrize("stage", list(STAGES))
Loop = Callable[[nn.Module, torch.optim.Optimizer, Callable[[int], Tensor]], None]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def small(group: int = 0) -> nn.Module:
    torch.manual_seed(group)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(100 * step + rank))


# Each loop is written for plain torch; `data(step)` is the rank's own batch, or all ranks' one after another.


def plain(model: nn.Module, optimizer: torch.optim.Optimizer, data: Callable[[int], Tensor]) -> None:
    for step in range(4):
        optimizer.zero_grad()
        model(data(step)).square().mean().backward()
        optimizer.step()


def zeroed_by_the_module(model: nn.Module, optimizer: torch.optim.Optimizer, data: Callable[[int], Tensor]) -> None:
    for step in range(4):
        model(1000 * data(step)).square().mean().backward()
        model.zero_grad()
        model(data(step)).square().mean().backward()
        optimizer.step()
        model.zero_grad(set_to_none=False)


def two_losses(model: nn.Module, optimizer: torch.optim.Optimizer, data: Callable[[int], Tensor]) -> None:
    for step in range(3):
        out = model(data(step))
        out.square().mean().backward(retain_graph=True)
        out.abs().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def two_forwards(model: nn.Module, optimizer: torch.optim.Optimizer, data: Callable[[int], Tensor]) -> None:
    for step in range(3):
        (model(data(step)) * model(data(step + 7)).tanh()).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def penalised(model: nn.Module, optimizer: torch.optim.Optimizer, data: Callable[[int], Tensor]) -> None:
    for step in range(3):
        x = data(step).requires_grad_()
        loss = model(x).square().mean()
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        (loss + (slope.norm(dim=1) * len(x) - 1).square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()


def penalised_whole(model: nn.Module, optimizer: torch.optim.Optimizer, data: Callable[[int], Tensor]) -> None:
    """ZeRO-3 gathers the model as one, as it does blocks on a GPU: the input that is derived by is a leaf module's."""
    penalised(model, optimizer, data)


def recomputed(model: nn.Module, optimizer: torch.optim.Optimizer, data: Callable[[int], Tensor]) -> None:
    for step in range(3):
        x = data(step).requires_grad_()
        for layer in model.children():
            x = checkpoint(layer, x, use_reentrant=True)
        x.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def with_a_closure(model: nn.Module, optimizer: torch.optim.Optimizer, data: Callable[[int], Tensor]) -> None:
    for step in range(3):

        def closure(step: int = step) -> Tensor:
            optimizer.zero_grad()
            loss = model(data(step)).square().mean()
            loss.backward()
            return loss

        loss = optimizer.step(closure)
        assert loss is not None
        assert loss.item() > 0


def scheduled(model: nn.Module, optimizer: torch.optim.Optimizer, data: Callable[[int], Tensor]) -> None:
    """The order of transformers' Trainer: clip, step, schedule, model.zero_grad."""
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    optimizer.step()  # without a gradient: nothing
    for step in range(4):
        model(data(step)).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        schedule.step()
        model.zero_grad()


def clipped_by_value(model: nn.Module, optimizer: torch.optim.Optimizer, data: Callable[[int], Tensor]) -> None:
    for step in range(3):
        model(data(step)).square().mean().backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.02)
        optimizer.step()
        optimizer.zero_grad()


def frozen_and_unfrozen(model: Any, optimizer: torch.optim.Optimizer, data: Callable[[int], Tensor]) -> None:
    for step in range(6):
        model[0].requires_grad_(step >= 2)
        model[2].weight.requires_grad_(step != 3)
        model(data(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def frozen_from_the_start(model: Any, optimizer: torch.optim.Optimizer, data: Callable[[int], Tensor]) -> None:
    for step in range(4):
        if step == 2:
            turned = -1 if dist.is_initialized() and dist.get_rank() == 1 else 1  # as of a set, on each rank another
            for p in list(model.parameters())[::turned]:
                p.requires_grad_(True)
        model(data(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def group_added(model: Any, optimizer: torch.optim.Optimizer, data: Callable[[int], Tensor]) -> None:
    for step in range(4):
        if step == 2:
            model[2].requires_grad_(True)
            optimizer.add_param_group({"params": list(model[2].parameters()), "lr": 0.02})
        model(data(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def layers_skipped(model: Any, optimizer: torch.optim.Optimizer, data: Callable[[int], Tensor]) -> None:
    for step in range(6):
        x = model[1](model[0](data(step)))
        (model[2](x) if step % 3 == 2 else x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def interrupted(model: Any, optimizer: torch.optim.Optimizer, data: Callable[[int], Tensor]) -> None:
    for step in range(4):
        out = model(data(step)).square().mean()
        if step == 2:
            hook = model[0].weight.register_hook(lambda _: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                out.backward()
            hook.remove()
            optimizer.zero_grad()
            continue
        out.backward()
        optimizer.step()
        optimizer.zero_grad()


LOOPS: list[Loop] = [
    plain, zeroed_by_the_module, two_losses, two_forwards, penalised, penalised_whole, recomputed, with_a_closure,
    scheduled, clipped_by_value, frozen_and_unfrozen, layers_skipped, interrupted,
]  # fmt: skip


def by_adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def only_last_frozen(model: Any) -> torch.optim.Optimizer:
    model[0].requires_grad_(False)
    return by_adamw(model)


def only_first(model: Any) -> torch.optim.Optimizer:
    model[2].requires_grad_(False)
    return torch.optim.AdamW(model[0].parameters(), lr=1e-2)


CASES: list[tuple[Loop, Callable[[nn.Module], torch.optim.Optimizer]]] = [
    *((loop, by_adamw) for loop in LOOPS), (frozen_from_the_start, only_last_frozen), (group_added, only_first),
]  # fmt: skip


def in_every_loop(stage_name: str) -> list[dict[str, Tensor]]:
    """One job for all loops: the weights after each."""
    warnings.simplefilter("error")
    group, ends = Group.world(), []
    for loop, optimizer_of in CASES:
        model = small(group.rank)
        optimizer = optimizer_of(model)
        leaves = (nn.Sequential,) if loop is penalised_whole else ()
        stage = STAGES[stage_name](model, optimizer, group, ZeroConfig(reduce_bucket_size=40, leaf_modules=leaves))
        loop(model, optimizer, lambda step: batch(step, group.rank))
        ends.append({name: w.clone() for name, w in model.state_dict().items()})
        hook = model[0].weight.register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(batch(0, group.rank)).square().mean().backward()
        hook.remove()
        stage.release()
        assert all(type(p) is nn.Parameter and not vars(p) for p in model.parameters()), "as before: it can be pickled"
        assert not optimizer.state, "of slices that are gone"
    return ends


@every_stage
def test_every_loop_ends_as_in_plain_torch(stage: str) -> None:
    """Equal up to rounding: one process sees all ranks' samples as one batch, over which the loss is a mean."""
    ranks = 3
    for got in run(in_every_loop, stage, ranks=ranks):
        for (loop, optimizer_of), weights in zip(CASES, got, strict=True):
            model = small(0)
            optimizer = optimizer_of(model)
            loop(model, optimizer, lambda step: torch.cat([batch(step, rank) for rank in range(ranks)]))
            for name, expected in model.state_dict().items():
                torch.testing.assert_close(
                    weights[name],
                    expected,
                    rtol=1e-4,
                    atol=2e-6,
                    msg=lambda m, at=f"{loop.__name__} {name}": f"{at}: {m}",
                )


def nothing_to_show(stage_name: str) -> list[bool]:
    """Of a layer that no rank uses and of a gradient set to None: whether it is None, and whether a step leaves it."""
    group, model = Group.world(), nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)
    stage = STAGES[stage_name](model, optimizer, group)
    unused, dropped = model[1].weight, model[0].weight
    before = [stage.full_parameter(p) for p in (unused, dropped)]
    stage.backward(model[0](torch.ones(1, 3)).sum())
    dropped.grad = None
    seen = [unused.grad is None, dropped.grad is None]
    optimizer.step()
    return seen + [torch.equal(stage.full_parameter(p), w) for p, w in zip((unused, dropped), before, strict=True)]


@every_stage
def test_no_gradient_is_none_and_moves_nothing(stage: str) -> None:
    """Where a rank has 1/N of it, none knows alone whether another one has used a layer: it shows zeros."""
    known = stage == "ddp"
    assert run(nothing_to_show, stage, ranks=2) == [[known, True, True, True]] * 2


def lbfgs(model: nn.Module, optimizer: torch.optim.Optimizer, data: Callable[[int], Tensor]) -> None:
    """Asks its closure several times a step. (A line search would compare losses, which differ between ranks.)"""
    for step in range(2):

        def closure(step: int = step) -> Tensor:
            optimizer.zero_grad()
            loss = model(data(step)).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)  # type: ignore[arg-type]


class PerTensor(torch.optim.Optimizer):
    """Not element-wise: every tensor's step has length lr."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] * p.grad / p.grad.norm())


def whole_optimizers() -> list[dict[str, Tensor]]:
    group, ends = Group.world(), []
    for loop, make in WHOLE:
        model = small(group.rank)
        optimizer = make(model)
        STAGES["ddp"](model, optimizer, group, ZeroConfig(reduce_bucket_size=40))
        loop(model, optimizer, lambda step: batch(step, group.rank))
        ends.append({name: w.clone() for name, w in model.state_dict().items()})
    for loop, make in WHOLE:  # or without telling the stage of it
        model = small(group.rank)
        stage = STAGES["ddp"](model)
        loop(model, make(model), lambda step: batch(step, group.rank))
        ends.append({name: w.clone() for name, w in model.state_dict().items()})
        assert stage.group.size == 2
    return ends


WHOLE: list[tuple[Loop, Callable[[nn.Module], torch.optim.Optimizer]]] = [
    (lbfgs, lambda model: torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)),
    (plain, lambda model: PerTensor(model.parameters(), lr=0.05)),
]


def test_any_optimizer_at_stage_0() -> None:
    for ends in run(whole_optimizers, ranks=2):
        for (loop, make), weights in zip(WHOLE * 2, ends, strict=True):
            model = small(0)
            loop(model, make(model), lambda step: torch.cat([batch(step, rank) for rank in range(2)]))
            for name, expected in model.state_dict().items():
                torch.testing.assert_close(weights[name], expected, rtol=1e-4, atol=1e-5)


def two_models(stage_name: str, how: str) -> list[Tensor]:
    """A generator's loss through its discriminator, a student beside its teacher, an actor and a critic in one loss."""
    group = Group.world()
    make = STAGES[stage_name]
    first, second = small(1), nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1))
    torch.manual_seed(5)
    for p in second.parameters():
        nn.init.normal_(p)
    one, two = by_adamw(first), by_adamw(second)
    if group.size > 1:
        stages = [make(first, one, group), make(second, two, group)]
        assert len(stages) == 2
    for step in range(3):
        x = batch(step, group.rank) if group.size > 1 else torch.cat([batch(step, rank) for rank in range(2)])
        if how == "gan":
            one.zero_grad()
            second(first(x)).mean().backward()
            one.step()
            two.zero_grad()  # what the generator's loss left in the discriminator
            second(first(x).detach()).square().mean().backward()
            two.step()
        else:
            one.zero_grad()
            two.zero_grad()
            out = first(x)
            (out.square().mean() + second(out.detach()).mean()).backward()
            one.step()
            two.step()
    return [w.clone() for model in (first, second) for w in model.state_dict().values()]


@every_stage
@pytest.mark.parametrize("how", ["gan", "sum"])
def test_one_loss_over_two_stages(stage: str, how: str) -> None:
    expected = run(two_models, stage, how, ranks=1)[0]
    for got in run(two_models, stage, how, ranks=2):
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-6)


def fp16_by_hand(stage_name: str) -> tuple[bool, list[float]]:
    group = Group.world()
    torch.manual_seed(0)
    model = Net().half()
    optimizer = adamw(model)
    stage = STAGES[stage_name](model, optimizer, group, scaler=DynamicLossScaler(2.0**10))
    losses = []
    for step in range(4):
        loss = model(tokens(step, group.rank))
        stage.scale(loss).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return stage.skipped_steps == 0 and 0 < (stage.grad_norm or 0) < 10, losses


@every_stage
def test_fp16_in_a_plain_loop(stage: str) -> None:
    for fine, losses in run(fp16_by_hand, stage, ranks=2):
        assert fine
        assert losses[-1] < losses[0]


def amp(stage_name: str, unscales: bool) -> None:
    model = small()
    optimizer = by_adamw(model)
    STAGES[stage_name](model, optimizer)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(batch(0, 0)).mean()).backward()  # type: ignore[no-untyped-call]
    if unscales:  # as loops do that clip
        scaler.unscale_(optimizer)
    scaler.step(optimizer)


@every_stage
@pytest.mark.parametrize("unscales", [False, True])
def test_torchs_scaler_is_refused_with_the_remedy(stage: str, unscales: bool) -> None:
    with pytest.raises(RankError, match=r"GradScaler looks for overflow on this rank alone.*DynamicLossScaler"):
        run(amp, stage, unscales, ranks=2)


def later(stage_name: str) -> list[Tensor]:
    """A stage first, its optimizer after; then bare parameters."""
    model = small()
    stage: Stage = STAGES[stage_name](model)
    assert torch.equal(model(batch(0, 0)), small()(batch(0, 0)))
    first: Any = model
    with pytest.raises(RuntimeError, match=r"has no optimizer: .* or by `attach`"):
        stage.add_param_group({"params": list(first[2].parameters())})
    optimizer = torch.optim.AdamW(
        [{"params": first[0].parameters()}, {"params": first[2].parameters(), "lr": 1e-2}], lr=1e-3, weight_decay=0.1
    )
    stage.attach(optimizer)
    plain(model, optimizer, lambda step: batch(step, stage.group.rank))
    weights = list(model.state_dict().values())
    if stage_name != "zero3":
        bare = small()
        of_bare = by_adamw(bare)
        STAGES[stage_name](list(bare.parameters()), of_bare)
        plain(bare, of_bare, lambda step: batch(step, stage.group.rank))
        weights += list(bare.state_dict().values())
    return weights


@every_stage
def test_an_optimizer_after_the_stage_and_bare_parameters(stage: str) -> None:
    expected = run(later, stage, ranks=1)[0]
    model: Any = small()
    optimizer = torch.optim.AdamW(
        [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 1e-2}], lr=1e-3, weight_decay=0.1
    )
    plain(model, optimizer, lambda step: batch(step, 0))
    for a, b in zip(expected[:4], model.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b)
    for a, b in zip(*run(later, stage, ranks=2), strict=True):
        assert torch.equal(a, b)
