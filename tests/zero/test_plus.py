"""ZeRO++ and MiCS: the same bits where nothing is rounded, the formula's bytes between nodes, a loss near ZeRO-3's."""

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from training import Job, Net, adamw, differing, oracle, tokens, train
from worlds import run

from refimpl.comm.axes import neighbours
from refimpl.comm.group import Group
from refimpl.comm.levels import two_level
from refimpl.comm.mesh import Mesh
from refimpl.compress.blocks import Blocks
from refimpl.launch import RankError
from refimpl.optim.loss_scale import DynamicLossScaler, LossScaler
from refimpl.plan.plus import Crossing, crossing, second_shard_bytes, wire_bytes
from refimpl.zero.config import LoCo, ZeroConfig
from refimpl.zero.flat import Bucket
from refimpl.zero.gather.order import RankDivergence
from refimpl.zero.gather.plus import Plus
from refimpl.zero.gather.unit import unit_of
from refimpl.zero.init import GatheredParameters, Init
from refimpl.zero.reduction.loco import MovingErrors
from refimpl.zero.zero3 import Zero3

QWZ, HPZ, QGZ = {"zero_quantized_weights": True}, {"zero_hpz_partition_size": 2}, {"zero_quantized_gradients": True}
LOCO = QGZ | {"zeropp_loco_param": LoCo()}
LEVELS = {"mics_hierarchical_params_gather": True}
ALL = QWZ | HPZ | QGZ


