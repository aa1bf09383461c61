"""A GPT cut along any axes trains as the whole one on one process does: losses, weights, norms, clipping, overflow."""

import math
import warnings
from dataclasses import replace
from math import prod
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.nn.functional import all_gather
from worlds import run

from refimpl import launch
from refimpl.comm.group import Group
from refimpl.comm.mesh import Mesh
from refimpl.engine.initialize import initialize
from refimpl.engine.pipeline import PipelineEngine
from refimpl.engine.report import mean_loss
from refimpl.model.gpt import GPT, GPTConfig
from refimpl.parallel.conjugates import copy, reduce
from refimpl.parallel.swap import whole_state_dict

SHAPE = GPTConfig(vocab=19, context=8, width=64, layers=3, heads=4)  # no axis of 3 divides the heads
STEPS, GAS, MICRO = 3, 2, 2  # SGD: AdamW's first steps would make one size of all gradients, rounding and all
FEEDS = 4  # batches of a step, whatever the layout


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


def ranks_of(axes: dict[str, int]) -> int:
    return prod(size for axis, size in axes.items() if axis != "shard")  # of which dp counts all


MESHES = [
    ({"tp": 2}, 0), ({"tp": 2, "dp": 2}, 1), ({"tp": 2, "dp": 2}, 2), ({"cp": 2, "dp": 2}, 3), ({"cp": 2}, 1),
    ({"pp": 3}, 0), ({"pp": 2, "dp": 2}, 1), ({"pp": 2, "tp": 2}, 1), ({"cp": 2, "tp": 2}, 0), ({"pp": 2, "cp": 2}, 1),
    ({"tp": 3}, 0), ({"pp": 2, "dp": 2, "tp": 2}, 1), ({"tp": 2, "dp": 2}, 3), ({"dp": 4, "shard": 2}, 3),
    ({"dp": 2, "cp": 2, "shard": 2}, 2),
]  # fmt: skip


@pytest.fixture(scope="module")
def alone() -> tuple[dict[str, Tensor], list[float], list[float], int]:
    return run(trained, {}, ranks=1)[0]


def named(value: dict[str, int] | int) -> str:
    return "-".join(f"{k}{n}" for k, n in value.items()) if isinstance(value, dict) else f"zero{value}"


@pytest.mark.parametrize(("axes", "stage"), MESHES, ids=named)
def test_any_layout_trains_as_one_process(axes: dict[str, int], stage: int, alone: Any) -> None:
    expected, losses, norms, _ = alone
    seen = set()
    for weights, found, found_norms, _ in run(trained_at, axes, stage, ranks=ranks_of(axes)):
        assert found == pytest.approx(losses, rel=1e-5), "dot products are summed in another order, fp32"
        assert found_norms == pytest.approx(norms, rel=1e-4)
        for name, w in weights.items():
            torch.testing.assert_close(w, expected[name], rtol=1e-4, atol=1e-5)
        seen |= weights.keys()
    assert seen == expected.keys()
    assert min(norms) > 0.3, "every step is clipped"


def trained_at(axes: dict[str, int], stage: int) -> Any:
    return trained(axes, zero_optimization={"stage": stage, "mics_shard_size": axes.get("shard", -1)})


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


# --- models that somebody else has split, and says so by an mpu


