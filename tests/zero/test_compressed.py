"""Gradients that travel compressed, in DDP and ZeRO-1: what is trained and sent, and what becomes of the errors."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import worlds
from torch import Tensor, nn
from training import STAGES, Net, adamw, differing, oracle, tokens
from training import Job as Training
from training import train as train_by

from refimpl.comm.group import Group
from refimpl.compress.blocks import Blocks
from refimpl.compress.compression import Compression
from refimpl.compress.compressor import Compressor
from refimpl.compress.feedback import ErrorFeedback
from refimpl.compress.powersgd import PowerSGD
from refimpl.compress.randomk import RandomK
from refimpl.compress.sign import Sign
from refimpl.compress.topk import TopK
from refimpl.optim.loss_scale import DynamicLossScaler, LossScaler
from refimpl.zero.config import ZeroConfig

ALL = Compression(TopK(1.0))  # which loses nothing
KINDS: dict[str, Compression] = {
    "top-k": Compression(TopK(0.1)),
    "random-k": Compression(RandomK(0.3)),
    "random-k without feedback": Compression(RandomK(0.3, rescaled=True), feedback=False),
    "PowerSGD": Compression(PowerSGD(1, least_ratio=1.5)),
    "sign gathered": Compression(Sign(), "gathered"),
    "sign": Compression(Sign()),
    "int8": Compression(Blocks(8, 64)),
    "int4 stochastic": Compression(Blocks(4, 64, stochastic=True)),
}
SAME_BITS = ["top-k", "random-k", "random-k without feedback", "PowerSGD", "sign gathered"]


@dataclass(frozen=True)
class Run:
    """One training: which steps of the data, what is poisoned, how a step ends."""

    stage: str
    kind: str
    data: tuple[int, ...] = (0, 1, 2, 3)
    poison: tuple[int, ...] = ()  # steps of which rank 0's loss is infinite
    dropped: tuple[int, ...] = ()  # steps whose gradients are dropped
    scaler: Callable[[], LossScaler] | None = None
    make: Callable[[], nn.Module] = Net
    saved: Any = None
    bucket: int = 700
    dtype: torch.dtype = torch.float32


@dataclass
class Trained:
    weights: dict[str, Tensor] | None
    state: dict[str, Any]
    sent: int
    formula: int
    warned: list[str]
    finite: list[bool]


def train(run: Run) -> Trained:
    group = Group.world()
    torch.manual_seed(0)
    model = run.make().to(run.dtype)
    config = ZeroConfig(compression=KINDS.get(run.kind, ALL), reduce_bucket_size=run.bucket, gradient_clipping=0.5)
    scaler = run.scaler() if run.scaler else None
    stage = STAGES[run.stage](model, adamw(model), group, config, scaler)  # type: ignore[call-arg]
    finite, warned = [], []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if run.saved is not None:
            stage.load_state_dict(run.saved[group.rank])
        for step in run.data:
            group.ledger.reset()
            loss = model(tokens(step, group.rank))
            loss = loss * float("inf") if step in run.poison and group.rank == 0 else loss
            stage.backward(loss)
            if step in run.dropped:
                stage.zero_grad()
            else:
                finite.append(stage.step())
        warned = [str(w.message) for w in caught if "overflow" not in str(w.message) and "finite" not in str(w.message)]
    assert stage.compressed is not None
    formula = sum(exchange.sent_bytes() for exchange in stage.compressed.exchanges.values())
    sent = group.ledger.sent_bytes("tag").get("gradients", 0)
    weights = stage.full_state_dict()
    weights = None if weights is None else {name: w.clone() for name, w in weights.items()}
    return Trained(weights, stage.state_dict(), sent, formula, warned, finite)


@pytest.mark.parametrize(("stage", "ranks"), [("ddp", 2), ("zero1", 3)])
def test_what_loses_nothing_is_the_stage_without_bit_for_bit(stage: str, ranks: int) -> None:
    """Tied, frozen, unused and odd-sized parameters, two groups, clipping, two micro-batches."""
    config = {"reduce_bucket_size": 700, "compression": ALL}
    job = Training(clip=0.5, micro_batches=2, config=config)
    assert differing(worlds.run(train_by, stage, job, ranks=ranks)[0].weights, oracle(ranks, job)) == []


@pytest.mark.parametrize("kind", KINDS)
def test_both_stages_train_and_send_what_the_formula_says(kind: str) -> None:
    ranks = 4 if kind == "sign" else 2
    ddp, zero1 = (worlds.run(train, Run(stage, kind), ranks=ranks) for stage in ("ddp", "zero1"))
    for result in (*ddp, *zero1):
        assert result.sent == result.formula > 0
        assert all(result.finite)
    assert (differing(ddp[0].weights, zero1[0].weights or {}) == []) == (kind in SAME_BITS)
    plain = worlds.run(train, Run("ddp", "all"), ranks=ranks)
    assert ddp[0].sent < plain[0].sent
    assert differing(ddp[0].weights, plain[0].weights or {}) != []


def by_hand(compressor: Compressor, ranks: int, steps: int) -> dict[str, Tensor]:
    """EF-SGD (Karimireddy et al. 2019, algorithm 2, with one more rank a worker), one process, one bucket."""
    torch.manual_seed(0)
    model = Net()
    params = [p for p in reversed(list(model.parameters())) if p.requires_grad]
    n = sum(p.numel() for p in params)
    workers = [ErrorFeedback(compressor, n) for _ in range(ranks)]
    for step in range(steps):
        total = torch.zeros(n)
        for rank, worker in enumerate(workers):
            model.zero_grad()
            model(tokens(step, rank)).backward()
            gradient = torch.cat([torch.zeros(p.numel()) if p.grad is None else p.grad.view(-1) for p in params])
            total += compressor.decompress(worker.compress(gradient), n)
        with torch.no_grad():
            at = 0
            for p, mean in zip(params, (total / ranks).split([p.numel() for p in params]), strict=True):
                if p.grad is not None:
                    p -= 0.1 * mean.view(p.shape)
                for worker in workers if p.grad is None else ():  # no update uses what was sent of it
                    worker.revert(at, at + p.numel())
                at += p.numel()
        for worker in workers:
            worker.accept()
    return model.state_dict()


def train_sgd(compressor: Compressor, steps: int) -> dict[str, Tensor] | None:
    torch.manual_seed(0)
    model, group = Net(), Group.world()
    config = ZeroConfig(compression=Compression(compressor, "gathered"))
    stage = STAGES["ddp"](model, torch.optim.SGD(model.parameters(), lr=0.1), group, config)  # type: ignore[call-arg]
    for step in range(steps):
        stage.backward(model(tokens(step, group.rank)))
        stage.step()
    return stage.full_state_dict()


@pytest.mark.parametrize("compressor", [TopK(0.05), Sign()])
def test_error_feedback_is_that_of_the_paper(compressor: Compressor) -> None:
    ours, theirs = worlds.run(train_sgd, compressor, 3, ranks=3)[0], by_hand(compressor, 3, 3)
    assert ours is not None
    for name, weight in theirs.items():
        assert torch.allclose(ours[name], weight, rtol=1e-6, atol=1e-7), name


@pytest.mark.parametrize("stage", ["ddp", "zero1"])
@pytest.mark.parametrize("kind", ["top-k", "PowerSGD", "sign", "random-k"])
def test_a_step_that_is_skipped_leaves_no_trace_in_the_errors(stage: str, kind: str) -> None:
    """Nor in the weights, whether the loss has a scale, which then halves, or not."""
    good = worlds.run(train, Run(stage, kind, data=(0, 1, 3)))
    bad = worlds.run(train, Run(stage, kind, poison=(2,)))
    assert bad[0].finite == [True, True, False, True]
    if kind != "random-k":  # which goes on to the next draw
        assert differing(bad[0].weights, good[0].weights or {}) == []
    for one, other in zip(bad, good, strict=True):
        errors = one.state["compression"]["worker"]
        assert all(error.isfinite().all() for error in errors.values())
        if kind != "random-k":
            assert differing(errors, other.state["compression"]["worker"]) == []
    scaled = worlds.run(train, Run(stage, kind, poison=(2,), scaler=halving))
    assert scaled[0].finite == [True, True, False, True]
    if kind != "random-k":
        assert differing(scaled[0].weights, good[0].weights or {}) == []


def halving() -> LossScaler:
    return DynamicLossScaler(initial_scale=2.0**8, hysteresis=1)


def test_gradients_that_are_dropped_leave_no_trace() -> None:
    for kind in ("top-k", "sign"):
        good = worlds.run(train, Run("ddp", kind, data=(0, 2)))
        other = worlds.run(train, Run("ddp", kind, data=(0, 1, 2), dropped=(1,)))
        assert differing(other[0].weights, good[0].weights or {}) == []


class Sometimes(nn.Module):
    """Its second layer is used in even steps alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.calls = nn.Linear(29, 5), nn.Linear(29, 5), 0

    def forward(self, tokens: Tensor) -> Tensor:
        x = nn.functional.one_hot(tokens, 29).float()
        y = self.first(x) + (self.second(x) if self.calls % 2 == 0 else 0)
        self.calls += 1
        return y.square().sum()


