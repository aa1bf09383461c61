"""The transport of one host: who gets it, tensors that peers read in place, memory that nobody leaves behind."""

import functools
import gc
import math
import mmap
import os
import random
import re
import resource
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import hypothesis
import pytest
import torch
import torch.distributed as dist
from hypothesis import strategies as st
from test_group import exact, given, reduced
from torch import Tensor

from refimpl import launch
from refimpl.comm import route, signals
from refimpl.comm.agree import Agreed, Transfer
from refimpl.comm.composed import Composed
from refimpl.comm.group import Group
from refimpl.comm.link import Link
from refimpl.comm.mapped import DATA, Own
from refimpl.comm.patience import Patience
from refimpl.comm.process_group import limit
from refimpl.comm.shared import Shared
from refimpl.comm.signals import SLOTS, Need, Watch
from refimpl.comm.tasks import Tasks
from refimpl.ranks.lost import RankLost

run = functools.partial(launch.run, device="cpu")
MESSAGE = (torch.float64, torch.bool, torch.uint8, torch.complex64, torch.float8_e4m3fn)

pytestmark = pytest.mark.skipif(bool(signals.unsupported()), reason=signals.unsupported())


def test_ranks_of_one_host_share_memory_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    def kinds() -> list[str]:
        group, some = Group.world(), dist.new_group([0, 2])
        kind = [type(group.transport).__name__]
        return [*kind, type(Group(some).transport).__name__] if group.rank != 1 else kind

    assert run(kinds, ranks=3) == [["Shared", "Shared"], ["Shared"], ["Shared", "Shared"]]
    monkeypatch.setenv("REFIMPL_TRANSPORT", "gloo")
    assert run(kinds, ranks=3) == [["Composed", "Composed"], ["Composed"], ["Composed", "Composed"]]
    monkeypatch.setenv("REFIMPL_TRANSPORT", "tcp")
    with pytest.raises(launch.RankError, match="REFIMPL_TRANSPORT must be gloo or shared, or not set, not 'tcp'"):
        run(kinds, ranks=3)


def test_all_ranks_take_gloo_when_one_of_them_cannot_share() -> None:
    def check() -> None:
        rank = dist.get_rank()
        elsewhere = route.host
        route.host = lambda: f"host {rank // 2}"
        assert type(Group.world().transport) is Composed
        os.environ["REFIMPL_TRANSPORT"] = "shared"
        with pytest.raises(RuntimeError, match="shared, but this group cannot share memory: its ranks are on several"):
            Group.world().all_reduce(torch.ones(1))
        route.host = elsewhere

        opens = route.of_peer
        if rank == 1:
            route.of_peer = lambda pid, descriptor, words: opens(0, descriptor, words)
        with pytest.raises(RuntimeError, match=r"shared, .*: rank 1 cannot map the memory of a peer: .*/proc/0/fd"):
            Group.world().all_reduce(torch.ones(1))
        route.of_peer = opens
        assert type(Group.world().transport) is Shared

    run(check, ranks=3)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_tensors_that_peers_read_in_place_may_be_written_as_soon_as_the_work_is_done(ranks: int) -> None:
    """Each round writes over what the last one read, at once: a peer that still read would get numbers of the next."""

    def check() -> None:
        group = Group.world()
        s = 5000
        x, out = group.empty(ranks * s, torch.float32), group.empty(ranks * s, torch.float32)
        mine = slice(group.rank * s, (group.rank + 1) * s)
        for turn in range(30):
            inputs = [given(100 * turn + r, ranks * s, torch.float32) for r in range(ranks)]
            own, total = inputs[group.rank], reduced(inputs, "mean")
            group.all_reduce(x.copy_(own), "mean")
            exact(x, total)
            group.reduce_scatter(x.copy_(own)[mine], x, "mean")
            exact(x[mine], total[mine])
            group.all_gather(out, x.copy_(own)[mine])
            exact(out, torch.cat([g[r * s : (r + 1) * s] for r, g in enumerate(inputs)]))
            group.all_to_all(out, x)
            exact(out, torch.cat([g[mine] for g in inputs]))
            group.broadcast(x, turn % ranks)
            exact(x, inputs[turn % ranks])
        assert group.scratch() == []  # nothing was copied on the way

    run(check, ranks=ranks)


