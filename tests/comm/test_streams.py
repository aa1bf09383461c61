"""Who waits for whom when communication has a stream of its own: on paper (see `stream_log`), and on a GPU."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import paper
import pytest
import torch
import torch.distributed as dist
from stream_log import COMPUTE, Kernel, Record, Recorder, Wait, Watch, races
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.testing._internal.distributed.fake_pg import FakeStore

from refimpl import launch
from refimpl.comm.collectives import Scratch
from refimpl.comm.group import Group
from refimpl.comm.process_group import ControlLine, anew, backend_of, device_of
from refimpl.comm.streams import CudaStreams, Streams, streams_of, told
from refimpl.comm.work import Work
from refimpl.engine.engine import Engine
from refimpl.gpu.twins import Twins
from refimpl.measure.ledger import Ledger

run = functools.partial(launch.run, device="cpu")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
LANE = 1


@pytest.fixture
def fake() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    yield
    dist.destroy_process_group()


def on_paper(**options: Any) -> tuple[Recorder, Group]:
    recorder = Recorder()
    return recorder, Group(dist.group.WORLD, streams=recorder, **options)


def story(recorder: Recorder) -> list[tuple[str, int]]:
    words = {Record: "record", Wait: "wait", Kernel: "kernel"}
    return [(words[type(e)], e.stream) for e in recorder.log if type(e) in words]


def test_the_lane_follows_the_caller_and_the_caller_follows_the_result(fake: None) -> None:
    recorder, group = on_paper()
    x = torch.ones(8)
    with Watch(recorder):
        work = group.all_reduce(x, async_op=True)
        begun = len(story(recorder))
        work.wait()
    expected = [("record", COMPUTE), ("wait", LANE), ("kernel", LANE), ("record", LANE), ("wait", COMPUTE)]
    assert story(recorder) == expected
    assert begun == 4


def test_whoever_waits_is_ordered_also_the_second(fake: None) -> None:
    recorder, group = on_paper()
    other = recorder.new()
    work = group.all_reduce(torch.ones(8), async_op=True)
    work.wait()
    with recorder.use(other):
        work.wait()
    assert story(recorder)[-2:] == [("wait", COMPUTE), ("wait", other)]


def test_with_nothing_for_the_host_to_wait_for_all_steps_are_queued_at_once(fake: None) -> None:
    """Two transfers and the adds between them, all on the lane; the ledger's end is when somebody waits."""
    recorder, group = on_paper(deterministic=True)
    x = torch.ones(8)
    with Watch(recorder):
        work = group.all_reduce(x, async_op=True)
    assert work.is_done
    assert {stream for word, stream in story(recorder) if word == "kernel"} == {LANE}
    assert [e.phase for e in group.ledger.events] == ["start"]
    work.wait()
    work.wait()
    assert [e.phase for e in group.ledger.events] == ["start", "end"]


def test_a_step_with_transfers_waits_for_its_turn() -> None:
    told: list[str] = []
    transfer = SimpleNamespace(wait=lambda: told.append("arrived"))
    names = {"queued": [], "started": [transfer], "last": []}
    steps = iter([lambda name=name: told.append(name) or names[name] for name in names])
    work = Work(steps, waited=lambda _: told.append("waited"))  # type: ignore[arg-type]
    assert (told, work.is_done) == (["queued", "started"], False)
    work.advance()
    assert (told, work.is_done) == (["queued", "started", "arrived", "last"], True)
    work.wait()
    assert told == ["queued", "started", "arrived", "last", "waited"]


@pytest.mark.parametrize("held", [True, False])
def test_what_travels_is_kept_until_somebody_waits(held: bool, fake: None) -> None:
    """A tensor that the caller lets go of would be the next tensor's memory while it is read."""
    recorder, group = on_paper()
    with Watch(recorder):
        x = torch.ones(8)
        work = group.all_reduce(x, async_op=True)
        if not held:
            work._holds = ()
        del x
        work.wait()
    found = races(recorder.log)
    assert found == ([] if held else ["c10d.allreduce_.default on stream 1, free on stream 0"])