def test_what_no_rank_uses_keeps_its_error() -> None:
    """It is sent all the same, and the update leaves the parameter alone: that must not be lost."""
    for kind in ("sign", "top-k", "PowerSGD"):
        after = [
            worlds.run(train, Run("ddp", kind, data=tuple(range(n)), make=Sometimes))[0].state["compression"]
            for n in (1, 2)
        ]
        for name in ("second.weight", "second.bias"):
            assert torch.equal(after[0]["worker"][name], after[1]["worker"][name])
        assert not torch.equal(after[0]["worker"]["first.weight"], after[1]["worker"]["first.weight"])


@pytest.mark.parametrize(
    ("stage", "kind"), [("ddp", "sign"), ("zero1", "int8"), ("ddp", "PowerSGD"), ("zero1", "random-k")]
)
def test_a_checkpoint_goes_on_bit_for_bit(stage: str, kind: str) -> None:
    whole = worlds.run(train, Run(stage, kind))
    saved = [result.state for result in worlds.run(train, Run(stage, kind, data=(0, 1)))]
    rest = worlds.run(train, Run(stage, kind, data=(2, 3), saved=saved))
    assert differing(rest[0].weights, whole[0].weights or {}) == []
    assert [result.warned for result in rest] == [[], []]
    scaled = worlds.run(train, Run(stage, kind, data=(2, 3), saved=[s | {"scaler": None} for s in saved]))
    assert scaled[0].state["compression"]["steps"] == whole[0].state["compression"]["steps"] == 4