def within_a_limit_on_files() -> tuple[bool, bool, list[str]]:
    """Runs on every rank: `ulimit -f` counts memory that is shared too."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    group, x = Group.world(), torch.ones(1000)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        group.all_reduce(x, "sum")
    return isinstance(group.transport, Shared), bool(x.eq(group.size).all()), [str(w.message) for w in said]


def test_a_limit_on_the_size_of_files_leaves_gloo_and_is_told() -> None:
    (*first, told), *others = launch.run(within_a_limit_on_files, ranks=2)
    assert (first, others) == ([False, True], [(False, True, [])])
    assert len(told) == 1
    assert re.search(r"speak gloo, slower than shared memory: rank 0 cannot make memory .*ulimit -f", told[0])


def test_nothing_is_gathered_whatever_the_default_device_is() -> None:
    def check() -> None:
        group, nothing = Group.world(transport="shared"), torch.empty(0)
        with torch.device("meta"):
            group.all_gather(nothing, nothing)

    run(check, ranks=2)


def test_every_dtype_travels() -> None:
    def check() -> None:
        group = Group.world()
        for dtype in MESSAGE:
            pieces = [torch.arange(r, r + 6).to(dtype) for r in range(3)]
            out = torch.zeros(18).to(dtype)
            group.all_gather(out, pieces[group.rank])
            exact(out.view(torch.uint8), torch.cat([p.view(torch.uint8) for p in pieces]))
            group.all_to_all(out[:6], pieces[group.rank])
            exact(out[:6].view(torch.uint8), torch.cat([p.chunk(3)[group.rank].view(torch.uint8) for p in pieces]))

    run(check, ranks=3)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_more_calls_under_way_than_there_are_slots_waited_for_in_another_order_on_each_rank(ranks: int) -> None:
    def check() -> None:
        group = Group.world()
        count = 3 * signals.SLOTS
        inputs = [given(group.rank + ranks * i, 40, torch.float32) for i in range(count)]
        works = []
        for i, x in enumerate(inputs):
            mapped = group.empty(40, torch.float32)
            inputs[i] = mapped.copy_(x) if i % 2 else x
            works.append(group.all_reduce(inputs[i], async_op=True))
        for i in range(count):
            works[i if group.rank % 2 else count - 1 - i].wait()
        for i, x in enumerate(inputs):
            exact(x, reduced([given(r + ranks * i, 40, torch.float32) for r in range(ranks)], "sum"))

    run(check, ranks=ranks)


def test_two_groups_of_the_same_ranks_and_one_of_some_do_not_mix() -> None:
    def check() -> None:
        one, two = Group.world(), Group.world()
        some = Group(dist.new_group([0, 2, 3])) if one.rank != 1 else None
        a, b, c = torch.ones(9), torch.full((9,), 10.0), torch.full((9,), 100.0)
        works = [group.all_reduce(x, async_op=True) for group, x in ((one, a), (two, b), (some, c)) if group]
        for work in works:  # of different groups in one order on every rank
            work.wait()
        exact(a, torch.full((9,), 4.0))
        exact(b, torch.full((9,), 40.0))
        exact(c, torch.full((9,), 300.0 if some else 100.0))
        if some:
            assert some.size == 3
            for root in range(3):
                some.broadcast(c if some.rank == root else c.zero_(), root)
                assert c[0].item() == 300
        one.barrier()

    run(check, ranks=4)


def test_what_one_rank_never_waits_for_does_not_hold_up_the_others() -> None:
    def check() -> float:
        group = Group.world()
        x = torch.full((4,), float(group.rank))
        group.broadcast(x, 0, async_op=group.rank == 0)  # rank 0 goes home
        return x.sum().item()

    assert run(check, ranks=3) == [0.0, 0.0, 0.0]


def test_sizes_that_differ_are_an_error_also_where_nobody_compares_calls() -> None:
    def check() -> None:
        group = Group.world()
        x = torch.ones(4 + group.rank)
        with pytest.raises(RuntimeError, match=r"rank \d \(process \d+\) shows \d+ bytes where rank \d .* expects"):
            group.broadcast(x, 0) if group.rank else group.all_gather([torch.ones(4), torch.ones(4)], x)

    with launch.World(2, device="cpu", compare=False) as world:
        world.call(check)


def test_a_peer_that_dies_is_named_by_whoever_waits_for_it() -> None:
    def check() -> None:
        group = Group.world()
        x = torch.ones(4)
        group.all_reduce(x)  # the ranks have met
        if group.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            group.all_reduce(x, tag="loss")
        except RankLost as error:
            launch.report(str(error))
            raise

    said: list[str] = []
    with pytest.raises(launch.RankDied, match="rank 1 was killed by SIGKILL"):
        run(check, ranks=2, on_report=lambda rank, text: said.append(text))
    assert all("waits in vain in all_reduce (sum) of 4 float32, tag 'loss'" in text for text in said)
    assert all("remote process has exited: rank 1" in text for text in said)


def test_who_asks_around_meanwhile_is_told_that_a_peer_has_died() -> None:
    class Gone:
        def met(self, need: Need) -> bool:
            return False

        def wait(self, need: Need, seconds: float, looks: int) -> None:
            raise RuntimeError("remote process has exited: rank 1")

    gone: Any = Gone()
    (task,) = Tasks(gone).begin(iter([Need(1, 0, 1)]))
    patience = Patience(stall=0.01)
    patience.ask.append(lambda number: pytest.fail("the death was taken for a limit that was over"))
    with pytest.raises(RuntimeError, match="has exited: rank 1"):
        patience.wait(task, 1, lambda _: None)


class Never:
    """A peer that lives, and answers only the `answers`th time that somebody waits for it."""

    def __init__(self, answers: float = math.inf) -> None:
        self.waits, self.answers = 0, answers

    def met(self, need: Need) -> bool:
        return self.waits >= self.answers

    def wait(self, need: Need, seconds: float, looks: int) -> None:
        self.waits += 1


@pytest.mark.parametrize("waits", ["at once", "in pieces"])
def test_a_peer_that_hangs_is_waited_for_as_long_as_the_process_groups_timeout(waits: str) -> None:
    never: Any = Never()
    (task,) = Tasks(never, timedelta(0)).begin(iter([Need(1, 0, 1)]))
    agreed = Agreed(None, None, Patience(), 0, "all_reduce of 4 float32", "loss")
    with pytest.raises(RankLost, match=r"waits in vain in all_reduce of 4 float32, tag 'loss'.*or is stuck.*timed out"):
        Transfer(task, agreed, 1 if waits == "in pieces" else None).wait()
    assert task.is_completed()


def test_a_job_says_how_long_that_is() -> None:
    def check() -> None:
        here, job = Group.world().transport, limit()
        assert isinstance(here, Shared)
        assert job is not None
        assert here.tasks.longest == job.total_seconds() > 0

    run(check, ranks=2)


def test_a_late_message_is_told_as_a_late_collective_is(capsys: pytest.CaptureFixture[str]) -> None:
    """Of a pipeline the ranks wait for each other in nothing else."""
    third: Any = Never(answers=3)
    (task,) = Tasks(third).begin(iter([Need(1, 0, 1)]))
    patience = Patience(again=0, late=0)
    patience.ask.append(lambda number: pytest.fail("a message has no number"))
    Transfer(task, Agreed(None, None, patience, 2, "recv of 4 float32 from 1", ""), None).wait()
    told = capsys.readouterr().err
    assert told.count("rank 2 has waited 0 s for other ranks in recv of 4 float32 from 1") == 1
    assert "It needs both ranks." in told


@pytest.mark.parametrize("posts", [True, False])
def test_a_peer_may_end_once_it_has_posted(posts: bool) -> None:
    """Its word comes between this rank's last look and its look at the process."""
    ended, mine = subprocess.Popen([sys.executable, "-c", ""]), Own(1)
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)  # its number stays its own until it is waited for
    looks = iter([0, int(posts)])
    words = mock.MagicMock(__getitem__=lambda *_: next(looks))
    peer: Any = SimpleNamespace(address=mine.address, words=words)
    watch = Watch([peer], [ended.pid], ["rank 1"])
    with nullcontext() if posts else pytest.raises(RuntimeError, match="has exited: rank 1"):
        watch.wait(Need(0, 0, 1), 0.01, looks=0)
    ended.wait()