def on_nodes(per_node: int, link: str, fn: Callable[..., Any], *args: Any) -> Any:
    """In a rank: fn(*args), where every `per_node` ranks are a node, with this link between nodes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REFIMPL_RANKS_PER_NODE", str(per_node))
        patch.setenv("REFIMPL_LINK", link)
        return fn(*args)


def nodes(n: int, places: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
    return run(on_nodes, places, "", fn, *args, ranks=n * places)


# --- nothing is rounded: the bits of one process


@pytest.mark.parametrize(
    ("n", "places", "micro_batches", "config"),
    [
        (2, 2, 1, HPZ), (2, 2, 2, HPZ), (2, 2, 1, LEVELS), (2, 2, 2, HPZ | LEVELS),
        (1, 4, 1, HPZ | LEVELS), (4, 1, 1, {"zero_hpz_partition_size": 4} | LEVELS),
        (1, 3, 1, {"zero_hpz_partition_size": 3}),
    ],
    ids=str,
)  # fmt: skip
def test_second_shards_and_levels_change_no_bit(
    n: int, places: int, micro_batches: int, config: dict[str, Any]
) -> None:
    job = Job(micro_batches=micro_batches, steps=3, config={"param_persistence_threshold": 20, **config})
    expected = oracle(n * places, Job(micro_batches=micro_batches, steps=3), ranks_first=True)
    assert differing(nodes(n, places, train, "zero3", job)[0].weights, expected) == []


def gathered_in_order(config: dict[str, Any]) -> list[float]:
    """The chunk of a quantised sum that this rank has, and whether units come back whole and in order."""
    group = Group.world()
    net = Net()
    with torch.no_grad():
        for i, p in enumerate(net.parameters()):
            p.fill_(i + 1)
    stage = Zero3(net, None, group, ZeroConfig(**config))
    for i, p in enumerate(net.parameters()):
        unit = unit_of(p)
        assert unit is not None
        unit.start()
        unit.wait()
        assert (p.detach() - (i + 1)).abs().max() < 0.1, "rounded to a 127th of its block's largest"
        unit.free()
    plus = stage.plus
    assert plus.sum is not None
    size = 256
    # A block of one number over and over is rounded to itself.
    x = torch.cat([torch.full((size,), float((chunk + 1) * (group.rank + 1))) for chunk in range(group.size)])
    out = torch.empty(size)
    plus.sum.reduce_scatter(stage.units[0], out, x, "sum").wait()
    assert out.min() == out.max()
    return [out[0].item()]


@pytest.mark.parametrize(("n", "places"), [(3, 2), (2, 3), (2, 1)])
def test_every_rank_gets_its_own_chunk_whatever_the_nodes(n: int, places: int) -> None:
    ranks = n * places
    found = nodes(n, places, gathered_in_order, QWZ | QGZ | LEVELS | {"zero_hpz_partition_size": places})
    total = ranks * (ranks + 1) / 2
    assert [out for (out,) in found] == pytest.approx([(rank + 1) * total for rank in range(ranks)], rel=1e-6)


# --- bytes


class Wide(nn.Module):
    """Matrices alone, of whole blocks on 4 ranks, in bf16: no padding."""

    def __init__(self, layers: int = 3, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x.float().square().mean()


def crossed(config: dict[str, Any], micro_batches: int, by_levels: bool = False) -> tuple[Crossing, list[int], int]:
    """What this rank sent over the cables between nodes in the second step; units; bytes of second shards."""
    group = two_level(Group.world()) if by_levels else Group.world()
    torch.manual_seed(0)
    net = Wide().bfloat16()
    options = {"prefetch_bucket_size": 0, **config}
    stage = Zero3(net, torch.optim.SGD(net.parameters(), lr=0.1), group, ZeroConfig(**options))

    for _ in range(2):
        forward = backward = gradients = 0
        for micro in range(micro_batches):
            group.ledger.reset()
            loss = net(torch.randn(3, 64, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(micro)))
            forward += sum(group.ledger.crossed_bytes().values())
            group.ledger.reset()
            stage.backward(loss)
            tags = group.ledger.crossed_bytes("tag")
            reduced = sum(size for tag, size in tags.items() if tag.startswith("gradients"))
            backward += sum(tags.values()) - reduced
            gradients += reduced
        stage.step()
    kept = sum(t.numel() * t.element_size() for t in stage.tensors().get("second shards", []))
    return Crossing(forward, backward, gradients), [u.padded for u in stage.units], kept


PAPER = [  # units of M (n-1)/n a node: forward's gather, backward's, the gradients
    ({}, (1, 1, 1)), (QWZ, (0.5, 0.5, 1)), (HPZ, (1, 0, 1)), (QGZ, (1, 1, 0.25)), (ALL, (0.5, 0, 0.25)),
]  # fmt: skip


def over_cables(n: int, places: int, *args: Any) -> list[Any]:
    return run(on_nodes, places, "100Gbit/s 1us", crossed, *args, ranks=n * places)


@pytest.mark.parametrize("by", ["flat", "key", "group"])
def test_bytes_between_nodes_are_the_formulas_and_the_papers(by: str) -> None:
    """Flat; by two levels of gathers; by two levels of everything, as in the paper: a shard leaves its node once."""
    for config, paper in PAPER:
        found, *others = over_cables(2, 2, config | (LEVELS if by == "key" else {}), 1, by == "group")
        (bytes_, padded, kept), second = found, "zero_hpz_partition_size" in config
        assert all(other == found for other in others)
        options = {name.removeprefix("zero_"): True for name in config if "quantized" in name}
        options |= {"two_level": by != "flat", "two_level_sums": by == "group"}
        assert bytes_ == crossing(padded, 2, 2, second_shard=second, **options), config
        assert kept == (second_shard_bytes(padded, 2, 2) if second else 0)
        if by == "group":
            unit = 2 * sum(padded) / 2 / 2  # M (n-1)/n, of which each of the node's 2 ranks sends half
            ratios = [size / unit for size in (bytes_.forward, bytes_.backward, bytes_.gradients)]
            assert ratios == pytest.approx(paper, rel=4 / 128), "but for the scales: 4 bytes for 256 numbers"


def test_until_the_next_update_nothing_crosses_nodes_twice() -> None:
    once, *_ = over_cables(2, 2, HPZ, 1)[0]
    thrice, *_ = over_cables(2, 2, HPZ, 3)[0]
    assert once.forward > 0, "after an update"
    assert (thrice.forward, thrice.backward, thrice.gradients) == (once.forward, 0, 3 * once.gradients)


def lora(config: dict[str, Any]) -> tuple[dict[str, int], dict[str, int], int]:
    """Frozen matrices beside a trained one: bytes sent in the third step by tag, kept by class; frozen elements."""
    torch.manual_seed(0)
    net = Wide(4).bfloat16()
    for layer in net.layers[1:]:
        layer.requires_grad_(False)
    group = Group.world()
    stage = Zero3(net, torch.optim.SGD(net.parameters(), lr=0.1), group, ZeroConfig(**config))
    for _ in range(3):
        group.ledger.reset()
        stage.backward(net(torch.randn(3, 64, dtype=torch.bfloat16)))
        stage.step()
    memory = {name: sum(t.numel() * t.element_size() for t in kept) for name, kept in stage.tensors().items()}
    return group.ledger.sent_bytes("tag"), memory, sum(u.padded for u in stage.units if u.group_index < 0)


def test_frozen_weights_do_not_cross_again_and_rest_in_int8() -> None:
    plain, kept, frozen = nodes(2, 2, lora, {})[0]
    near, _, _ = nodes(2, 2, lora, HPZ)[0]
    assert near["parameters"] == plain["parameters"] // 2 // 4, "the trained one of four, in forward alone"
    rounded, smaller, _ = nodes(2, 2, lora, {"zero_quantized_nontrainable_weights": True})[0]
    shard = frozen // 3 // 4  # of each of three units
    assert kept["parameters"] - smaller["parameters"] == 3 * (2 * shard - wire_bytes(shard, 8))
    assert plain["parameters"] - rounded["parameters"] == 2 * 3 * 3 * (2 * shard - wire_bytes(shard, 8))


# --- rounding


class Checkpointed(Net):
    """The blocks are recomputed in backward."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        logits = self.head(self.norm(self.frozen(x)))
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), ids.roll(-1, 1).flatten())