def load_of_others() -> tuple[list[str], bool]:
    group = Group.world()
    model = Net()
    stage = STAGES["ddp"](model, adamw(model), group, ZeroConfig(compression=ALL))  # type: ignore[call-arg]
    other = {"rank": 0, "ranks": 5, "way": "gathered", "steps": 7, "turns": {}, "worker": {}, "server": {}, "q": {}}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        stage.load_state_dict(stage.state_dict() | {"compression": other})
    assert stage.compressed is not None
    errors = stage.compressed.state_dict()["worker"].values()
    return [str(w.message) for w in caught], any(bool(error.any()) for error in errors)


def test_errors_of_other_ranks_begin_at_zero_and_say_so() -> None:
    (first, kept), (second, _) = worlds.run(load_of_others)
    assert len(first) == 1
    assert "of 5 ranks (gathered), here are 2" in first[0]
    assert "begins at zero" in first[0]
    assert second == []
    assert not kept


def low_rank_state(saved: dict[str, Any] | None, rank: int) -> tuple[dict[str, Tensor], bool]:
    """PowerSGD of that rank after two steps, or after loading: its state, or Q by name; whether it owes something."""
    model = Net()
    config = ZeroConfig(compression=Compression(PowerSGD(rank, least_ratio=1.5)), reduce_bucket_size=700)
    stage = STAGES["zero1"](model, adamw(model), Group.world(), config)  # type: ignore[call-arg]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if saved is not None:
            stage.load_state_dict(stage.state_dict() | {"compression": saved})
    for step in range(2) if saved is None else ():
        stage.backward(model(tokens(step, stage.group.rank)))
        stage.step()
    assert stage.compressed is not None
    state = stage.compressed.state_dict()
    return state if saved is None else state["q"], any(bool(error.any()) for error in state["worker"].values())


