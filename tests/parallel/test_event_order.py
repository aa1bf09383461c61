"""What ranks of a model hand each other: every access has its order, each wait is needed; streams on paper.

See `stream_log`. Messages between two ranks go by a stream of the library's own, as on NCCL.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from stream_log import Recorder, Watch, messages_aside, needless, pretended, races
from torch import Tensor, nn

from refimpl.comm.group import Group
from refimpl.parallel.context.layout import Layout
from refimpl.parallel.context.ring import FusedRunning, ring_attention
from refimpl.parallel.context.ulysses import ulysses
from refimpl.parallel.overlap import coming
from refimpl.parallel.pipeline import wire
from refimpl.parallel.pipeline.runner import Pipeline
from refimpl.parallel.pipeline.schedules.named import NAMES, schedule
from refimpl.parallel.pipeline.wire import Wire, form_of

MICRO_BATCHES = 8


def logged(program: Callable[[Group, Watch], object], rank: int = 3) -> Recorder:
    recorder = Recorder()
    with pretended(rank), Watch(recorder) as watch:
        torch.manual_seed(0)
        program(Group(dist.group.WORLD, streams=recorder), watch)
        gc.collect()
    return recorder


def multiplied(group: Group, watch: Watch) -> None:
    layer = nn.Linear(8, 8)
    for _ in range(2):
        x = torch.ones(1, 4, 8, requires_grad=True)
        coming(x, group).through(layer).square().mean().backward()


def test_others_tokens_are_multiplied_when_they_are_there() -> None:
    recorder = logged(multiplied)
    assert races(recorder.log) == []
    assert needless(recorder) == set()


def queries(heads: int) -> list[Tensor]:
    return [torch.randn(1, heads, 16, 4, requires_grad=True) for _ in range(3)]


def ring(group: Group, watch: Watch) -> None:
    for _ in range(2):
        ring_attention(*queries(2), group, Layout(128, 8), fused=True).square().mean().backward()


def by_heads(group: Group, watch: Watch) -> None:
    for _ in range(2):
        ulysses(*queries(8), group).square().mean().backward()


@pytest.mark.parametrize("program", [ring, by_heads])
def test_tokens_come_by_in_order(program: Callable[[Group, Watch], object]) -> None:
    recorder = logged(program)
    assert races(recorder.log) == []
    assert needless(recorder) == set()


def interrupted(group: Group, watch: Watch) -> None:
    def out_of_memory(*_: object) -> None:
        raise MemoryError

    with patch.object(FusedRunning, "see", out_of_memory), pytest.raises(MemoryError):
        ring(group, watch)


def test_memory_goes_back_in_order_after_an_exception() -> None:
    """Keys and values were on their way, into memory that is somebody else's next."""
    recorder = logged(interrupted)
    assert races(recorder.log) == []
    last = max(at for entries in recorder.waits().values() for at in entries)
    assert races(recorder.log, without={last}) != []


@contextmanager
def agreed(x: Tensor) -> Iterator[None]:
    """The forms of all messages are known: what the fake backend receives is no header."""

    def begin(self: Wire, name: str, dynamic: bool) -> None:
        self.name, self.dynamic = name, dynamic
        needs_grad = x.clone().requires_grad_(torch.is_grad_enabled())
        self.form = form_of(needs_grad if name.startswith("activations") else [x])

    with patch.object(wire.Wire, "__init__", begin):
        yield


def piped(name: str, group: Group, watch: Watch) -> None:
    table, x = schedule(name, group.size, MICRO_BATCHES), torch.ones(2, 8)
    stages = {stage: nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for stage in table.holds(group.rank)}
    pipeline = Pipeline(table, stages, group, lambda out, target: (out - target).square().mean())
    with agreed(x), messages_aside(watch):
        before = watch.syncs
        for _ in range(2):
            pipeline.run([x.clone() for _ in range(MICRO_BATCHES)], [x] * MICRO_BATCHES)
        pipeline.evaluate([x.clone() for _ in range(MICRO_BATCHES)], [x] * MICRO_BATCHES)
    assert watch.syncs == before


@pytest.mark.parametrize("rank", [0, 3, 7])
@pytest.mark.parametrize("name", NAMES)
def test_a_pipeline_races_with_nothing(name: str, rank: int) -> None:
    """And its host waits for nothing. At the ends of a path that comes back there is little to wait for."""
    recorder = logged(lambda group, watch: piped(name, group, watch), rank)
    assert races(recorder.log) == []
    ends = {"result: wait_for"} if name in ("zb-v", "dualpipe", "dualpipe-v") and rank != 3 else set()
    assert needless(recorder) <= ends


def test_a_form_leaves_without_a_wait() -> None:
    """With `dynamic` it does so at every message."""

    def sent(group: Group, watch: Watch) -> None:
        works = Wire("activations", dynamic=True).send(group, torch.ones(3), 4)
        assert (len(works), watch.syncs) == (3, 0)

    logged(sent)
