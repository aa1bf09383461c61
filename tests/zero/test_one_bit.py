"""1-bit Adam, 0/1 Adam and 1-bit LAMB on real ranks against the papers' algorithms in one process, and in bytes."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from one_bit_oracle import Named, Play, one_bit_adam, one_bit_lamb, zero_one_adam
from torch import Tensor, nn
from training import Job, Net, tokens, train
from worlds import run

from refimpl.comm.group import Group
from refimpl.launch import RankError
from refimpl.optim.lamb import Lamb
from refimpl.optim.loss_scale import DynamicLossScaler
from refimpl.optim.one_bit_adam import OneBitAdam
from refimpl.optim.one_bit_lamb import OneBitLamb
from refimpl.optim.travelling import Travelling
from refimpl.optim.zero_one_adam import ZeroOneAdam
from refimpl.zero.config import ZeroConfig
from refimpl.zero.ddp import DDP
from refimpl.zero.zero1 import Zero1

RANKS = (2, 3, 4)


def groups(model: nn.Module) -> list[dict[str, list[nn.Parameter]]]:
    matrices = [p for p in model.parameters() if p.ndim > 1]
    return [{"params": matrices}, {"params": [p for p in model.parameters() if p.ndim < 2]}]


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return OneBitAdam(groups(model), lr=1e-2, freeze_step=3, weight_decay=0.1, bias_correction=False)


def corrected(model: nn.Module) -> torch.optim.Optimizer:
    return OneBitAdam(groups(model), lr=1e-2, freeze_step=3, weight_decay=0.1)


def zero_one(model: nn.Module) -> torch.optim.Optimizer:
    return ZeroOneAdam(
        groups(model), lr=1e-2, bias_correction=False, var_freeze_step=5, var_update_scaler=2, local_step_scaler=3,
        local_step_clipper=2,
    )  # fmt: skip


def lamb(model: nn.Module) -> torch.optim.Optimizer:
    return OneBitLamb(groups(model), lr=1e-2, freeze_step=3, weight_decay=0.1, max_coeff=0.5, bias_correction=False)


CASES: dict[str, tuple[Callable[[nn.Module], torch.optim.Optimizer], Callable[[Play], Named]]] = {
    "one_bit_adam": (adam, partial(one_bit_adam, steps=8, freeze=3, lr=1e-2, decay=0.1, corrected=False)),
    "corrected": (corrected, partial(one_bit_adam, steps=8, freeze=3, lr=1e-2, decay=0.1, corrected=True)),
    "zero_one_adam": (zero_one, partial(zero_one_adam, steps=12, freeze=5, kappa=2, scaler=3, most=2, lr=1e-2)),
    "one_bit_lamb": (lamb, partial(one_bit_lamb, steps=8, freeze=3, lr=1e-2, decay=0.1, top=0.5)),
}
every_one = pytest.mark.parametrize("name", list(CASES))


@pytest.mark.parametrize("ranks", RANKS)
@every_one
def test_the_papers_algorithm(name: str, ranks: int) -> None:
    """Tied, frozen, unused and odd-sized parameters; chunks of servers that end anywhere."""
    make, play = CASES[name]
    steps = 12 if name == "zero_one_adam" else 8
    out = run(train, "ddp", Job(steps=steps, optimizer=make), ranks=ranks)[0]
    expected = play(Play(Net, groups, ranks, 700))
    assert_close(out.weights, expected)


def assert_close(weights: Named | None, expected: Named) -> None:
    assert weights is not None
    for name, value in expected.items():
        torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize(
    "config", [{"prescale_gradients": True}, {"gradient_predivide_factor": 2.0}, {"overlap_comm": False}], ids=str
)
def test_accumulation_and_where_gradients_are_divided(config: dict[str, Any]) -> None:
    """A rank's own gradient is as large as the mean would be, whatever the division is split into."""
    job = Job(steps=8, micro_batches=2, optimizer=adam, config={"reduce_bucket_size": 700, **config})
    play = Play(Net, groups, 3, 700, micro_batches=2)
    assert_close(run(train, "ddp", job, ranks=3)[0].weights, CASES["one_bit_adam"][1](play))


