"""safe_get_full_*, safe_set_full_*, and the local ones, against the same training in one process."""

from typing import Any

import pytest
import torch
import worlds
from torch import Tensor, nn

import refimpl.deepspeed as deepspeed
from refimpl.deepspeed import utils

SIZE, STAGES = 9, [0, 1, 2, 3]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(SIZE, 2 * SIZE), nn.Tanh(), nn.Linear(2 * SIZE, 1))


def data(rank: int) -> Tensor:
    return torch.randn(4, SIZE, generator=torch.Generator().manual_seed(rank))


def engine_of(stage: int, **more: Any) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "Adam", "params": {"lr": 0.1}},
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 20},
    }
    return deepspeed.initialize(model=net(), config=config | more)[0]


def oracle(ranks: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """After one step of Adam, with the gradient of that step still there."""
    model = net()
    opt = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.0)
    (sum(model(data(r)).square().mean() for r in range(ranks)) / ranks).backward()
    opt.step()
    return model, opt


def read(stage: int) -> list[tuple[str, Tensor, Tensor, Tensor, Tensor]]:
    engine = engine_of(stage)
    engine.backward(engine(data(engine.group.rank)).square().mean())
    grads = [utils.safe_get_full_grad(p) for p in engine.module.parameters()]
    engine.step()
    found = []
    for (name, p), grad in zip(engine.module.named_parameters(), grads, strict=True):
        weight = utils.safe_get_full_fp32_param(p)
        moments = [utils.safe_get_full_optimizer_state(p, key) for key in ("exp_avg", "exp_avg_sq")]
        assert all(t.dtype == torch.float32 and t.shape == p.shape for t in (weight, grad, *moments))
        found.append((name, weight, grad, *moments))
    return found


@pytest.mark.parametrize("ranks", [2, 3])
def test_whole_weights_gradients_and_states(ranks: int) -> None:
    model, opt = oracle(ranks)
    params = dict(model.named_parameters())
    for stage in STAGES:
        for found in worlds.run(read, stage, ranks=ranks):
            assert [name for name, *_ in found] == list(params)
            for name, weight, grad, exp_avg, exp_avg_sq in found:
                p = params[name]
                state = opt.state[p]
                for mine, theirs in (
                    (weight, p), (grad, p.grad), (exp_avg, state["exp_avg"]), (exp_avg_sq, state["exp_avg_sq"]),
                ):  # fmt: skip
                    torch.testing.assert_close(mine, theirs.detach(), rtol=1e-4, atol=1e-6)


def write(stage: int, extra: dict[str, Any]) -> None:
    engine = engine_of(stage, **extra)
    dtype = engine.config.dtype
    engine.backward(engine(data(engine.group.rank).to(dtype)).float().square().mean())
    engine.step()
    engine.backward(engine(data(engine.group.rank).to(dtype)).float().square().mean())
    for n, p in enumerate(engine.module.parameters()):
        value = torch.full(p.shape, 1.0 + n + 2**-12)  # not a bf16 number
        utils.safe_set_full_fp32_param(p, value)
        utils.safe_set_full_grad(p, torch.full(p.shape, 8.0))
        utils.safe_set_full_optimizer_state(p, torch.full(p.shape, 3.0), "exp_avg")
        utils.safe_set_full_optimizer_state(p, torch.full(p.shape, 4.0), "exp_avg_sq")
        assert utils.safe_get_full_fp32_param(p).equal(value)
        assert utils.safe_get_full_grad(p).eq(8.0).all()
        assert utils.safe_get_full_optimizer_state(p, "exp_avg").eq(3.0).all()
        with deepspeed.zero.GatheredParameters([p]):
            assert p.detach().equal(value.to(dtype))
    utils.safe_update_full_grad_vectorized(engine.module.parameters(), lambda grad, p: grad / 2)
    engine.step()
    exp_avg, exp_avg_sq = 0.9 * 3 + 0.1 * 4, 0.999 * 4 + 0.001 * 16
    move = 0.1 * (exp_avg / (1 - 0.9**2)) / ((exp_avg_sq / (1 - 0.999**2)) ** 0.5 + 1e-8)
    for n, p in enumerate(engine.module.parameters()):
        torch.testing.assert_close(utils.safe_get_full_fp32_param(p), torch.full(p.shape, 1.0 + n + 2**-12 - move))