def test_blocks_serve_again_whatever_sizes_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each length had blocks of its own: 11,494 growing tensors used up the file, and the next one came back short."""
    monkeypatch.setattr("refimpl.comm.mapped.SPACE", DATA + 64 * 2**20)
    mine = Own(1)
    for pages in range(1, 1024):
        assert mine.empty(pages * mmap.PAGESIZE - 3, torch.uint8).numel() == pages * mmap.PAGESIZE - 3
    with pytest.raises(MemoryError, match=r"no room for 67108864 bytes in the .* that ranks share: free tensors, or"):
        mine.empty(2**24, torch.float32)


@hypothesis.given(st.lists(st.integers(1, 40_000), max_size=30))
def test_blocks_that_are_held_share_no_byte(sizes: list[int]) -> None:
    mine = Own(1)
    blocks = [mine.empty(size, torch.uint8).fill_(i) for i, size in enumerate(sizes)]
    assert all(bool((block == i).all()) for i, block in enumerate(blocks))


def tensors() -> int:
    return sum(isinstance(one, Tensor) for one in gc.get_objects())


def test_calls_of_many_sizes_leave_nothing_small_between_the_large_blocks_of_a_script() -> None:
    """Views kept of the peers' memory did: with 1,000 sizes the allocator's free blocks grew to 1.3 GB a rank."""

    def check() -> None:
        group, before = Group.world(), tensors()
        for size in range(1, 100):
            group.all_reduce(torch.ones(size))
            group.all_to_all(torch.empty(2 * size), torch.ones(2 * size))
        assert tensors() < before + 10  # buffers of copies

    run(check, ranks=2)


def test_a_hang_names_the_call_and_the_line() -> None:
    def check() -> None:
        group = Group.world()
        if group.rank == 0:
            group.reduce_scatter(torch.ones(2), torch.ones(4))

    with pytest.raises(launch.RankTimeout, match=r"rank 0 waits in reduce_scatter at .*test_shared.py:\d+: group.red"):
        run(check, ranks=2, timeout=3)


def settle() -> None:
    """Until nothing more goes: the first round may free only what holds a graph, and the second the graph's memory."""
    while gc.collect():
        pass