def test_the_warm_up_is_adamw_and_lamb() -> None:
    def torchs(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(groups(model), lr=1e-2, weight_decay=0.1)

    def ours(model: nn.Module) -> torch.optim.Optimizer:
        return OneBitAdam(groups(model), lr=1e-2, weight_decay=0.1)

    def plain(model: nn.Module) -> torch.optim.Optimizer:
        return Lamb(groups(model), lr=1e-2, weight_decay=0.1)

    def travelling(model: nn.Module) -> torch.optim.Optimizer:
        return OneBitLamb(groups(model), lr=1e-2, weight_decay=0.1)

    for one, other in ((ours, torchs), (travelling, plain)):
        expected = run(train, "ddp", Job(optimizer=other), ranks=2)[0].weights
        assert expected is not None
        assert_close(run(train, "ddp", Job(optimizer=one), ranks=2)[0].weights, expected)


class Wide(nn.Module):
    """65,792 trained parameters in one bucket."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layer = nn.Embedding(29, 256), nn.Linear(256, 256)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.embed(x)).square().mean()


@pytest.mark.parametrize("ranks", RANKS)
def test_after_the_freeze_a_16th_of_fp16s_bytes_and_the_scales_travel(ranks: int) -> None:
    def layer(model: nn.Module) -> torch.optim.Optimizer:
        return OneBitAdam(model.layer.parameters(), freeze_step=1)

    out = run(train, "ddp", Job(steps=2, make=Wide, optimizer=layer, config={}), ranks=ranks)
    n = 256 * 256 + 256
    chunk = -(-n // ranks)
    fp16 = 2 * (ranks - 1) * 2 * n / ranks  # of an all-reduce
    scales = 2 * (ranks - 1) * 2 * -(-chunk // 128)
    for rank in out:
        assert rank.sent_by_tag["momentum"] <= fp16 / 16 + scales + 2 * (ranks - 1)  # a chunk ends with a whole byte
        assert "gradients" not in rank.sent_by_tag


def test_local_steps_send_nothing_and_the_ranks_meet_again() -> None:
    def go() -> tuple[list[int], list[bool]]:
        group = Group.world()
        torch.manual_seed(0)
        model = Net()
        stage = DDP(model, zero_one(model), group)
        sent, equal = [], []
        for step in range(14):
            group.ledger.reset()
            stage.backward(model(tokens(step, group.rank)))
            stage.step()
            tags = group.ledger.sent_bytes("tag")
            sent.append(tags.get("momentum", 0) + tags.get("gradients", 0))
            flat = torch.cat([p.detach().view(-1) for p in model.parameters()])
            equal.append(all(torch.equal(flat, other) for other in group.all_gather_object(flat)))
        return sent, equal

    sent, equal = run(go, ranks=3)[0]
    meets = [step <= 8 or step % 2 == 0 for step in range(1, 15)]  # five exact or compressed, three with h = 1, then 2
    assert [bool(n) for n in sent] == meets
    assert equal == meets, "the ranks' weights part between two meetings, and by no bit after one"


@every_one
def test_an_overflow_leaves_momentum_and_errors_alone(name: str) -> None:
    def go() -> None:
        group = Group.world()
        torch.manual_seed(0)
        model = Net().half()
        optimizer = CASES[name][0](model)
        stage = DDP(model, optimizer, group, ZeroConfig(reduce_bucket_size=700), DynamicLossScaler(256.0))
        for step in range(12):
            poisoned = step in (1, 5, 9)
            before = {k: t.clone() for k, t in stage.update.means.errors().items()}
            state = [t.clone() for t in stage.update.slices.state()]
            loss = model(tokens(step, group.rank))
            stage.backward(loss * float("inf") if poisoned and group.rank == 1 else loss)
            assert stage.step() == (not poisoned)
            if poisoned:
                assert all(torch.equal(before[k], t) for k, t in stage.update.means.errors().items())
                assert all(torch.equal(a, b) for a, b in zip(state, stage.update.slices.state(), strict=True))
        assert any(t.any() for t in stage.update.means.errors().values())
        assert all(t.isfinite().all() for t in [*stage.update.means.errors().values(), *model.parameters()])

    run(go)


@every_one
def test_resuming_gives_the_same_bits(name: str) -> None:
    """Also in the middle of local steps: saving makes the ranks meet."""

    def go(steps: int) -> None:
        group = Group.world()

        def fresh() -> tuple[nn.Module, DDP]:
            torch.manual_seed(0)
            model = Net()
            return model, DDP(model, CASES[name][0](model), group)

        def on(model: nn.Module, stage: DDP, some: range) -> dict[str, Tensor]:
            for step in some:
                stage.backward(model(tokens(step, group.rank)))
                stage.step()
            stage.catch_up()
            return model.state_dict()

        model, stage = fresh()
        on(model, stage, range(steps))
        saved: Any = torch.utils._pytree.tree_map_only(Tensor, torch.clone, stage.state_dict())
        weights = {k: v.clone() for k, v in model.state_dict().items()}
        expected = on(model, stage, range(steps, steps + 4))
        again, resumed = fresh()
        again.load_state_dict(weights)
        resumed.load_state_dict(saved)
        end = on(again, resumed, range(steps, steps + 4))
        assert all(torch.equal(end[k], expected[k]) for k in end)

    run(go, 9, ranks=2)


@pytest.mark.parametrize("kind", [OneBitAdam, OneBitLamb])
def test_a_longer_warm_up_owes_nothing_of_the_freeze_that_was_loaded(kind: type[OneBitAdam | OneBitLamb]) -> None:
    """Errors of momenta at weights long gone are no part of what is first exchanged."""

    def go() -> tuple[bool, bool]:
        group = Group.world()

        def trained(freeze_step: int, steps: range, state: Any = None) -> DDP:
            torch.manual_seed(0)
            model = Net()
            stage = DDP(model, kind(groups(model), lr=1e-2, freeze_step=freeze_step), group)
            if state is not None:
                stage.load_state_dict(state)
            for step in steps:
                stage.backward(model(tokens(step, group.rank)))
                stage.step()
            return stage

        early = trained(2, range(4))
        late = trained(6, range(4, 6), early.state_dict())
        return tuple(any(e.any() for e in stage.update.means.errors().values()) for stage in (early, late))

    assert run(go) == [(True, False)] * 2


def test_a_closure_whose_loss_is_not_finite_changes_nothing() -> None:
    def go() -> None:
        model = nn.Linear(3, 3)
        optimizer = OneBitAdam(model.parameters(), freeze_step=1)
        stage = DDP(model, optimizer)
        for step in range(4):
            before = model.weight.detach().clone()

            def closure(bad: bool = step == 2) -> Tensor:
                optimizer.zero_grad()
                loss = model(torch.ones(1, 3)).square().sum() * (float("nan") if bad else 1.0)
                loss.backward()
                return loss

            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that a step is skipped
                optimizer.step(closure)
            assert torch.equal(before, model.weight) == (step == 2)
        assert stage.skipped_steps == 1

    run(go)


def test_a_mask_keeps_the_momentum_at_zero() -> None:
    def go() -> None:
        model = nn.Linear(10, 4)
        mask = torch.zeros(4, 10)
        mask[0] = 1
        optimizer = OneBitAdam(
            [{"params": [model.weight], "exp_avg_mask": mask.view(-1)}, {"params": [model.bias]}], freeze_step=1
        )
        stage = DDP(model, optimizer)
        for _ in range(3):
            model(torch.ones(1, 10)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        momentum = stage.full_state(model.weight, "exp_avg")
        assert momentum is not None
        assert momentum[0].all()
        assert not momentum[1:].any()
        state = optimizer.state_dict()
        state["param_groups"][0]["exp_avg_mask"] = None
        optimizer.load_state_dict(state)
        assert torch.equal(optimizer.param_groups[0]["exp_avg_mask"], mask.view(-1)), "the run's, not the saved one"
        optimizer.param_groups[0]["exp_avg_mask"] = torch.ones(3)
        model(torch.ones(1, 10)).sum().backward()
        with pytest.raises(ValueError, match="exp_avg_mask has 3 elements, and a parameter of its group 40"):
            optimizer.step()

    run(go)


def test_elements_without_a_variance_are_left_alone_and_counted() -> None:
    """One bit over eps would throw an embedding's unused rows far away."""

    def go() -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(20, 6), nn.Linear(6, 1))
        before = model[0].weight.detach().clone()
        optimizer = OneBitAdam(model.parameters(), lr=1e-2, freeze_step=2)
        stage = DDP(model, optimizer)
        for step in range(5):
            model(torch.arange(10)).square().sum().backward()
            if step == 1 and stage.group.rank == 0:
                with pytest.warns(UserWarning, match="60 of 127 elements had no gradient in the 2 steps before"):
                    optimizer.step()
            else:
                optimizer.step()
            optimizer.zero_grad()
        assert torch.equal(model[0].weight[10:], before[10:])
        assert not torch.isclose(model[0].weight[:10], before[:10]).any()

    run(go)