@pytest.mark.parametrize("extra", [{}, {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}])
@pytest.mark.parametrize("stage", STAGES)
def test_what_is_written_is_trained_on(stage: int, extra: dict[str, Any]) -> None:
    worlds.run(write, stage, extra, ranks=2)


def local(stage: int, bf16: bool) -> list[list[Tensor]]:
    engine = engine_of(stage, bf16={"enabled": bf16})
    batch = data(0).to(engine.config.dtype)
    engine.backward(engine(batch).square().mean())
    engine.step()
    engine.backward(engine(batch).square().mean())
    fragments = []
    for p in engine.module.parameters():
        mine = utils.safe_get_local_fp32_param(p)
        assert mine.dim() == 1
        grad = utils.safe_get_local_grad(p)
        assert grad.shape == mine.shape
        assert grad.dtype == mine.dtype == torch.float32
        utils.safe_set_local_fp32_param(p, torch.full_like(mine, 5.0))
        utils.safe_set_local_grad(p, torch.zeros_like(mine))
        if mine.numel():
            utils.safe_set_local_optimizer_state(p, torch.zeros_like(mine), "exp_avg")
            assert utils.safe_get_local_optimizer_state(p, "exp_avg").eq(0).all()
        fragments.append(mine.clone())
        assert utils.safe_get_full_fp32_param(p).eq(5).all()
        assert utils.safe_get_full_optimizer_state(p, "exp_avg").eq(0).all()
    engine.step()
    for p in engine.module.parameters():
        assert utils.safe_get_full_fp32_param(p).eq(5).all()
    return fragments


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("stage", STAGES)
def test_this_ranks_fragments(stage: int, bf16: bool) -> None:
    results = worlds.run(local, stage, bf16, ranks=3)
    for n, p in enumerate(net().parameters()):
        sizes = [fragments[n].numel() for fragments in results]
        assert sum(sizes) == (3 if stage == 0 else 1) * p.numel()


def test_a_parameter_of_nobody() -> None:
    p = nn.Parameter(torch.ones(2))
    assert utils.safe_get_full_fp32_param(p) is None
    assert utils.safe_get_full_grad(p) is None
    p.grad = torch.ones(2)
    assert utils.safe_get_full_grad(p) is p.grad
    with pytest.raises(ValueError, match=r"\(2,\) that no engine trains"):
        utils.safe_set_full_fp32_param(p, torch.ones(2))
    engine = engine_of(1)
    weight = next(engine.module.parameters())
    assert utils.safe_get_full_grad(weight) is None
    with pytest.raises((ValueError, RuntimeError), match="backward"):
        utils.safe_set_local_grad(weight, torch.ones(1))


def between_micro_batches(stage: int, unused_on: int, op: str) -> list[list[Tensor | None]]:
    """safe_get_full_grad after the first of two micro-batches, after the second, and after writing between two."""
    engine = engine_of(stage, gradient_accumulation_steps=2, gradient_allreduce_op=op)
    rank, params = engine.group.rank, list(engine.module.parameters())

    def backward(micro: int) -> None:
        x = data(10 * micro + rank)
        engine.backward(engine.module[0](x).square().mean() if rank == unused_on else engine(x).square().mean())

    def read() -> list[Tensor | None]:
        return [utils.safe_get_full_grad(p) for p in params]

    assert read() == [None] * len(params)
    backward(0)
    seen = [read()]
    if stage < 2:
        with pytest.raises(RuntimeError, match=r"0\.weight waits on each rank for the last micro-batch"):
            utils.safe_get_local_grad(params[0])
        with pytest.raises(RuntimeError, match=r"0\.weight waits on each rank for the last micro-batch"):
            utils.safe_set_local_grad(params[0], torch.zeros(1))
    engine.step()
    backward(1)
    seen.append(read())
    if stage < 2:
        with engine.no_sync():
            backward(2)  # one part is reduced, one waits
        seen.append(read())
    else:
        backward(2)
        seen.append(read())
    for p in params:
        utils.safe_set_full_grad(p, torch.full(p.shape, 8.0))
    seen.append(read())
    engine.step()
    return seen