@pytest.mark.parametrize("ends", [True, False])
def test_a_work_that_nobody_waits_for_is_followed_if_it_ends(ends: bool, fake: None) -> None:
    recorder, group = on_paper()
    work = group.all_reduce(torch.ones(8), async_op=True)
    begun = len(story(recorder))
    if not ends:
        work.leave()
    del work
    assert story(recorder)[begun:] == ([("record", LANE), ("wait", COMPUTE)] if ends else [])


def test_a_buffer_may_go_from_stream_to_stream() -> None:
    recorder = Recorder()
    side = recorder.new()
    scratch = Scratch(recorder)
    like = torch.empty(0)
    with Watch(recorder):
        first = scratch.take(8, like)
        first.fill_(1)
        scratch.give(first)
        with recorder.use(side):
            second = scratch.take(8, like)
            second.fill_(2)
            scratch.give(second)
        third = scratch.take(100, like)  # too long: the small one is dropped
        third.fill_(3)
        del first, second
    assert races(recorder.log) == []
    waits = [at for at, e in enumerate(recorder.log) if isinstance(e, Wait)]
    assert len(waits) == 2
    assert all(races(recorder.log, without={at}) for at in waits)


@pytest.mark.parametrize("how", ["too short", "trimmed", "left to its holder"])
def test_a_buffer_that_is_let_go_is_memory_of_the_stream_that_allocated_it(how: str) -> None:
    """And its last user is another stream."""
    recorder = Recorder()
    side, scratch, like = recorder.new(), Scratch(recorder), torch.empty(0)
    with Watch(recorder):
        first = scratch.take(8, like)
        first.fill_(1)
        scratch.give(first)
        del first
        with recorder.use(side):
            second = scratch.take(8, like)
            second.fill_(2)
            scratch.give(second, keep=how != "left to its holder")
            del second
            if how == "too short":
                scratch.take(100, like).fill_(3)
            elif how == "trimmed":
                scratch.trim()
    assert races(recorder.log) == []


def test_a_cpu_has_no_streams_and_its_group_no_lane() -> None:
    streams = streams_of(torch.device("cpu"))
    with streams.use(streams.new()):
        streams.wait(streams.record())
    assert (streams.new(), streams.current(), streams.record()) == (None, None, None)
    assert Group(None).transport.lane is None
    assert run(lambda: Group.world().transport.lane, ranks=2) == [None, None]
    with pytest.raises(RuntimeError, match="the host's clock is true there"):
        streams.ms(None, None)


def test_times_on_the_lane_are_between_the_first_step_and_the_last(fake: None) -> None:
    class Timed(Recorder):
        def ms(self, first: int, last: int) -> float:
            return float(last - first)

    recorder, ledger = Timed(), Ledger(timed=True)
    group = Group(dist.group.WORLD, ledger, streams=recorder)
    works = [group.all_reduce(torch.ones(8), async_op=True) for _ in range(2)]
    assert ledger.device_ms(recorder.ms) == {}
    for work in works:
        work.wait()
    # The events of a call: asked, begun, done.
    assert [(w.begun_at, w.done_at) for w in works] == [(2, 3), (5, 6)]
    assert ledger.device_ms(recorder.ms) == {0: 1.0, 1: 1.0}