def test_what_is_unfrozen_or_unused_for_a_while() -> None:
    """A parameter without a gradient keeps momentum, errors and weights; the ranks stay equal by every bit."""

    def go() -> None:
        group = Group.world()
        torch.manual_seed(0)
        model = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6).requires_grad_(False)])
        optimizer = OneBitAdam(model.parameters(), lr=1e-2, freeze_step=3)
        stage = DDP(model, optimizer, group)
        for step in range(6):
            if step == 1:
                model[2].requires_grad_(True)
            x = torch.full((2, 6), 1.0 + step + group.rank)
            before = {n: p.detach().clone() for n, p in model.named_parameters()}
            for layer in [model[0], model[2]] if step == 4 else list(model):
                x = layer(x)
            stage.backward(x.square().mean())
            stage.step()
            moved = {n.split(".")[0] for n, p in model.named_parameters() if not torch.equal(p, before[n])}
            assert moved == ({"0", "1"} if step == 0 else {"0", "2"} if step == 4 else {"0", "1", "2"})
            flat = torch.cat([p.detach().view(-1) for p in model.parameters()])
            assert all(torch.equal(flat, other) for other in group.all_gather_object(flat))

    run(go, ranks=3)


def test_stages_that_shard_refuse_it() -> None:
    def go() -> None:
        model = nn.Linear(4, 4)
        Zero1(model, OneBitAdam(model.parameters()))

    with pytest.raises(RankError, match=r"OneBitAdam averages its momentum over the ranks by itself"):
        run(go)