@pytest.mark.parametrize(("ranks", "op"), [(2, "mean"), (3, "sum")])
@pytest.mark.parametrize("stage", STAGES)
def test_between_micro_batches_a_gradient_is_what_it_is_so_far(stage: int, ranks: int, op: str) -> None:
    model, unused_on = net(), 1 if stage < 3 else -1  # ZeRO-3 needs one path on all ranks
    expected = []
    for micro in range(3):
        for rank in range(ranks):
            x = data(10 * micro + rank)
            out = model[0](x) if rank == unused_on else model(x)
            (out.square().mean() / 2 / (ranks if op == "mean" else 1)).backward()
        expected.append([p.grad.clone() for p in model.parameters()])
    expected.append([torch.full_like(p, 8.0) for p in model.parameters()])
    for seen in worlds.run(between_micro_batches, stage, unused_on, op, ranks=ranks):
        for mine, theirs in zip(seen, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


def clipped(stage: int) -> tuple[float, float]:
    engine = engine_of(stage)
    engine.backward(engine(data(engine.group.rank)).square().mean())
    with pytest.raises(ValueError, match="one engine's parameters and norm_type=2, not 1 and 1"):
        deepspeed.runtime.utils.clip_grad_norm_(engine.module.parameters(), 0.01, norm_type=1)
    norm = deepspeed.runtime.utils.clip_grad_norm_(engine.module.parameters(), 0.01)
    engine.step()
    return float(norm), engine.get_global_grad_norm()


def test_clipping_through_deepspeeds_function() -> None:
    model, _ = oracle(2)
    expected = torch.cat([p.grad.flatten() for p in model.parameters()]).norm().item()
    for stage in STAGES:
        for before, after in worlds.run(clipped, stage, ranks=2):
            assert before == pytest.approx(expected, rel=1e-4)
            assert after == pytest.approx(0.01, rel=1e-3)


def frozen(stage: int) -> None:
    engine = engine_of(stage)
    first = next(engine.module.parameters())
    first.requires_grad_(False)
    engine.backward(engine(data(0)).square().mean())
    for read in (utils.safe_get_full_fp32_param, utils.safe_get_full_grad):
        assert read(first) is None
    assert utils.safe_get_local_fp32_param(first) is None
    assert utils.safe_get_local_grad(first) is None
    assert utils.safe_get_local_optimizer_state(first, "exp_avg") is None


@pytest.mark.parametrize("stage", STAGES)
def test_of_what_is_frozen_there_is_nothing_as_in_deepspeed(stage: int) -> None:
    worlds.run(frozen, stage, ranks=2)


def in_double() -> bool:
    engine = deepspeed.initialize(
        model=nn.Linear(1, 2).double(), config={"train_batch_size": 2, "optimizer": {"type": "Adam"}}
    )[0]
    engine.backward(engine(torch.full((1, 1), 1 / 3, dtype=torch.float64)).sum())
    weight = next(engine.module.parameters())
    return torch.equal(utils.safe_get_local_grad(weight), utils.safe_get_full_grad(weight).flatten())


def test_a_fragment_of_an_fp64_gradient_is_exact() -> None:
    assert worlds.run(in_double, ranks=2) == [True, True]