def learned(config: dict[str, Any], dtype: torch.dtype, micro_batches: int, steps: int = 12) -> list[float]:
    """The mean loss over ranks of each step, on four batches that come again."""
    group = Group.world()
    torch.manual_seed(0)
    with Init(dtype=dtype) if micro_batches > 1 else nullcontext():
        net = Checkpointed(32)
    scaler = DynamicLossScaler(initial_scale=2.0**10) if dtype == torch.float16 else None
    stage = Zero3(net, adamw(net), group, ZeroConfig(dtype=dtype, **config), scaler)
    losses = []
    for step in range(steps):
        total = 0.0
        for micro in range(micro_batches):
            loss = net(tokens(step % 2, group.rank + group.size * micro)) / micro_batches
            stage.backward(loss)
            total += loss.item()
        stage.step()
        losses.append(sum(group.all_gather_object(total)) / group.size)
    return losses


@pytest.mark.parametrize(
    ("dtype", "micro_batches", "config"),
    [(torch.bfloat16, 2, ALL | LOCO | {"zero_quantized_nontrainable_weights": True}), (torch.float16, 1, ALL)],
    ids=str,
)
def test_the_loss_stays_within_a_tenth_of_zero3s(
    dtype: torch.dtype, micro_batches: int, config: dict[str, Any]
) -> None:
    def last(config: dict[str, Any]) -> float:
        return sum(nodes(2, 2, learned, config, dtype, micro_batches)[0][-4:]) / 4

    plain = last({})
    assert plain < 4.5, "there is something to learn: it begins above 11"
    assert last(config | {"param_persistence_threshold": 40}) == pytest.approx(plain, rel=0.1)