@pytest.mark.parametrize(
    ("kind", "bad"),
    [
        (OneBitAdam, {"freeze_step": 0}),
        (OneBitAdam, {"comm_backend_name": "smoke"}),
        (OneBitAdam, {"amsgrad": True}),
        (ZeroOneAdam, {"local_step_clipper": 0}),
        (ZeroOneAdam, {"betas": (0.9, 1.0)}),
        (OneBitLamb, {"factor_min": 5.0}),
        (OneBitLamb, {"coeff_beta": 1.0}),
    ],
)
def test_bad_options(kind: type[Travelling], bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=kind.__name__):
        kind([nn.Parameter(torch.ones(1))], **bad)


def test_alone_it_is_adam_with_a_frozen_variance() -> None:
    p = nn.Parameter(torch.ones(3))
    optimizer = OneBitAdam([p], lr=0.1, freeze_step=1, bias_correction=False)
    for grad in (1.0, 3.0):
        p.grad = torch.full((3,), grad)
        optimizer.step()
    m = [0.1, 0.09 + 0.3]
    torch.testing.assert_close(p.detach(), torch.full((3,), 1 - 0.1 * sum(m) / 0.001**0.5))


def test_with_bias_correction_a_steady_gradient_takes_lambs_steps_after_the_freeze_too() -> None:
    """Nothing has settled after 3 of 1,000 steps of memory: a variance that is only older must not look larger."""
    moved = []
    for kind, more in ((Lamb, {}), (OneBitLamb, {"freeze_step": 3, "coeff_beta": 0.0})):
        p = nn.Parameter(torch.linspace(1.0, 2.0, 8))
        optimizer = kind([p], lr=1e-4, betas=(0.0, 0.999), **more)
        for _ in range(12):
            p.grad = torch.full((8,), 0.5)
            optimizer.step()
        moved.append(torch.linspace(1.0, 2.0, 8) - p.detach())
    torch.testing.assert_close(moved[1], moved[0], rtol=0.01, atol=0)


def test_the_intervals_of_zero_one_adam_double_again_and_again() -> None:
    """Every second update of the variance here, which then comes half as often."""
    p = torch.nn.Parameter(torch.ones(3))
    optimizer, exact = ZeroOneAdam([p], lr=0.01, var_update_scaler=2), []
    for step in range(1, 33):
        before = optimizer.state[p].get("variance_step", 0)
        p.grad = torch.ones(3)
        optimizer.step()
        exact += [step] * (optimizer.state[p]["variance_step"] - before)
    assert exact == [1, 2, 4, 6, 8, 12, 16, 24, 32]