def test_powersgds_q_goes_on_with_any_number_of_ranks_and_no_other_rank_of_its_own() -> None:
    state, owes = worlds.run(low_rank_state, None, 2)[0]
    assert owes
    assert state["q"]
    for ranks in (2, 3):
        for q, owes in worlds.run(low_rank_state, state, 2, ranks=ranks):
            assert differing(q, state["q"]) == []
            assert not owes or ranks == 2
    for rank in (1, 3):  # a Q of another rank would stay for ever
        assert worlds.run(low_rank_state, state, rank)[0][0] == {}


class Plain(Net):
    """Everything in it is used."""

    def __init__(self) -> None:
        super().__init__()
        del self.unused


def overlapped() -> list[tuple[str, str]]:
    model, group = Plain(), Group.world()
    config = ZeroConfig(compression=KINDS["sign"], reduce_bucket_size=700)
    stage = STAGES["ddp"](model, adamw(model), group, config)  # type: ignore[call-arg]
    with stage.no_sync():
        stage.backward(model(tokens(0, 0)))
    nothing = group.ledger.sent_bytes("tag").get("gradients")
    assert nothing is None
    stage.backward(model(tokens(0, 1)))
    events = [(e.phase, e.op) for e in group.ledger.events if e.tag == "gradients" or e.phase == "mark"]
    stage.step()
    return events


def test_buckets_travel_while_backward_goes_on() -> None:
    events = worlds.run(overlapped)[0]
    started = events.index(("start", "all_to_all"))
    assert any(phase == "mark" and op.startswith("grad ") for phase, op in events[started:])
    second = [i for i, event in enumerate(events) if event == ("start", "all_to_all")][1]
    assert events.index(("end", "all_to_all")) > second  # two are under way at once


def test_fp16_and_bf16_send_values_of_their_own_dtype() -> None:
    for dtype, scaler in ((torch.bfloat16, None), (torch.float16, halving)):
        for kind in ("top-k", "PowerSGD", "int8"):
            (result, *_) = worlds.run(train, Run("zero1", kind, dtype=dtype, scaler=scaler))
            assert all(result.finite)
            assert result.sent == result.formula
            errors = result.state["compression"]["worker"].values()
            assert all(error.dtype == torch.float32 for error in errors)


def test_what_is_refused() -> None:
    for stage in ("zero2", "zero3"):
        model = Net()
        with pytest.raises(ValueError, match=r"keeps no whole gradient.*DDP or ZeRO-1"):
            STAGES[stage](model, adamw(model), Group(None), ZeroConfig(compression=ALL))  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="give Compression"):
        ZeroConfig(compression=TopK(0.1))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="cannot be added"):
        Compression(Sign(), "summed")
    with pytest.raises(ValueError, match="is biased"):
        Compression(Sign(), feedback=False)
    with pytest.raises(ValueError, match="more than there is"):
        Compression(RandomK(0.5, rescaled=True))
    with pytest.raises(ValueError, match="scaled up twice"):
        Compression(RandomK(0.5, rescaled=True), "served", feedback=False)
    with pytest.raises(ValueError, match="is not PowerSGD"):
        Compression(Sign(), "low rank")
