"""The engine against a plain torch loop in one process, and its own rules: boundaries, skips, norms, return values."""

import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import worlds
from torch import Tensor, nn

import refimpl
from refimpl.comm.group import Group
from refimpl.launch import RankError

STAGES = [0, 1, 2, 3]
SIZE = 16


class Net(nn.Module):
    """Two layers and a mean-square loss; weights and data from a seed, the same in every process."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(SIZE, 2 * SIZE), nn.Linear(2 * SIZE, 1)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, SIZE] -> scalar."""
        return (self.down(self.up(x).tanh()).float() - x.float().sum(-1, keepdim=True)).square().mean()


def batch(rank: int, step: int, micro: int) -> Tensor:
    return torch.randn(4, SIZE, generator=torch.Generator().manual_seed(1000 * rank + 100 * step + micro))


def config(stage: int, **more: Any) -> dict[str, Any]:
    settings = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "gradient_clipping": 0.0,  # the oracle does not clip
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    return settings | more


def oracle(ranks: int, steps: int, micros: int, divide: int = 1, optimizer: type = torch.optim.SGD) -> dict[str, Any]:
    """The same training in one process and plain torch: weights, mean losses and gradient norms."""
    model = Net()
    options = {"fused": True, "weight_decay": 0.0} if optimizer is torch.optim.AdamW else {}
    opt = optimizer(model.parameters(), lr=0.1, **options)
    losses, norms = [], []
    for step in range(steps):
        loss = sum(model(batch(r, step, m)) for r in range(ranks) for m in range(micros)) / (ranks * divide)
        loss.backward()
        norms.append(torch.cat([p.grad.flatten() for p in model.parameters()]).double().norm().item())
        losses.append(loss.item())
        opt.step()
        opt.zero_grad()
    return {"weights": model.state_dict(), "losses": losses, "norms": norms}


def train(settings: dict[str, Any], steps: int, micros: int, step_each: bool = False) -> dict[str, Any]:
    """On each rank: `micros` backward calls a step, with one step() after the last, or one after each of them."""
    engine, *_ = refimpl.initialize(model=Net(), config=settings)
    losses, norms = [], []
    for step in range(steps):
        for micro in range(micros):
            loss = engine(batch(engine.group.rank, step, micro))
            assert engine.backward(loss) is loss
            losses.append(loss.item())
            if step_each or micro == micros - 1:
                engine.step()
        norms.append(engine.get_global_grad_norm())
    counters = engine.global_steps, engine.micro_steps, engine.global_samples
    weights = engine.stage.full_state_dict()
    weights = weights and {name: w.clone() for name, w in weights.items()}
    return {"weights": weights, "losses": losses, "norms": norms, "counters": counters}