def files() -> list[str]:
    """What this process has mapped or open of a shared file. Nothing on a system that has none."""
    if signals.unsupported():
        return []
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:refimpl" in line]
    links = [os.readlink(file) for file in Path("/proc/self/fd").iterdir() if file.is_symlink()]
    return mapped + [link for link in links if "memfd:refimpl" in link or "pidfd" in link]


def test_a_group_that_goes_takes_its_mappings_along() -> None:
    def check() -> None:
        settle()  # what the last test left
        before = files()
        group = Group.world()
        kept: Tensor | None = group.empty(1000, torch.float32).fill_(3)
        group.all_reduce(torch.ones(100_000))
        group.all_reduce(kept, async_op=True).wait()
        assert len(files()) > len(before)
        del group
        exact(kept, torch.full((1000,), 6.0))  # memory outlives the group as long as a tensor is there
        kept = None
        assert files() == before

    run(check, ranks=2)


def test_memory_goes_back_to_the_system_with_its_tensor() -> None:
    def check() -> None:
        group = Group.world()
        assert isinstance(group.transport, Shared)
        held = lambda: 512 * os.fstat(group.transport.own.descriptor).st_blocks  # noqa: E731
        before = held()
        x = group.empty(1_000_000, torch.float32).fill_(1)
        view = x[5:10]
        del x
        assert held() - before >= 4_000_000
        del view
        assert held() == before
        again = group.empty(1_000_000, torch.float32)
        assert not again.any()  # new pages
        assert again.untyped_storage().nbytes() == 4_000_000

    run(check, ranks=2)


def test_copies_are_kept_and_counted() -> None:
    def check() -> None:
        group = Group.world()
        mine = group.empty(4000, torch.float32).fill_(1)
        group.reduce_scatter(torch.empty(1000), mine)
        group.all_to_all(torch.empty(4000), mine)
        group.all_gather(torch.empty(16_000), mine)
        assert group.scratch() == []  # peers have read it where it lies
        for _ in range(5):
            group.all_gather(torch.empty(4000), torch.ones(1000))
            group.barrier()  # then all have read it
        assert [t.numel() for t in group.scratch()] == [4000]

    run(check, ranks=4)


