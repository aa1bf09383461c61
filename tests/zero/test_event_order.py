"""Every access that needs an order has one: what a GPU would be free to reorder, found without a GPU.

One process is rank 3 of 8 (torch's "fake" backend, whose collectives send nothing), on streams that exist on paper. So
these are the orders that the code asks for, not what a GPU did: `make gpu-check` hunts races on a real one.
"""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from stream_log import Kernel, Recorder, Watch, races
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint
from training import STAGES, Net, tokens

from refimpl.comm.group import Group
from refimpl.model.experts import Experts
from refimpl.model.gates import Gate, Routing
from refimpl.model.moe import MoE
from refimpl.zero.beyond import Beyond
from refimpl.zero.config import ZeroConfig
from refimpl.zero.stage import Stage
from refimpl.zero.unit import Unit

every_stage = pytest.mark.parametrize("stage", STAGES)
SYNCS = 1  # times a step that the host asks the device for a value: norm and unused parameters, in one message


@contextmanager
def pretended(rank: int) -> Iterator[int]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=8)
    with patch("refimpl.zero.update.checksum", lambda _: [0.0, 0.0]):  # nobody else adds its own to the sums
        yield 8
    dist.destroy_process_group()


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
    unit_size: int = 0,
    parts: bool = False,
) -> Seen:
    """`parts`: others hold other parts of the model, and some of these parameters."""
    recorder = Recorder()
    group = Group(dist.group.WORLD, deterministic=deterministic, streams=recorder)
    torch.manual_seed(0)
    with Watch(recorder) as watch:
        model = NETS[net]()
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        config = ZeroConfig(reduce_bucket_size=700, check_order=False, unit_size=unit_size)
        shared = dict.fromkeys(list(model.parameters())[-2:], Group(dist.new_group([3, 4]))) if parts else None
        seen = Seen(recorder, STAGES[stage](model, optimizer, group, config, experts=shared))
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
    needed = {where for where in places if not where.startswith("buffer")}
    assert len(needed) >= 6
    assert {where for where in needed if not races(log.log, without=log.with_repeats(places[where]))} == set()


@every_stage
@pytest.mark.parametrize("parts", [False, True], ids=["whole", "parts"])
def test_the_host_asks_the_device_for_few_values(stage: str, parts: bool, ranks: int) -> None:
    assert train(stage, parts=parts).syncs <= SYNCS


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