def close(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=1e-5, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_three_backwards_and_one_step_add_up(ranks: int) -> None:
    expected = oracle(ranks, steps=2, micros=3)
    for stage in STAGES:
        results = worlds.run(train, config(stage, gradient_accumulation_steps=1), 2, 3, ranks=ranks)
        close(results[0]["weights"], expected["weights"])
        for result in results:
            assert all(isinstance(norm, float) for norm in result["norms"])
            assert result["norms"] == pytest.approx(expected["norms"], rel=1e-5)
            assert result["counters"] == (2, 6, 2 * 3 * 4 * ranks)


@pytest.mark.parametrize("step_each", [True, False])
@pytest.mark.parametrize("stage", STAGES)
def test_accumulation_averages_over_micro_batches(stage: int, step_each: bool) -> None:
    settings = config(stage, gradient_accumulation_steps=3)
    results = worlds.run(train, settings, 2, 3, step_each, ranks=2)
    expected = oracle(2, steps=2, micros=3, divide=3)
    close(results[0]["weights"], expected["weights"])
    assert results[1]["counters"] == (2, 6, 2 * 3 * 4 * 2)


@pytest.mark.parametrize("ranks", [2, 3])
def test_stages_agree_bit_for_bit_in_fp32(ranks: int) -> None:
    adam = {"type": "AdamW", "params": {"lr": 0.1}}
    base, *others = [
        worlds.run(train, config(stage, optimizer=adam, gradient_clipping=1.0), 4, 1, ranks=ranks) for stage in STAGES
    ]
    for other in others:
        for rank in range(ranks):
            assert other[rank]["losses"] == base[rank]["losses"]
        for name, weight in base[0]["weights"].items():
            assert torch.equal(other[0]["weights"][name], weight), name


def test_adamw_follows_the_plain_loop() -> None:
    adam = {"type": "AdamW", "params": {"lr": 0.1}}
    results = worlds.run(train, config(2, optimizer=adam), 3, 1, ranks=2)
    expected = oracle(2, steps=3, micros=1, optimizer=torch.optim.AdamW)
    close(results[0]["weights"], expected["weights"])
    assert sum(r["losses"][2] for r in results) / 2 == pytest.approx(expected["losses"][2], rel=1e-5)


def overflow_on_one_rank(settings: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    engine, *_ = refimpl.initialize(model=Net(), config=settings)
    rank = engine.group.rank
    scales = [engine.stage.scaler.scale] if engine.stage.scaler else []
    weights, applied, rates, norms = [], [], [], []
    for step in range(3):
        loss = engine(batch(rank, step, 0).to(dtype))
        engine.backward(loss * float("inf") if (rank, step) == (1, 1) else loss)
        engine.step()
        weights.append({n: w.clone() for n, w in (engine.stage.full_state_dict() or {}).items()})
        applied.append(engine.was_step_applied())
        rates.append(engine.get_lr()[0])
        norms.append(engine.get_global_grad_norm() or 0.0)
        scales += [engine.stage.scaler.scale] if engine.stage.scaler else []
    return {
        "weights": weights, "applied": applied, "rates": rates, "scales": scales, "norms": norms,
        "skipped": engine.skipped_steps, "steps": engine.global_steps,
    }  # fmt: skip


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_an_overflow_on_one_rank_skips_the_step_on_all(stage: int, precision: str) -> None:
    schedule = {"type": "WarmupLR", "params": {"warmup_min_lr": 0.05, "warmup_max_lr": 0.1, "warmup_num_steps": 8}}
    sections = {
        "fp32": {},
        "bf16": {"bf16": {"enabled": True}},
        "fp16": {"fp16": {"enabled": True, "initial_scale_power": 4, "hysteresis": 1}},
    }
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    settings = config(stage, scheduler=schedule, **sections[precision])
    for rank, result in enumerate(worlds.run(overflow_on_one_rank, settings, dtype, ranks=2)):
        assert (result["applied"], result["skipped"], result["steps"]) == ([True, False, True], 1, 3)
        assert result["rates"][0] == result["rates"][1] < result["rates"][2]
        first, second, third = result["norms"]
        assert 0 < first != third > 0
        assert second == first if precision == "fp16" else math.isnan(second)  # a loss scale's daily work
        if rank == 0:
            before, skipped, after = result["weights"]
            assert all(torch.equal(before[n], skipped[n]) for n in before)
            assert not all(torch.equal(skipped[n], after[n]) for n in before)
            assert all(w.isfinite().all() for w in after.values())
        assert result["scales"] == ([16, 16, 8, 8] if precision == "fp16" else [])


class Fork(nn.Module):
    """Takes another branch on rank 1 from the second step on."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.steps = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE), 0

    def forward(self, x: Tensor, rank: int) -> Tensor:
        self.steps += 1
        order = [self.right, self.left] if self.steps > 1 and rank == 1 else [self.left, self.right]
        for layer in order:
            x = layer(x)
        return x.square().mean()


def diverge() -> None:
    engine, *_ = refimpl.initialize(model=Fork(), config=config(3))
    for step in range(3):
        engine.backward(engine(batch(0, step, 0), engine.group.rank))
        engine.step()


def test_ranks_that_take_different_branches_are_named() -> None:
    with pytest.raises(RankError) as caught:
        worlds.run(diverge, ranks=2, timeout=20)
    text = str(caught.value)
    assert "left" in text
    assert "right" in text
    assert "rank 1" in text


def boundaries() -> None:
    """Who decides the boundary: the counter, the client, or step() itself."""
    engine, *_ = refimpl.initialize(model=Net(), config=config(1, gradient_accumulation_steps=2))
    seen = []
    for micro in range(4):
        seen.append(engine.is_gradient_accumulation_boundary())
        engine.backward(engine(batch(0, 0, micro)))
        seen.append(engine.is_gradient_accumulation_boundary())
        engine.step()
        assert engine.was_step_applied() == seen[-1]
    assert seen == [False, False, True, True] * 2
    assert engine.global_steps == 2

    engine.set_gradient_accumulation_boundary(False)
    for micro in range(3):
        engine.backward(engine(batch(0, 1, micro)))
        engine.step()
    assert engine.global_steps == 2
    engine.set_gradient_accumulation_boundary(True)
    engine.backward(engine(batch(0, 1, 3)))
    engine.step()
    assert (engine.global_steps, engine.micro_steps) == (3, 8)


def test_the_boundary() -> None:
    worlds.run(boundaries, ranks=2)


def clients_own_boundary(settings: dict[str, Any]) -> dict[str, Tensor] | None:
    engine, *_ = refimpl.initialize(model=Net(), config=settings)
    for micro in range(3):
        engine.backward(engine(batch(engine.group.rank, 0, micro)))
        assert not engine.is_gradient_accumulation_boundary()
    with pytest.raises(RuntimeError, match="managed_gradient_accumulation = false"):  # it would be told in vain
        engine.set_gradient_accumulation_boundary(False)
    engine.step()
    assert engine.global_steps == 1
    return engine.stage.full_state_dict()


@pytest.mark.parametrize("stage", STAGES)
def test_unmanaged_accumulation_steps_when_told(stage: int) -> None:
    settings = config(stage, managed_gradient_accumulation=False)
    weights = worlds.run(clients_own_boundary, settings, ranks=2)[0]
    close(weights, oracle(2, steps=1, micros=3)["weights"])


def without_sync(stage: int) -> tuple[int, int, dict[str, Tensor] | None]:
    engine, *_ = refimpl.initialize(model=Net(), config=config(stage))
    with engine.no_sync():
        engine.backward(engine(batch(engine.group.rank, 0, 0)))
        with pytest.raises(RuntimeError, match="inside no_sync"):
            engine.step()
    silent = engine.group.ledger.sent_bytes("tag").get("gradients", 0)
    engine.backward(engine(batch(engine.group.rank, 0, 1)))
    engine.step()
    return silent, engine.group.ledger.sent_bytes("tag")["gradients"], engine.stage.full_state_dict()


@pytest.mark.parametrize("stage", [0, 1])
def test_no_sync_sends_once(stage: int) -> None:
    for rank, (silent, sent, weights) in enumerate(worlds.run(without_sync, stage, ranks=2)):
        assert silent == 0
        assert sent > 0
        if rank == 0:
            close(weights, oracle(2, steps=1, micros=2)["weights"])


def reduced_by_hand(stage: int) -> tuple[int, list[Tensor], dict[str, Tensor]]:
    """Both micro-batches of a step in `no_sync`: the bytes sent before it and with it, and the weights after it."""
    engine, *_ = refimpl.initialize(model=Net(), config=config(stage, gradient_accumulation_steps=2))
    for micro in range(2):
        with engine.no_sync():
            engine.backward(engine(batch(engine.group.rank, 0, micro)))
        engine.allreduce_gradients(bucket_size=500_000_000)
        assert ("gradients" in engine.group.ledger.sent_bytes("tag")) == (micro == 1), "at the boundary alone"
        if micro == 0:
            engine.step()
    sent = engine.group.ledger.sent_bytes("tag")["gradients"]
    engine.step()
    return sent, engine.group.ledger.sent_bytes("tag")["gradients"], engine.stage.full_state_dict()


@pytest.mark.parametrize("stage", [0, 1])
def test_gradients_can_be_reduced_before_the_step(stage: int) -> None:
    before, after, weights = worlds.run(reduced_by_hand, stage, ranks=2)[0]
    assert before == after
    close(weights, oracle(2, steps=1, micros=2, divide=2)["weights"])


def as_accelerate_did(stage: int) -> dict[str, Tensor] | None:
    """accelerate below 1.9: `no_sync` around every micro-batch but the last, `step` in it."""
    engine, *_ = refimpl.initialize(model=Net(), config=config(stage, gradient_accumulation_steps=2))
    for step in range(2):
        told = pytest.warns(UserWarning, match=f"stage {stage} shards every .* all the same")
        with told if stage >= 2 else nullcontext(), engine.no_sync():
            engine.backward(engine(batch(engine.group.rank, step, 0)))
            engine.step()
        engine.backward(engine(batch(engine.group.rank, step, 1)))
        engine.step()
        assert engine.global_steps == step + 1
    return engine.stage.full_state_dict()


@pytest.mark.parametrize("stage", STAGES)
def test_no_sync_before_the_boundary_changes_no_sum(stage: int) -> None:
    close(worlds.run(as_accelerate_did, stage, ranks=2)[0], oracle(2, steps=2, micros=2, divide=2)["weights"])


@pytest.mark.parametrize("stage", [2, 3])
def test_no_sync_is_refused_where_gradients_are_sharded(stage: int) -> None:
    engine, *_ = refimpl.initialize(model=Net(), config=config(stage))
    with pytest.raises(RuntimeError, match=f"stage {stage}"), engine.no_sync():
        pass


def batches(stage: int) -> list[float]:
    """train_batch and eval_batch, each with its loss over all micro-batches and ranks."""
    data = torch.utils.data.TensorDataset(torch.cat([batch(0, 0, m) for m in range(4)]))  # 16 samples
    settings = config(stage, gradient_accumulation_steps=2, optimizer={"type": "SGD", "params": {"lr": 0.0}})
    engine, optimizer, loader, _ = refimpl.initialize(model=Net(), config=settings, training_data=data)
    assert optimizer is engine.optimizer
    assert len(loader) == 2
    engine.eval()
    losses = [engine.train_batch().item() for _ in range(2)]
    assert engine.module.training
    assert (engine.global_steps, engine.micro_steps, engine.global_samples) == (2, 4, 32)
    engine.eval()
    losses.append(engine.eval_batch(iter(loader)).item())
    assert not engine.module.training
    assert engine.global_steps == 2
    with pytest.raises(StopIteration, match="the data ended: a batch takes 2 micro-batches, and one found none"):
        engine.train_batch(iter([]))
    norms = []
    for begun in ([batch(0, 0, 0)], []):  # what is left of other data is no part of the next batch
        with pytest.raises(StopIteration):
            engine.train_batch(iter(begun))
        engine.train_batch(iter([batch(0, 1, 0), batch(0, 1, 1)]))
        norms.append(engine.get_global_grad_norm())
    assert norms[0] == norms[1]
    assert (engine.global_steps, engine.global_samples) == (4, 64)
    return losses


@pytest.mark.parametrize("stage", STAGES)
def test_train_batch_and_eval_batch_give_the_mean_loss_of_the_batch(stage: int) -> None:
    # lr = 0 and every batch is the whole dataset, in some order: all losses are that of the 16 samples.
    expected = Net()(torch.cat([batch(0, 0, m) for m in range(4)])).item()
    for losses in worlds.run(batches, stage, ranks=2):
        assert losses == pytest.approx([expected] * 3, rel=1e-6)


def test_a_mapping_becomes_keywords_and_a_missing_dataset_is_said() -> None:
    engine, *_ = refimpl.initialize(model=Net(), config=config(0))
    x = batch(0, 0, 0)
    expected = Net()(x).item()
    assert [engine.eval_batch(iter([b])).item() for b in ({"x": x}, [x], (x,), x)] == pytest.approx([expected] * 4)
    with pytest.raises(ValueError, match="training_data"):
        engine.train_batch()


def test_backward_wants_a_scalar() -> None:
    engine, *_ = refimpl.initialize(model=Net(), config=config(0))
    with pytest.raises(ValueError, match=r"\(3,\)"):
        engine.backward(torch.ones(3, requires_grad=True))
    with pytest.raises(ValueError, match="float"):
        engine.backward(0.5)
    for loss in (engine(batch(0, 0, 0)).detach(), torch.ones(())):
        with pytest.raises(ValueError, match=r"engine.backward: the loss has no graph: it was detached"):
            engine.backward(loss)


class NoRoom(torch.autograd.Function):
    """Backward ends as one for which there is no memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        raise torch.OutOfMemoryError


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("stage", STAGES)
def test_a_backward_that_raises_begins_the_batch_anew(stage: int, plain: bool) -> None:
    """Its gradients are gone, and those before it: neither counts as one of the two that make a batch."""
    engine, *_ = refimpl.initialize(model=Net(), config=config(stage, gradient_accumulation_steps=2))
    engine.backward(engine(batch(1, 0, 0)))
    engine.step()
    loss = engine(NoRoom.apply(batch(1, 0, 1).requires_grad_()))
    with pytest.raises(torch.OutOfMemoryError):
        loss.backward() if plain else engine.backward(loss)
    for micro in range(2):
        assert engine.global_steps == 0
        with pytest.warns(match="are dropped") if plain and not micro else nullcontext():
            loss = engine(batch(0, 0, micro))
        engine.backward(loss)
        engine.step()
    assert engine.global_steps == 1
    close(engine.module_state_dict(), oracle(1, steps=1, micros=2, divide=2)["weights"])


def test_an_evaluation_whose_data_ends_leaves_the_model_in_its_mode() -> None:
    engine, *_ = refimpl.initialize(model=Net(), config=config(0, gradient_accumulation_steps=2))
    for training in (True, False):
        engine.train(training)
        with pytest.raises(StopIteration):
            engine.eval_batch(iter([batch(0, 0, 0)]))
        assert engine.module.down.training is training


def test_scale_wrt_gas_can_be_left_to_the_client() -> None:
    norms = []
    for scale in (True, False):
        engine, *_ = refimpl.initialize(model=Net(), config=config(0, gradient_accumulation_steps=4))
        engine.set_gradient_accumulation_boundary(True)
        engine.backward(engine(batch(0, 0, 0)), scale_wrt_gas=scale)
        norms.append(engine.stage.full_gradient("down.weight").norm().item())
        engine.zero_grad()
        engine(batch(0, 0, 0)).backward()  # by hand: divided again
        norms.append(engine.stage.full_gradient("down.weight").norm().item())
    assert norms == pytest.approx([norms[0], norms[0], 4 * norms[0], norms[0]], rel=1e-6)


def test_a_world_of_one_needs_no_launcher() -> None:
    assert Group.world().backend == "none"
    result = train(config(3), steps=2, micros=1)
    close(result["weights"], oracle(1, steps=2, micros=1)["weights"])