def test_ranks_that_are_killed_leave_nothing_behind() -> None:
    def check() -> None:
        group = Group.world()
        group.all_reduce(group.empty(1000, torch.float32).fill_(1))
        assert any("(deleted)" in line for line in files())
        launch.report("here")
        os.kill(os.getpid(), signal.SIGKILL)

    named = set(os.listdir("/dev/shm"))
    with pytest.raises(launch.RankDied):
        run(check, ranks=3)
    assert not [name for name in set(os.listdir("/dev/shm")) - named if "refimpl" in name]


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_may_wait_at_different_places_round_a_barrier(ranks: int) -> None:
    """Rank 0 comes last and waits for a sum, of which the others make their parts while they meet."""

    def work() -> list[float]:
        group, store, sums = Group.world(), dist.distributed_c10d._get_default_store(), []
        assert isinstance(group.transport, Shared)
        for turn, meet in enumerate((group.barrier, lambda: group.all_gather_object(None))):
            if group.rank == 0:
                store.wait([f"has begun {turn} {rank}" for rank in range(1, group.size)])
            total = torch.full((3,), 1.0 + group.rank)
            adding = group.all_reduce(total, async_op=True)
            store.set(f"has begun {turn} {group.rank}", "")
            if group.rank == 0:
                adding.wait()
            meet()
            adding.wait()
            assert not group.transport.tasks.advance()  # nothing is left under way
            sums.append(total.mean().item())
        return sums

    expected = ranks * (ranks + 1) / 2
    assert run(work, ranks=ranks, timeout=20) == [[expected] * 2] * ranks


def elsewhere(what: str, group: Group) -> Callable[[], object]:
    """What rank 0 does when it has a sum, and the others before they look after it."""
    other, mine = Group(dist.new_group()), torch.full((3,), 1.0 + group.rank)
    over_gloo, store = Group(dist.new_group(), transport="gloo"), dist.distributed_c10d._get_default_store()
    assert isinstance(group.transport, Shared)  # which is a meeting of all
    assert isinstance(other.transport, Shared)

    def message(way: Group) -> None:
        if group.rank < 2:
            way.send(mine, 1) if group.rank == 0 else way.recv(mine, 0)

    return {
        "message": lambda: message(group),
        "message of another group": lambda: message(other),
        "gloo": lambda: over_gloo.all_reduce(mine),
        "torch": lambda: dist.all_reduce(mine),
        "barrier": other.barrier,
        "host": lambda: store.set("summed", "") if group.rank == 0 else store.wait(["summed"]),
    }[what]


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("what", ["message", "message of another group", "gloo", "torch", "barrier", "host"])
def test_a_collective_goes_on_while_a_rank_waits_for_something_else(what: str, ranks: int) -> None:
    """The others' hands are needed for the sum. Over gloo and NCCL threads of the library go on with it."""

    def check() -> None:
        group, store = Group.world(), dist.distributed_c10d._get_default_store()
        total, meet = torch.full((5,), group.rank + 1.0), elsewhere(what, group)
        if group.rank == 0:
            store.wait([f"begun {rank}" for rank in range(1, ranks)])
        work = group.all_reduce(total, async_op=True)
        if group.rank == 0:
            work.wait()
        else:
            store.set(f"begun {group.rank}", "")
        meet()
        work.wait()
        assert total.tolist() == [sum(range(ranks + 1))] * 5

    run(check, ranks=ranks, timeout=30)


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_gather_goes_on_while_a_rank_waits_for_what_a_thread_does(ranks: int) -> None:
    """Over a slow link memory is gathered by the rank's own thread, and an all-reduce goes by itself, over gloo.

    Rank 0 waits for the sum first. The others begin it when all have read what they show, rank 0 too.
    """

    def check() -> list[float]:
        group, store = Group.world(link=Link(1e9, 1e-4)), dist.distributed_c10d._get_default_store()
        total, whole = torch.ones(3), group.empty(2 * group.size, torch.float32)
        mine = whole.view(-1, 2)[group.rank].fill_(group.rank)
        group.all_reduce(torch.ones(1), async_op=True).wait()  # its process group is there
        if group.rank:
            store.wait(["begun"])
        gathering = group.all_gather(whole, mine, async_op=True)
        if group.rank:
            gathering.wait()
        summing = group.all_reduce(total, async_op=True)
        if not group.rank:
            store.set("begun", "")
        summing.wait()
        gathering.wait()
        return [*whole[::2].tolist(), total.sum().item()]

    assert run(check, ranks=ranks, timeout=20) == [[*map(float, range(ranks)), 3.0 * ranks]] * ranks