def asked_for(config: dict[str, Any]) -> None:
    """Whole parameters are what the ranks own, also when somebody computes with rounded ones just now."""
    group = Group.world()
    torch.manual_seed(0)
    net = Net().bfloat16()
    truth = {name: p.detach().clone() for name, p in net.named_parameters()}
    stage = Zero3(net, adamw(net), group, ZeroConfig(**config))
    seen: dict[str, Tensor] = {}
    up = net.blocks[1].up

    def look(module: nn.Module, args: Any) -> None:
        rounded = up.weight.detach().clone()
        with GatheredParameters(up.weight):
            assert torch.equal(up.weight, truth["blocks.1.up.weight"]), "whole inside forward, too"
        seen["rounded"] = rounded

    handle = up.register_forward_pre_hook(look)
    with torch.no_grad():
        net(tokens(0, group.rank))
    handle.remove()
    differs = not torch.equal(seen["rounded"], truth["blocks.1.up.weight"])
    assert differs == ("zero_quantized_weights" in config)
    state = net.state_dict()
    assert all(torch.equal(state[name], value) for name, value in truth.items())
    with GatheredParameters(up.weight, modifier_rank=0), torch.no_grad():
        up.weight[0] = 3  # the rest of the unit keeps what was rounded off of it
    truth["blocks.1.up.weight"][0] = 3
    stage.set_full_parameter("blocks.2.up.bias", torch.full((39,), 2.0))
    truth["blocks.2.up.bias"].fill_(2)
    for name, value in truth.items():
        assert torch.equal(stage.full_parameter(name), value.float()), name
    with torch.no_grad():
        net.blocks[1].up.register_forward_hook(lambda m, a, out: seen.update(row=m.weight[0].clone()))
        net.blocks[2].up.register_forward_hook(lambda m, a, out: seen.update(bias=m.bias.clone()))
        net(tokens(0, group.rank))
    assert torch.allclose(seen["row"].float(), torch.tensor(3.0), rtol=1e-2), (
        "what was written reaches the next forward"
    )
    assert torch.allclose(seen["bias"].float(), torch.tensor(2.0), rtol=1e-2)
    if "param_persistence_threshold" in config:
        assert unit_of(net.norm.weight) is None
        assert torch.equal(net.norm.weight, truth["norm.weight"])


@pytest.mark.parametrize("config", [QWZ, ALL | LEVELS | {"param_persistence_threshold": 20}, HPZ], ids=str)
def test_who_asks_for_whole_parameters_gets_what_the_ranks_own(config: dict[str, Any]) -> None:
    nodes(2, 2, asked_for, config)


def thawed_later(config: dict[str, Any]) -> tuple[bool, bool]:
    """Whether a frozen layer that rested in int8 is trained once it is thawed, and still is whole."""
    group = Group.world()
    torch.manual_seed(0)
    net = Net()
    stage = Zero3(net, adamw(net), group, ZeroConfig(**config))
    rested = any(u.shelf is not None for u in stage.units)
    before = stage.full_parameter("frozen.weight")
    net.frozen.requires_grad_(True)
    stage.backward(net(tokens(0, group.rank)))
    stage.step()
    assert all(u.shelf is None for u in stage.units)
    return rested, not torch.equal(before, stage.full_parameter("frozen.weight"))


def test_a_rounded_layer_can_be_thawed() -> None:
    for config in ({"zero_quantized_nontrainable_weights": True}, ALL | {"zero_quantized_nontrainable_weights": True}):
        assert nodes(2, 2, thawed_later, config) == [(True, True)] * 4


# --- errors that come back


def poisoned(scaler: LossScaler | None) -> tuple[list[bool], int, int, bool]:
    """Which steps were done, errors kept after the poisoned one and after the last, and whether all is finite."""
    group = Group.world()
    torch.manual_seed(0)
    net = Net()
    stage = Zero3(net, adamw(net), group, ZeroConfig(**ALL, zeropp_loco_param=LoCo(), dtype=torch.float16), scaler)
    done, kept = [], []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(3):
            loss = net(tokens(step, group.rank))
            stage.backward(loss * float("inf") if (step, group.rank) == (1, 2) else loss)
            done.append(stage.step())
            assert stage.plus.errors is not None
            kept.append(len(stage.plus.errors.kept))
    weights = net.state_dict()
    return done, kept[1], kept[2], all(w.isfinite().all() for w in weights.values())


def test_an_overflow_on_one_rank_skips_the_step_on_all_and_drops_the_errors() -> None:
    for done, during, after, finite in nodes(2, 2, poisoned, DynamicLossScaler(initial_scale=2.0**8, hysteresis=1)):
        assert (done, during, finite) == ([True, False, True], 0, True)
        assert after > 0


