"""Every access that needs an order has one: what a GPU would be free to reorder, found without a GPU.

One process is rank 3 of 8 (torch's "fake" backend, whose collectives send nothing), on streams that exist on paper. So
these are the orders that the code asks for, not what a GPU did: `make gpu-check` hunts races on a real one.
"""

import gc
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from stream_log import Kernel, Recorder, Watch, in_turn, needless, pretended, races
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from training import STAGES, Net, tokens
from two_streams import Aside

from refimpl.comm.group import Group
from refimpl.compress.blocks import Blocks
from refimpl.compress.compression import Compression
from refimpl.compress.powersgd import PowerSGD
from refimpl.compress.sign import Sign
from refimpl.model.experts import Experts
from refimpl.model.gates import Gate, Routing
from refimpl.model.moe import MoE
from refimpl.optim.loss_scale import LossScaler
from refimpl.optim.muon import Muon
from refimpl.optim.one_bit_adam import OneBitAdam
from refimpl.optim.one_bit_lamb import OneBitLamb
from refimpl.optim.zero_one_adam import ZeroOneAdam
from refimpl.zero.agreement.beyond import Beyond
from refimpl.zero.config import ZeroConfig
from refimpl.zero.gather.unit import Unit
from refimpl.zero.stage import Stage

FUSED = partial(torch.optim.AdamW, fused=True)
every_stage = pytest.mark.parametrize("stage", STAGES)
SYNCS = 1  # times a step that the host asks the device for a value: norm and unused parameters, in one message


@pytest.fixture
def ranks() -> Iterator[int]:
    with pretended(rank=3) as size:
        yield size


