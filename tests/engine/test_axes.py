"""A GPT cut along any axes trains as the whole one on one process does: losses, weights, norms, clipping, overflow."""

import math
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from worlds import run

from refimpl import launch
from refimpl.comm.axes import NAMES
from refimpl.engine.initialize import initialize
from refimpl.engine.pipeline import PipelineEngine
from refimpl.model.gpt import GPT, GPTConfig
from refimpl.parallel.swap import whole_state_dict

SHAPE = GPTConfig(vocab=19, context=8, width=64, layers=3, heads=4)  # no axis of 3 divides the heads
STEPS, GAS, MICRO = 3, 2, 2  # SGD: AdamW's first steps would make one size of all gradients, rounding and all
FEEDS = 2  # batches of a step, whatever the layout


def batch(step: int, feed: int, micro: int) -> tuple[Tensor, Tensor]:
    """tokens and targets [MICRO, 8]."""
    generator = torch.Generator().manual_seed(100 * step + 10 * feed + micro)
    ids = torch.randint(SHAPE.vocab, (MICRO, SHAPE.context + 1), generator=generator)
    return ids[:, :-1].clone(), ids[:, 1:].clone()


def settings(axes: dict[str, int], **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_accumulation_steps": GAS * FEEDS // axes.get("dp", 1),
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
        "gradient_clipping": 0.3,
        "pipeline": {"stages": axes.get("pp", 1)},
        "tensor_parallel": {"autotp_size": axes.get("tp", 1)},
        "sequence_parallel_size": axes.get("cp", 1),
        **more,
    }


def trained(axes: dict[str, int], **more: Any) -> tuple[dict[str, Tensor], list[float], list[float], int]:
    """This rank's weights, by their names in the whole model and whole; losses; norms; skipped steps."""
    torch.manual_seed(0)
    engine, *_ = initialize(model=GPT(SHAPE), config=settings(axes, **more))
    assert isinstance(engine, PipelineEngine) == (axes.get("pp", 1) > 1)
    losses, norms = [], []
    feeds = axes.get("dp", 1)
    for step in range(STEPS):
        mine = range(engine.axes.feed, FEEDS, feeds)
        data = [batch(step, feed, micro) for micro in range(GAS) for feed in mine]
        losses.append(engine.train_batch(iter(data)).item())
        norms.append(engine.get_global_grad_norm() or 0.0)
    weights = {name: w.clone() for name, w in whole(engine).items()}
    return weights, losses, norms, engine.skipped_steps


def whole(engine: Any) -> dict[str, Tensor]:
    rename = engine.module.name_in_whole if isinstance(engine, PipelineEngine) else str
    with torch.no_grad():
        return {rename(name): w for name, w in whole_state_dict(engine.module).items()}


MESHES = [
    ({"tp": 2}, 0), ({"tp": 2, "dp": 2}, 1), ({"tp": 2, "dp": 2}, 2), ({"cp": 2, "dp": 2}, 3), ({"cp": 2}, 1),
    ({"pp": 3}, 0), ({"pp": 2, "dp": 2}, 1), ({"pp": 2, "tp": 2}, 1), ({"cp": 2, "tp": 2}, 0), ({"pp": 2, "cp": 2}, 1),
    ({"tp": 3}, 0), ({"pp": 2, "dp": 2, "tp": 2}, 1), ({"tp": 2, "dp": 2}, 3),
]  # fmt: skip


@pytest.fixture(scope="module")
def alone() -> tuple[dict[str, Tensor], list[float], list[float], int]:
    return run(trained, {}, ranks=1)[0]


def named(value: dict[str, int] | int) -> str:
    return "-".join(f"{k}{n}" for k, n in value.items()) if isinstance(value, dict) else f"zero{value}"


@pytest.mark.parametrize(("axes", "stage"), MESHES, ids=named)
def test_any_layout_trains_as_one_process(axes: dict[str, int], stage: int, alone: Any) -> None:
    expected, losses, norms, _ = alone
    ranks = 1
    for name in NAMES:
        ranks *= axes.get(name, 1)
    seen = set()
    for weights, found, found_norms, _ in run(trained_at, axes, stage, ranks=ranks):
        assert found == pytest.approx(losses, rel=1e-5), "dot products are summed in another order, fp32"
        assert found_norms == pytest.approx(norms, rel=1e-4)
        for name, w in weights.items():
            torch.testing.assert_close(w, expected[name], rtol=1e-4, atol=1e-5)
        seen |= weights.keys()
    assert seen == expected.keys()
    assert min(norms) > 0.3, "every step is clipped"


def trained_at(axes: dict[str, int], stage: int) -> Any:
    return trained(axes, zero_optimization={"stage": stage})


def poisoned(axes: dict[str, int], where: int) -> tuple[int, bool, float | None]:
    """Skipped steps, whether a weight has changed, and the norm, when one rank's first gradient has an Inf."""
    torch.manual_seed(0)
    engine, *_ = initialize(model=GPT(SHAPE), config=settings(axes, zero_optimization={"stage": 1}))
    before = {name: w.clone() for name, w in engine.module.state_dict().items()}
    if engine.global_rank == where:
        p = next(p for p in engine.module.parameters())
        p.register_hook(lambda grad: torch.full_like(grad, float("inf")))
    data = [batch(0, engine.axes.feed, micro) for micro in range(GAS * FEEDS)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine.train_batch(iter(data))
    changed = any(not torch.equal(before[name], w) for name, w in engine.module.state_dict().items())
    return engine.skipped_steps, changed, engine.get_global_grad_norm()


@pytest.mark.parametrize(("axes", "where"), [({"pp": 2, "dp": 2}, 3), ({"dp": 2, "tp": 2}, 2), ({"cp": 2, "tp": 2}, 1)])
def test_an_overflow_on_one_rank_skips_the_step_on_all(axes: dict[str, int], where: int) -> None:
    for skipped, changed, norm in run(poisoned, axes, where, ranks=4):
        assert skipped == 1
        assert not changed
        assert norm is not None
        assert not math.isfinite(norm)


@pytest.mark.parametrize(
    ("axes", "says"),
    [
        ({"tp": 3}, r"4 ranks are no multiple of tp 3 = 3: start a multiple of 3"),
        ({"pp": 2, "tp": 4}, r"4 ranks are no multiple of pp 2 x tp 4 = 8"),
        ({"dp": 4, "data_parallel_size": 2}, r"data_parallel_size = 2, but the ranks are laid out with 4"),
        ({"pp": 2, "stage": 3}, r"ZeRO stage 3 with a pipeline: .* use stage 0 or 1"),
        ({"cp": 4, "context": 12}, r"a sequence of 12 tokens does not divide into 8 chunks for 4 ranks: pad it to 16"),
        ({"pp": 2, "model": "BatchNorm1d"}, r"pipeline.stages = 2: a BatchNorm1d is no chain of layers"),
    ],
)
def test_what_cannot_be_laid_out(axes: dict[str, Any], says: str) -> None:
    with pytest.raises(launch.RankError, match=says):
        run(laid_out, axes, ranks=4)


def laid_out(axes: dict[str, Any]) -> None:
    extra = {key: axes.pop(key) for key in ("data_parallel_size", "stage", "context", "model") if key in axes}
    config = settings(axes, zero_optimization={"stage": extra.get("stage", 0)})
    config |= {key: extra[key] for key in ("data_parallel_size",) if key in extra}
    config["gradient_accumulation_steps"] = 1
    shape = replace(SHAPE, context=extra.get("context", SHAPE.context))
    initialize(model=nn.BatchNorm1d(4) if "model" in extra else GPT(shape), config=config)