def test_the_helper_ends_with_its_group() -> None:
    def check() -> int:
        group = Group(dist.new_group())
        work = group.all_reduce(torch.ones(5), async_op=True)
        helpers = [thread for thread in threading.enumerate() if thread.name == "refimpl-helper"]
        work.wait()
        del group, work
        gc.collect()
        for thread in helpers:
            thread.join(10)
            assert not thread.is_alive()
        return len(helpers)

    assert sum(run(check, ranks=3)) >= 1, "a rank that came first has one"


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_rank_far_ahead_does_not_use_a_place_that_it_still_needs(ranks: int) -> None:
    """More collectives at once than a channel has slots, of two sizes, at every rank's own pace."""

    def work() -> bool:
        group, pace = Group.world(), random.Random(dist.get_rank())
        for _ in range(10):
            under_way = []
            for k in range(3 * SLOTS):
                mine = torch.full((27 if k % 3 else 33,), 1000.0 * group.rank + k)
                whole = torch.empty(len(mine) * group.size)
                for _ in range(pace.randrange(3)):
                    torch.randn(2000).sum()
                under_way.append((k, mine, whole, group.all_gather(whole, mine, async_op=True)))
            for k, mine, whole, gathering in under_way:
                gathering.wait()
                expected = torch.arange(group.size).repeat_interleave(len(mine)) * 1000.0 + k
                if not torch.equal(whole, expected):
                    return False
        return True

    assert run(work, ranks=ranks) == [True] * ranks


def test_an_all_to_all_waits_for_those_alone_that_have_something_for_it() -> None:
    """A ring 0 -> 1 -> 2 -> 0: rank 1 has what it needs before rank 2 has begun."""

    def work() -> list[float]:
        group = Group.world()
        group.all_reduce(torch.zeros(1))  # they have met
        rank, x, out = group.rank, torch.full((5,), float(group.rank)), torch.empty(5)
        go_on = torch.zeros(1)
        if rank == 2:
            dist.recv(go_on, 1)
        to, source = [0, 0, 0], [0, 0, 0]
        to[(rank + 1) % 3] = source[(rank - 1) % 3] = 5
        group.all_to_all(out, x, in_splits=to, out_splits=source)
        if rank == 1:
            dist.send(go_on, 2)
        return out.tolist()

    assert run(work, ranks=3) == [[float((rank - 1) % 3)] * 5 for rank in range(3)]


def test_a_group_may_be_made_by_some_ranks_alone_and_two_may_talk_first() -> None:
    def work() -> float:
        rank = dist.get_rank()
        lonely = Group.world() if rank == 0 else None
        x, group = torch.full((1,), float(rank)), lonely or Group.world()
        if rank < 2:
            other = torch.empty(1)
            group.send_recv(x, 1 - rank, other, 1 - rank)
            x += other
        group.all_reduce(x)
        return x.item()

    assert run(work, ranks=3) == [4.0] * 3


def messages() -> None:
    """Runs on every rank: more messages than slots, of several sizes and dtypes, to each other rank and from it."""
    group = Group.world()
    group.share_messages()
    sizes = [1, 0, 5000, 3] * 6  # 24 messages, 16 slots
    dtypes = [torch.float32, torch.bfloat16, torch.int64] * 8
    works, got = [], {}
    for number, size in enumerate(sizes):
        for peer in (m for m in range(group.size) if m != group.rank):
            got[peer, number] = torch.empty(size, dtype=dtypes[number])
            works.append(group.recv(got[peer, number], peer, async_op=True))
    for number, size in enumerate(sizes):
        for peer in (m for m in range(group.size) if m != group.rank):
            x = torch.full(
                (size,), 100 * group.rank + number, dtype=(torch.float32, torch.bfloat16, torch.int64)[number % 3]
            )
            group.send(x, peer)  # is over when it is copied
            x.zero_()
        group.all_reduce(torch.ones(3))  # collectives in between
    for work in works:
        work.wait()
    for (peer, number), x in got.items():
        assert torch.equal(x, torch.full_like(x, 100 * peer + number))
    mine = group.empty(4, torch.float32).fill_(group.rank)  # read where it lies
    theirs = torch.empty(4)
    group.send_recv(mine, (group.rank + 1) % group.size, theirs, (group.rank - 1) % group.size)
    assert theirs.eq((group.rank - 1) % group.size).all()


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_messages_between_two_go_through_memory_too(ranks: int) -> None:
    run(messages, ranks=ranks)


def wrong_size() -> None:
    group = Group.world()
    group.share_messages()
    x = torch.ones(3 + group.rank)
    group.send(x, 1) if group.rank == 0 else group.recv(x, 0)


def test_a_message_of_another_size_is_an_error() -> None:
    with pytest.raises(launch.RankError, match=r"what one rank sends is not what the other waits for|shows 12 bytes"):
        run(wrong_size, ranks=2)