HOP = (Bucket.__new__(Bucket), "near")


def sent_in(errors: MovingErrors | None, rows: Tensor, times: int) -> Tensor:
    """The sum of what arrives of `rows`, sent so many times."""
    compressor, total = Blocks(bits=4), torch.zeros_like(rows)
    for _ in range(times):
        wires = errors.compress(HOP, rows) if errors else [compressor.compress(row) for row in rows]
        for row, wire in zip(total, wires, strict=True):
            compressor.add_to(row, wire)
    return total


def test_what_rounding_loses_comes_back() -> None:
    rows = torch.randn(3, 500, generator=torch.Generator().manual_seed(0))
    for beta, share in ((0.0, 0.1), (0.8, 0.5)):
        plain = sent_in(None, rows, 40) / 40 - rows
        kept = sent_in(MovingErrors(Group(None), 1, Blocks(bits=4), LoCo(err_beta=beta)), rows, 40) / 40 - rows
        assert kept.norm() < share * plain.norm(), beta
    loss_scale = [4.0]
    errors = MovingErrors(Group(None), 1, Blocks(bits=4), LoCo(reset_T=2), lambda: loss_scale[0])
    errors.compress(HOP, rows)
    before = [wire[0].clone() for wire in errors.wires()]
    errors.after_step(done=True)
    loss_scale[0] = 2.0
    errors.measure()
    for wire, scale in zip(errors.wires(), before, strict=True):
        assert torch.equal(wire[0], scale / 2), "the errors are of scaled gradients"
    errors.after_step(done=True)
    assert errors.wires() == [], "every reset_T steps"


# --- ranks apart, and what cannot be


def diverging() -> str:
    group = Group.world()
    torch.manual_seed(0)
    net = Net()
    Zero3(net, adamw(net), group, ZeroConfig(**ALL, **LEVELS))
    try:
        (net.blocks[0] if group.rank == 3 else net.blocks[1])(torch.randn(1, 2, 13))
    except RankDivergence as error:
        return str(error)
    return ""


def test_ranks_that_part_are_named() -> None:
    for said in nodes(2, 2, diverging):
        assert "rank 3: a new forward of blocks.0" in said


def uneven() -> None:
    Plus(Group.world(), ZeroConfig(**HPZ))


def spread() -> int:
    """Warnings of second shards that lie on several nodes."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Plus(Group.world(), ZeroConfig(zero_hpz_partition_size=4))
        Plus(Group.world(), ZeroConfig(**HPZ))
    return sum("zero_hpz_partition_size = 4: 2 of these ranks are on a node" in str(w.message) for w in caught)


def beside_mics() -> int:
    """Warnings of second shards where MiCS has put all shards on one node."""
    near, _ = neighbours(Group.world(), 2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Plus(near, ZeroConfig(**HPZ))
    return sum("the 2 ranks that share the parameters are on one node already" in str(w.message) for w in caught)


def with_experts() -> None:
    mesh = Mesh({"expert": 2, "same": 2})
    net = Net()
    experts = {p: mesh.group("same") for p in net.blocks.parameters()}
    Zero3(net, None, mesh.world, ZeroConfig(**QGZ), experts=experts)


def test_refusals_name_the_key() -> None:
    with pytest.raises(RankError, match="zero_hpz_partition_size = 2: must divide the 3 ranks"):
        run(uneven, ranks=3)
    assert nodes(2, 2, spread) == [1, 0, 0, 0]
    assert nodes(2, 2, beside_mics) == [1, 0, 1, 0]
    with pytest.raises(RankError, match="zero_quantized_gradients: not with experts"):
        run(with_experts, ranks=4)
    for options, word in (
        ({"zero_hpz_partition_size": 0}, "zero_hpz_partition_size"),
        ({"zeropp_loco_param": LoCo()}, "zero_quantized_gradients"),
    ):
        with pytest.raises(ValueError, match=word):
            ZeroConfig(**options)
    for options, word in (({"err_beta": 1.0}, "err_beta"), ({"reset_T": 0}, "reset_T")):
        with pytest.raises(ValueError, match=word):
            LoCo(**options)