class Checkpointed(Net):
    """Forward again inside backward."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        logits = self.head(self.norm(self.frozen(x)))
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.roll(-1, 1).flatten())


class AllUsed(Net):
    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) + self.unused(self.embed(tokens)).square().mean()


NETS: dict[str, Callable[[], nn.Module]] = {
    "an unused layer": partial(Net, layers=1),
    "checkpointed": partial(Checkpointed, layers=2),
    "all used": partial(AllUsed, layers=1),
}


@dataclass
class Seen:
    """What a short training did. `last`: where in the log its last step begins."""

    recorder: Recorder
    stage: Stage
    syncs: int = 0  # in the last step
    last: int = 0


def train(
    stage: str,
    net: str = "an unused layer",
    micro_batches: int = 1,
    deterministic: bool = False,
    parts: bool = False,
    optimizer: Callable[..., torch.optim.Optimizer] = FUSED,
    scaler: LossScaler | None = None,
    **config: Any,
) -> Seen:
    """`parts`: others hold other parts of the model, and some of these parameters."""
    recorder = Recorder()
    group = Group(dist.group.WORLD, deterministic=deterministic, streams=recorder)
    torch.manual_seed(0)
    with Watch(recorder) as watch:
        model = NETS[net]()
        settings = ZeroConfig(reduce_bucket_size=700, check_order=False, **config)
        shared = dict.fromkeys(list(model.parameters())[-2:], Group(dist.new_group([3, 4]))) if parts else None
        seen = Seen(recorder, STAGES[stage](model, optimizer(model.parameters()), group, settings, scaler, shared))
        seen.stage.update.beyond = Beyond(group, {}) if parts else None
        for step in range(3):
            seen.last, before = len(recorder.log), watch.syncs
            group.ledger.reset()
            for micro in range(micro_batches):
                seen.stage.backward(model(tokens(step, micro)), sync=micro == micro_batches - 1)
            seen.stage.step()
            seen.syncs = watch.syncs - before
    return seen


@every_stage
@pytest.mark.parametrize("deterministic", [False, True], ids=["native", "composed"])
def test_no_two_accesses_race(stage: str, deterministic: bool, ranks: int) -> None:
    for net, micro_batches in itertools.product(NETS, (1, 2)):
        seen = train(stage, net, micro_batches, deterministic)
        assert races(seen.recorder.log) == [], (net, micro_batches)


@pytest.mark.parametrize("net", NETS)
def test_joined_units_do_not_race(net: str, ranks: int) -> None:
    assert races(train("zero3", net, unit_size=2000).recorder.log) == []


@pytest.mark.parametrize(
    ("stage", "deterministic", "rank"),
    [("ddp", False, 0), *((stage, composed, 3) for stage in ("zero1", "zero2", "zero3") for composed in (False, True))],
)
def test_each_wait_left_out_is_a_race(stage: str, deterministic: bool, rank: int) -> None:
    """At each place that waits, for its inputs or its result. What a stage broadcasts when it is built is one place;
    who waits for an event twice is left without both waits.

    DDP: rank 0, for the others read no gradient before the norm has come, later on the same stream. A buffer that one
    stream alone takes and gives needs no wait: tests/comm/test_streams.py has it on two streams.
    """
    with pretended(rank):
        log = train(stage, deterministic=deterministic).recorder
    places: dict[str, set[int]] = {}
    for where, entries in log.waits().items():
        kind, by = where.split(": ")
        places.setdefault(f"{kind}: start" if by in ("__init__", "share") else where, set()).update(entries)
    needed = {where for where in places if where.startswith(("inputs", "result"))}
    assert len(needed) >= 6
    assert {where for where in needed if not any(in_turn(log.log, log.with_repeats(places[where])))} == set()


OTHERWISE: dict[str, tuple[str, dict[str, Any]]] = {
    "int8": ("ddp", {"compression": Compression(Blocks(8, 64))}),
    "signs": ("ddp", {"compression": Compression(Sign())}),
    "PowerSGD": ("zero1", {"compression": Compression(PowerSGD(1, least_ratio=1.5))}),
    "1-bit Adam": ("ddp", {"optimizer": partial(OneBitAdam, freeze_step=1)}),
    "0/1 Adam": ("ddp", {"optimizer": partial(ZeroOneAdam, var_freeze_step=1)}),
    "1-bit LAMB": ("ddp", {"optimizer": partial(OneBitLamb, freeze_step=1, weight_decay=0.1)}),
    "Muon": ("zero2", {"optimizer": Muon}),
    "ZeRO++": (
        "zero3",
        {"zero_quantized_weights": True, "zero_hpz_partition_size": 2, "zero_quantized_gradients": True},
    ),
    "fp16": ("zero2", {"dtype": torch.float16, "scaler": LossScaler()}),
}


@pytest.mark.parametrize("how", OTHERWISE)
def test_what_travels_otherwise_has_its_order_too(how: str, ranks: int) -> None:
    stage, config = OTHERWISE[how]
    log = train(stage, **config).recorder
    assert races(log.log) == []
    assert needless(log) <= {"result: __init__", "inputs: share"}  # of the start: one place, see above


def test_an_optimizer_that_looks_at_norms_waits_once(ranks: int) -> None:
    for freeze_step in (10, 1):
        optimizer = partial(OneBitLamb, freeze_step=freeze_step, weight_decay=0.1)
        assert train("ddp", optimizer=optimizer).syncs <= SYNCS + 1


@every_stage
@pytest.mark.parametrize("parts", [False, True], ids=["whole", "parts"])
def test_the_host_asks_the_device_for_few_values(stage: str, parts: bool, ranks: int) -> None:
    """And before each it waits patiently, once."""
    with patch.object(Group, "settle") as patient:
        assert train(stage, parts=parts).syncs <= SYNCS
    assert patient.call_count <= 3 * SYNCS  # in three steps


class Branches(nn.Module):
    """Two branches at once. `first`: whether the one aside is asked first, so that its gradients come last."""

    def __init__(self, recorder: Recorder, first: bool) -> None:
        super().__init__()
        self.first = first
        self.left = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        self.right, self.last = Aside(nn.Linear(8, 8), recorder, recorder.new()), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        branches = (self.right, self.left) if self.first else (self.left, self.right)
        one, other = (branch(x) for branch in branches)
        self.right.join()
        return self.last(one + other).square().mean()


@pytest.fixture
def no_collector() -> Iterator[None]:
    """What waits for the collector does not give its memory back in the middle of a log, at a moment of chance."""
    gc.collect()
    gc.freeze()  # what is left need not be looked through for the next test
    gc.disable()
    yield
    gc.enable()


def branched(stage: str, first: bool, micro_batches: int = 1) -> Recorder:
    recorder = Recorder()
    with Watch(recorder):
        model = Branches(recorder, first)
        group, config = Group(dist.group.WORLD, streams=recorder), ZeroConfig(check_order=False)
        made = STAGES[stage](model, torch.optim.SGD(model.parameters(), lr=0.1), group, config)
        for _ in range(2):
            for micro in range(micro_batches):
                made.backward(model(torch.ones(2, 8)), sync=micro == micro_batches - 1)
            made.step()
    return recorder


@every_stage
@pytest.mark.parametrize("first", [False, True])
def test_layers_may_run_on_a_stream_of_their_own(stage: str, first: bool, ranks: int, no_collector: None) -> None:
    for micro_batches in (1, 2):
        assert races(branched(stage, first, micro_batches).log) == [], micro_batches


@pytest.mark.parametrize(("first", "where"), [(False, "buffer: add"), (True, "buffer: at_home")])
def test_a_bucket_waits_for_every_stream_that_fills_it(first: bool, where: str, ranks: int, no_collector: None) -> None:
    recorder = branched("zero2", first)
    assert races(recorder.log, without=recorder.waits()[where]) != []


def test_a_mixture_asks_for_the_sizes_of_its_experts_alone() -> None:
    x = torch.randn(10, 8, requires_grad=True)
    for routing in (Routing(k=2), Routing(k=2, capacity_factor=1.0, drop="choice"), Routing(by="experts")):
        mixture = MoE(Gate(8, 4, routing), Experts([nn.Linear(8, 8) for _ in range(4)]))
        with Watch(Recorder()) as watch:
            mixture(x).square().mean().backward()
        assert watch.syncs == 1, routing


@every_stage
def test_a_collective_is_one_launch_on_the_lane(stage: str, ranks: int) -> None:
    """With eight ranks as with two; ZeRO-3 gathers each unit at most twice, the others every bucket once."""
    seen = train(stage)
    launched = [e for e in seen.recorder.log[seen.last :] if isinstance(e, Kernel) and e.name.startswith("c10d")]
    calls = seen.stage.group.ledger.calls("tag")
    assert len(launched) == sum(calls.values())
    assert {kernel.stream for kernel in launched} == {1}
    buckets = len(seen.stage.buckets)
    assert (calls["gradients"], calls["norm"]) == (buckets, 1)
    most = {"ddp": 0, "zero3": 2 * buckets + 2}.get(stage, buckets)  # and the frozen unit, which is no bucket
    assert calls.get("parameters", 0) <= most


def test_a_unit_is_gathered_while_the_one_before_computes(ranks: int) -> None:
    """The gather of unit k + 1 is queued before the first kernel that reads unit k."""
    seen = train("zero3", "checkpointed")
    log = seen.recorder.log[seen.last :]
    gathers = [(at, e) for at, e in enumerate(log) if isinstance(e, Kernel) and "allgather" in e.name]
    early = 0
    for (_, first), (following, _) in itertools.pairwise(gathers):
        uses = (at for at, e in enumerate(log) if isinstance(e, Kernel) and e.stream == 0 and first.writes & e.reads)
        early += following < next(uses, 0)
    assert early >= len(gathers) // 2


def test_a_unit_may_be_freed_on_another_stream_than_it_was_gathered_on(ranks: int) -> None:
    recorder = Recorder()
    other = recorder.new()
    with Watch(recorder):
        layer = nn.Linear(16, 16)
        unit = Unit(list(layer.parameters()), Group(dist.group.WORLD, streams=recorder))
        for _ in range(2):
            unit.start()
            with recorder.use(other):
                unit.wait()
                layer(torch.ones(2, 16))
                unit.free()
    assert races(recorder.log) == []
    handed_back = recorder.waits()["buffer: free"]
    assert races(recorder.log, without=handed_back) != []


def test_the_log_sees_what_it_must(ranks: int) -> None:
    """A read without a wait, a buffer freed while it travels, memory given back and taken again."""

    def log(order: str) -> list[str]:
        recorder = Recorder()
        side = recorder.new()
        with Watch(recorder):
            x = torch.ones(8)
            written = recorder.record()
            with recorder.use(side):
                if order != "not waited for":
                    recorder.wait(written)
                x.add_(1)
                done = recorder.record()
            if order == "freed early":
                del x
            elif order == "resized early":
                x.untyped_storage().resize_(0)
            recorder.wait(done)
        return races(recorder.log)

    assert log("in order") == []
    assert log("not waited for") == ["aten.ones.default on stream 0, aten.add_.Tensor on stream 1"]
    for early in ("freed early", "resized early"):
        assert log(early) == ["aten.add_.Tensor on stream 1, free on stream 0"]