class Mpu:
    """Megatron's questions, of neighbours that share the model."""

    def __init__(self, size: int) -> None:
        self.mesh = Mesh({"data": Group.world().size // size, "model": size})

    def get_model_parallel_group(self) -> Any:
        return self.mesh.group("model").handle

    def get_data_parallel_group(self) -> Any:
        return self.mesh.group("data").handle


class Halves(nn.Module):
    """x A1 A2 summed over the model's ranks, each of which has its columns of A1 and rows of A2; a norm is whole."""

    def __init__(self, group: Group) -> None:
        super().__init__()
        self.group, part = group, slice(group.rank * 64 // group.size, (group.rank + 1) * 64 // group.size)
        torch.manual_seed(2)
        first, second = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)
        self.norm = nn.LayerNorm(64)
        self.first = nn.Parameter(first.weight.detach()[part].clone())
        self.second = nn.Parameter(second.weight.detach()[:, part].clone())
        for p in (self.first, self.second):
            p.model_parallel = True  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        x = copy(self.norm(x), self.group)
        y: Tensor = reduce((x @ self.first.T).tanh() @ self.second.T, self.group)
        return y.square().mean() * 100


def by_mpu(size: int, stage: int) -> tuple[Tensor, list[float], int]:
    """The norm's weight, the gradients' norms, ranks that read different data."""
    mpu = Mpu(size)
    model = Halves(Group(mpu.get_model_parallel_group()))
    config = settings({}, gradient_accumulation_steps=2 // mpu.mesh.size("data"), zero_optimization={"stage": stage})
    engine, *_ = initialize(model=model, mpu=mpu, config=config)
    norms = []
    for step in range(STEPS):
        for micro in range(engine.axes.feed, 2, engine.axes.feeds):
            torch.manual_seed(10 * step + micro)
            engine.backward(engine(torch.randn(MICRO, 64)))
        engine.step()
        norms.append(engine.get_global_grad_norm() or 0.0)
    return engine.stage.full_parameter("norm.weight"), norms, engine.dp_world_size


@pytest.mark.parametrize(("size", "stage"), [(2, 1), (2, 3), (4, 2)])
def test_a_model_that_its_author_has_split(size: int, stage: int) -> None:
    ((weight, norms, _),) = run(by_mpu, 1, 0, ranks=1)
    for found, found_norms, feeds in run(by_mpu, size, stage, ranks=4):
        assert feeds == 4 // size
        assert found_norms == pytest.approx(norms, rel=1e-5)
        torch.testing.assert_close(found, weight, rtol=1e-4, atol=1e-6)
    assert min(norms) > 0.3


def sequences(how: str) -> tuple[float, float, int]:
    """Mean loss, norm and batch size of a model for which tokens are rows, one on each rank."""
    group, torch_seed = Group.world(), torch.manual_seed(3)
    model = nn.Linear(64, 1)
    config = settings({}, gradient_accumulation_steps=1)
    if how == "mesh_param":
        engine, *_ = initialize(model=model, config=config, mesh_param=(2, 2))
    elif how == "file":
        engine, *_ = initialize(model=model, config=config | {"sequence_parallel_size": 2, "data_parallel_size": 2})
    else:
        engine, *_ = initialize(model=model, config=config)
    tokens = torch.randn(4, 64, generator=torch_seed)
    rows = tokens if how == "alone" else tokens[group.rank : group.rank + 1]
    total = engine(rows).square().sum() / (4 if how == "alone" else 1)
    engine.backward(total)
    engine.step()
    return mean_loss(engine.group, [total]).item(), engine.get_global_grad_norm() or 0.0, engine.train_batch_size()


@pytest.mark.parametrize("how", ["mesh_param", "file"])
def test_sequence_ranks_are_averaged_over_and_read_the_same_batch(how: str) -> None:
    ((loss, norm, size),) = run(sequences, "alone", ranks=1)
    for found in run(sequences, how, ranks=4):
        assert found == (pytest.approx(loss, rel=1e-6), pytest.approx(norm, rel=1e-6), 2 * size)


def by_the_recipe(cp: int) -> tuple[Tensor, float]:
    """The gradient of a sequence of 8 tokens of which 3 count, 1 on the first of 2 ranks; loss as DeepSpeed's
    tutorial on Ulysses makes it: each rank's mean, gathered, weighted by its tokens."""
    torch.manual_seed(3)
    model, tokens = nn.Linear(64, 1), torch.randn(8, 64)
    counts = torch.tensor([0, 0, 1.0, 0, 1, 0, 0, 1])
    engine, *_ = initialize(model=model, config=settings({"cp": cp}, gradient_accumulation_steps=1))
    rank, handle = engine.axes.context.rank, dist.group.WORLD
    mine = slice(rank * 8 // cp, (rank + 1) * 8 // cp)
    good = counts[mine].sum()
    loss = (engine(tokens[mine]).squeeze(1).square() * counts[mine]).sum() / good
    if cp > 1:
        losses, goods = all_gather(loss, group=handle), all_gather(good, group=handle)
        loss = sum(x * n for x, n in zip(losses, goods, strict=True)) / sum(goods)
    engine.backward(loss)
    return engine.stage.full_gradient("weight"), loss.item()


def test_the_recipe_of_deepspeeds_users_has_the_whole_sequences_gradient() -> None:
    ((gradient, loss),) = run(by_the_recipe, 1, ranks=1)
    for found, found_loss in run(by_the_recipe, 2):
        assert found_loss == pytest.approx(loss, rel=1e-6)
        torch.testing.assert_close(found, gradient)


@pytest.mark.parametrize(
    ("axes", "says"),
    [
        ({"tp": 3}, r"4 ranks are no multiple of tp 3 = 3: start a multiple of 3"),
        ({"pp": 2, "tp": 4}, r"4 ranks are no multiple of pp 2 x tp 4 = 8"),
        ({"dp": 4, "data_parallel_size": 2}, r"data_parallel_size = 2, but the ranks are laid out with 4"),
        ({"tp": 4, "heads": 3}, r"autotp_size: blocks.0.attention.qkv: 3 units of 8 cannot be dealt to 4 ranks"),
        ({"pp": 2, "stage": 3}, r"ZeRO stage 3 with a pipeline: .* use stage 0 or 1"),
        ({"cp": 4, "context": 12}, r"a sequence of 12 tokens does not divide into 8 chunks for 4 ranks: pad it to 16"),
        ({"pp": 2, "model": "BatchNorm1d"}, r"pipeline.stages = 2: a BatchNorm1d that is no chain of layers; give"),
    ],
)
def test_what_cannot_be_laid_out(axes: dict[str, Any], says: str) -> None:
    with pytest.raises(launch.RankError, match=says):
        run(laid_out, axes, ranks=4)


def laid_out(axes: dict[str, Any]) -> None:
    extra = {key: axes.pop(key) for key in ("data_parallel_size", "stage", "context", "heads", "model") if key in axes}
    config = settings(axes, zero_optimization={"stage": extra.get("stage", 0)})
    config |= {key: extra[key] for key in ("data_parallel_size",) if key in extra}
    config["gradient_accumulation_steps"] = 1
    shape = replace(SHAPE, context=extra.get("context", SHAPE.context))
    if "heads" in extra:
        shape = replace(shape, heads=extra["heads"], width=8 * extra["heads"])
    initialize(model=nn.BatchNorm1d(4) if "model" in extra else GPT(shape), config=config)