def test_the_library_is_the_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_backend_config", lambda handle: "cpu:gloo,cuda:nccl")
    handle: Any = SimpleNamespace(bound_device_id=torch.device("cuda:1"))
    assert backend_of(handle, torch.device("cuda:1")) == "nccl"
    assert backend_of(handle, torch.device("cpu")) == "gloo"
    assert backend_of(None, torch.device("cpu")) == "none"
    with pytest.raises(RuntimeError, match=r"has no library for tensors on xpu.*set REFIMPL_DEVICE"):
        backend_of(handle, torch.device("xpu"))
    monkeypatch.delenv("REFIMPL_DEVICE", raising=False)
    assert device_of(handle) == torch.device("cuda:1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # also on a machine that has one
    assert device_of(None) == device_of(SimpleNamespace(bound_device_id=None)) == torch.device("cpu")  # type: ignore[arg-type]
    monkeypatch.setenv("REFIMPL_DEVICE", "cuda:0")
    assert device_of(handle) == torch.device("cuda:0")


@pytest.mark.parametrize(
    ("libraries", "current", "local_rank", "device"),
    [
        ("cuda:nccl", 3, "1", "cuda:3"),
        ("cuda:nccl", 0, "1", "cuda:1"),  # nobody called torch.cuda.set_device
        ("cpu:gloo,cuda:nccl", 0, "5", "cuda:1"),  # this process sees four
        ("cpu:gloo,cuda:gloo", 3, "1", "cpu"),
    ],
)
def test_a_group_that_is_bound_to_no_device_is_on_the_gpu_of_its_process(
    libraries: str, current: int, local_rank: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `init_process_group("nccl")` makes it."""
    monkeypatch.delenv("REFIMPL_DEVICE", raising=False)
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    monkeypatch.setattr(dist, "get_backend_config", lambda handle: libraries)
    for name, value in {"is_available": True, "device_count": 4, "current_device": current}.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    handle: Any = SimpleNamespace(bound_device_id=None)
    assert device_of(handle) == torch.device(device)


def test_a_thread_gives_the_process_no_context_on_the_first_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is current where it begins; the end of `torch.cuda.stream` would choose it again, and so make one."""
    current, made = [0], {3}

    @contextmanager
    def device(chosen: torch.device) -> Iterator[None]:
        before, current[0] = current[0], chosen.index
        yield
        current[0] = before  # a context is not made for that

    @contextmanager
    def stream(chosen: Any) -> Iterator[None]:
        before, current[0] = current[0], chosen
        yield
        current[0] = before
        made.add(before)

    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    streams = CudaStreams(torch.device("cuda:3"))
    for first in (0, 3):
        current[0] = first
        with streams.use(3):
            assert current == [3]
        assert (current, made) == ([first], {3})


@pytest.mark.parametrize("ranks", [2, 3])
def test_objects_and_barriers_of_nccl_go_over_a_gloo_group_of_the_same_ranks(ranks: int) -> None:
    def check() -> tuple[bool, bool, str, list[int]]:
        assert dist.group.WORLD is not None
        line, own = ControlLine(dist.group.WORLD, "nccl"), ControlLine(dist.group.WORLD, "gloo")
        objects = [0] * ranks
        dist.all_gather_object(objects, dist.get_rank(), group=line.handle)
        dist.barrier(line.handle)
        first = line.handle.group_name
        assert ControlLine(dist.group.WORLD, "nccl").handle.group_name == first, "one for all who use the group"
        return first != own.handle.group_name, line.handle.group_name == first, dist.get_backend(line.handle), objects

    assert run(check, ranks=ranks) == [(True, True, "gloo", list(range(ranks)))] * ranks


def test_a_group_that_is_made_later_waits_as_long_as_the_job_says() -> None:
    """`join(timeout=...)`; barriers and objects beside NCCL, whose limit is 10 minutes, half an hour at least."""

    def check() -> list[int]:
        world = dist.group.WORLD
        assert world is not None
        found = []
        for said in (timedelta(minutes=10), timedelta(hours=5)):
            distributed_c10d._set_pg_timeout(said, world)
            job = anew([[0, 1]])
            made = job, anew([[dist.get_rank()]]), ControlLine(job, "nccl").handle
            found += [group._get_backend(torch.device("cpu")).options._timeout for group in made]
        return [round(limit.total_seconds()) for limit in found]  # torch 2.14 loses 2 ms of five hours on the way

    short, long, line = 10 * 60, 5 * 3600, 30 * 60
    assert run(check, ranks=2) == [[short, short, line, long, long, long]] * 2


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_all_ranks_send_and_receive_at_once(ranks: int) -> None:
    def check() -> tuple[list[float], dict[str, int]]:
        group = Group.world()
        found = []
        for hop in range(1, ranks):
            out = torch.empty(1000)
            group.send_recv(
                torch.full((1000,), float(group.rank)), (group.rank + hop) % ranks, out, (group.rank - hop) % ranks
            )
            found.append(out.unique().item())
        assert group.ledger.open_calls() == []
        return found, group.ledger.sent_bytes()

    for rank, (found, sent) in enumerate(run(check, ranks=ranks)):
        assert found == [(rank - hop) % ranks for hop in range(1, ranks)]
        assert sent == {"send": 4000 * (ranks - 1), "recv": 0}


@pytest.mark.parametrize("ranks", [2, 3])
def test_an_exchange_goes_on_while_its_rank_does_something_else(ranks: int) -> None:
    def check() -> tuple[list[float], list[tuple[str, str]]]:
        group = Group.world()
        right, left = (group.rank + 1) % ranks, (group.rank - 1) % ranks
        outs = [torch.empty(1000) for _ in range(2)]
        works = [
            group.send_recv(torch.full((1000,), 10.0 * k + group.rank), right, out, left, async_op=True)
            for k, out in enumerate(outs)
        ]
        group.ledger.mark("compute")
        for work in works:
            work.wait()
        return [out.unique().item() for out in outs], [(e.phase, e.op) for e in group.ledger.events]

    both = [("start", "send"), ("start", "recv")]
    over = [("end", "send"), ("end", "recv")]
    for rank, (found, events) in enumerate(run(check, ranks=ranks)):
        assert found == [(rank - 1) % ranks, 10.0 + (rank - 1) % ranks]
        assert events == both * 2 + [("mark", "compute")] + over * 2


def test_send_recv_refuses_what_cannot_be() -> None:
    def check() -> None:
        group = Group.world()
        x, out = torch.ones(4), torch.empty(4)
        with pytest.raises(ValueError, match="send_recv: to=2, but this group has 2 ranks"):
            group.send_recv(x, 2, out, 1 - group.rank)
        with pytest.raises(ValueError, match=f"send_recv: source={group.rank} is this rank itself"):
            group.send_recv(x, 1 - group.rank, out, group.rank)
        with pytest.raises(ValueError, match=r"send_recv: out .* is not contiguous"):
            group.send_recv(x, 1 - group.rank, torch.empty(4, 2)[:, 0], 1 - group.rank)

    run(check, ranks=2)


class Feeding:
    """As an engine whose model gives back what it is given."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __call__(self, x: Tensor) -> Tensor:
        return x


def fed(group: Group, recorder: Recorder, watch: Watch) -> None:
    x, engine = torch.arange(3.0), Feeding(group.device)
    watch.asked.clear()
    there = Engine._feed(engine, iter([x]))  # type: ignore[arg-type]
    x.zero_()  # as who reads the next batch into the same memory
    numbers = told([1, 2], torch.int64, group.device)
    assert (there.device, numbers.device) == (group.device, group.device)
    assert not watch.asked
    assert (there.tolist(), numbers.tolist()) == ([0.0, 1.0, 2.0], [1, 2])


@pytest.mark.xdist_group("pretend")
def test_a_batch_travels_without_a_wait(on_paper: launch.World) -> None:
    """The host would wait for all that is queued, once a micro-batch."""
    assert on_paper.call(paper.seen, fed)[0].races == []


@pytest.mark.gpu
@needs_gpu
def test_on_a_gpu_the_result_is_waited_for_and_the_host_is_not() -> None:
    device = torch.device("cuda")
    streams: Streams = CudaStreams(device)
    ledger = Ledger(timed=True)
    slow = functools.partial(torch.cuda._sleep, 50_000_000)
    group = Group(None, ledger, device, streams=streams, transport=Twins(1, 4, streams, slow))
    x = torch.zeros(1 << 20, device=device)
    for turn in range(2):  # a kernel's first launch loads it, for which the host may wait
        torch.cuda.synchronize()
        slow()
        x.fill_(3)
        done = torch.cuda.Event()
        group.all_reduce(x, "mean", async_op=True).wait()
        y = x + 1
        done.record()
        assert turn == 0 or not done.query()  # all of it is queued, and the host is here
        assert torch.equal(y, torch.full_like(y, 4))
    assert min(ledger.device_ms(streams.ms).values()) > 0


def swapped() -> list[float]:
    """Not inside the test, whence it could travel only where cloudpickle is."""
    group = Group.world()
    x, out = torch.full((4,), float(group.rank), device=group.device), torch.empty(4, device=group.device)
    group.send_recv(x, 1 - group.rank, out, 1 - group.rank)
    return out.tolist()


@pytest.mark.gpu
@needs_gpu
def test_ranks_that_share_a_gpu_send_and_receive() -> None:
    assert launch.run(swapped, ranks=2, device="cuda") == [[1.0] * 4, [0.0] * 4]
