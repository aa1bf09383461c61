"""Ranks that do not make the same call are told so before anything is sent, each call with its line and size."""

import functools
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from pairs import pairwise
from worlds import LOOPBACK, NEAR

from refimpl import launch
from refimpl.comm.board import KEPT, Board, Call, CollectiveMismatch, Records
from refimpl.comm.group import Group

run = functools.partial(launch.run, device="cpu")
ROOT = Path(__file__).parents[2]


def here(fn: Callable[..., object], source: str) -> str:
    """ "file:line" of the one line of fn that contains source."""
    lines, first = inspect.getsourcelines(fn)
    (offset,) = [i for i, line in enumerate(lines) if source in line]
    return f"{__file__}:{first + offset}"


def mismatch(op: str) -> None:
    """Rank 0 brings twice as much as the others, or another dtype, or calls something else."""
    group = Group.world()
    first, n = group.rank == 0, group.size
    k = 20 if first else 10
    if op == "all_reduce":
        group.all_reduce(torch.ones(k), tag="mine")
    elif op == "all_gather":
        group.all_gather(torch.empty(k * n), torch.ones(k))
    elif op == "reduce_scatter":
        group.reduce_scatter(torch.empty(k), torch.ones(k * n))
    elif op == "all_to_all":
        group.all_to_all(torch.empty(k * n), torch.ones(k * n))
    elif op == "broadcast longer":
        group.broadcast(torch.ones(k))
    elif op == "broadcast shorter":
        group.broadcast(torch.ones(k), root=n - 1)
    elif op == "dtype":
        group.all_reduce(torch.ones(10, dtype=torch.int32 if first else torch.float32))
    elif op == "reduction":
        group.all_reduce(torch.ones(10), "mean" if first else "max")
    elif op == "root":
        group.broadcast(torch.ones(10), root=0 if first else 1)
    elif op == "collective":
        _ = group.reduce_scatter(torch.ones(10), torch.ones(10 * n)) if first else group.all_reduce(torch.ones(10 * n))
    elif op == "objects":
        _ = group.all_gather_object("mine") if first else group.all_reduce(torch.ones(10))
    group.barrier()


OPS = {
    "all_reduce": "all_reduce (sum) of 20 float32, tag 'mine'",
    "all_gather": "all_gather of 20 float32 a rank",
    "reduce_scatter": r"reduce_scatter (sum) of {20 * n} float32",
    "all_to_all": r"all_to_all of {20 * n} float32",
    "broadcast longer": "broadcast of 20 float32 from 0",
    "broadcast shorter": r"broadcast of 20 float32 from {n - 1}",
    "dtype": "all_reduce (sum) of 10 int32",
    "reduction": "all_reduce (mean) of 10 float32",
    "root": "broadcast of 10 float32 from 0",
    "collective": r"reduce_scatter (sum) of {10 * n} float32",
    "objects": "all_gather_object",
}


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_that_differ_are_named_with_call_size_and_line(op: str, ranks: int, capfd: pytest.CaptureFixture[str]):
    with pytest.raises(launch.RankError) as caught:
        run(mismatch, op, ranks=ranks)
    assert isinstance(caught.value.__cause__, CollectiveMismatch)
    text = str(caught.value.__cause__)
    head, *said, rule = text.splitlines()
    assert head == "ranks called different collectives, or one with buffers of different lengths:"
    assert [line[:10] for line in said] == [f"  rank {rank}: "[:10] for rank in range(ranks)]
    seen = [line for line in said if f" at {__file__}:" in line]
    assert len(seen) >= 2, text
    expected = re.sub(r"\{(.*?)\}", lambda m: str(eval(m[1], {"n": ranks})), OPS[op])
    assert said[0].startswith(f"  rank 0: {expected} at ") or "has not come here yet" in said[0], text
    assert rule.startswith("All ranks must make the same calls")
    assert capfd.readouterr().err == ""  # nothing of gloo's


def test_the_line_is_the_readers() -> None:
    with pytest.raises(launch.RankError) as caught:
        run(mismatch, "all_reduce")
    line = here(mismatch, "group.all_reduce(torch.ones(k), tag=")
    assert str(caught.value.__cause__).count(f" at {line}\n") == 2


def messages(sent: int, wanted: int) -> None:
    group = Group.world()
    if group.rank == 0:
        group.send(torch.ones(sent), 1)
    else:
        group.recv(torch.ones(wanted), 0)


@pytest.mark.parametrize(("sent", "wanted"), [(20, 10), (10, 20)])
def test_a_message_that_does_not_fit_its_buffer_is_refused(sent: int, wanted: int):
    with pytest.raises(launch.RankError, match="what one rank sends is not what the other waits for") as caught:
        run(messages, sent, wanted)
    assert f"rank 0: send of {sent} float32 to 1 at {__file__}" in str(caught.value)
    assert f"rank 1: recv of {wanted} float32 from 0 at {__file__}" in str(caught.value)


def test_ranks_are_called_by_their_number_in_the_job():
    """In a group of ranks 1 and 3 its number 1 is rank 3: "rank 1 waits for 1" would send the reader astray."""

    def work() -> None:
        handle = dist.new_group([1, 3])
        if dist.get_rank() in (1, 3):
            group = Group(handle)
            group.send(torch.ones(2), 1) if group.rank == 0 else group.recv(torch.ones(3), 0)

    with pytest.raises(launch.RankError) as caught:
        run(work, ranks=4)
    assert "rank 1: send of 2 float32 to 3 at " in str(caught.value)
    assert "rank 3: recv of 3 float32 from 1 at " in str(caught.value)


def test_uneven_parts_must_suit_sender_and_receiver():
    def work(wanted: int) -> list[float]:
        group = Group.world()
        rows = [1, 2] if group.rank == 0 else [3, 4]
        takes = [1, 3] if group.rank == 0 else [wanted, 4]
        out = torch.zeros(sum(takes), 2)
        group.all_to_all(out, torch.full((sum(rows), 2), float(group.rank)), in_splits=rows, out_splits=takes)
        return out[:, 0].tolist()

    assert run(work, 2) == [[0.0, 1.0, 1.0, 1.0], [0.0, 0.0, 1.0, 1.0, 1.0, 1.0]]
    with pytest.raises(launch.RankError, match="what one rank sends is not what the other waits for") as caught:
        run(work, 1)
    said = "  rank {}: all_to_all in uneven parts at " + f"{__file__}" + r":\d+, {} float32 from 0 to 1"
    for rank, elements in ((0, 4), (1, 2)):
        assert re.search(said.format(rank, elements), str(caught.value))


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_message_and_a_collective_of_uneven_parts_may_come_in_another_order(ranks: int):
    """Rank 1 waits for a message while it takes part in what rank 0 does before it sends."""

    def work() -> list[float]:
        group, word, out = Group.world(), torch.zeros(2), torch.zeros(ranks)
        waits = [group.recv(word, 0, async_op=True)] if group.rank == 1 else []
        group.all_to_all(out, torch.ones(ranks), in_splits=[1] * ranks, out_splits=[1] * ranks)
        if group.rank == 0:
            group.send(word + 3, 1)
        for wait in waits:
            wait.wait()
        return [*word.tolist(), out.sum().item()]

    assert run(work, ranks=ranks)[:2] == [[0.0, 0.0, ranks], [3.0, 3.0, ranks]]


def test_who_has_no_rows_need_not_say_so():
    """Each such message is announced on both sides all the same: the next between the two is compared with the next."""

    def work() -> float:
        group, word = Group.world(), torch.ones(2)
        if group.rank == 0:
            group.all_to_all(torch.empty(0), torch.ones(3), in_splits=[0, 3])
            group.recv(word, 1)
        else:
            group.all_to_all(torch.empty(3), torch.empty(0), out_splits=[3, 0])
            group.send(word + 1, 0)
        return word[0].item()

    assert run(work) == [2.0, 1.0]


def test_all_reduces_may_be_waited_for_in_any_order():
    """Their second halves begin with the group's next call, in the same order on every rank."""

    def work() -> list[float]:
        group = Group.world()
        given = [torch.full((4,), float(i + group.rank)) for i in range(3)]
        works = [group.all_reduce(x, async_op=True) for x in given]
        for one in works if group.rank else reversed(works):
            one.wait()
        return [x.sum().item() for x in given]

    assert run(work) == [[4.0, 12.0, 20.0]] * 2


def test_a_call_that_was_refused_can_be_made_rightly():
    def work() -> tuple[bool, float]:
        group, x = Group.world(), torch.ones(4)
        told = Group(dist.new_group())
        for one in (group, told):
            one.all_reduce(torch.zeros(1), async_op=True).wait()  # the ranks of each have met
        refused = False
        if group.rank == 0:
            works = [group.all_reduce(x, async_op=True)]
            told.barrier()
        else:
            told.barrier()  # rank 0's call is on the board
            try:
                group.all_reduce(torch.ones(5))
            except CollectiveMismatch:
                refused = True
            works = [group.all_reduce(x, async_op=True)]
        works[0].wait()
        group.all_reduce(x)
        return refused, x.sum().item()

    assert run(work) == [(False, 16.0), (True, 16.0)]


@pytest.mark.parametrize("ranks", [2, 3])
def test_an_async_call_that_was_refused_is_told_by_whatever_is_waited_for_next(ranks: int):
    def work() -> None:
        group = Group.world()
        first = group.all_reduce(torch.ones(8), async_op=True)
        second = group.all_reduce(torch.ones(4 if group.rank == 1 else 6), async_op=True, tag="other")
        first.wait()
        second.wait()

    with pytest.raises(launch.RankError) as caught:
        run(work, ranks=ranks)
    text = str(caught.value.__cause__)
    assert "rank 1: all_reduce (sum) of 4 float32, tag 'other' at " in text
    assert len(re.findall(r"rank [02]: all_reduce \(sum\) of 6 float32, tag 'other' at ", text)) >= 1
    assert "second half" not in text


def test_many_objects_of_one_group_share_its_record():
    def work() -> float:
        x = torch.ones(1)
        for _ in range(3 * KEPT):
            Group.world().all_reduce(x, "max")
        some = Group(dist.new_group([0, 2]) if dist.get_rank() != 1 else dist.new_group([0, 2]) and None)
        some.all_reduce(x)
        Group.world().broadcast(x, root=1)
        return x.item()

    assert run(work, ranks=3) == [1.0, 1.0, 1.0]


def test_a_rank_that_runs_far_ahead_is_still_compared(tmp_path: Path):
    ahead, behind = (Records(tmp_path / "board", 2, me) for me in range(2))
    for i in range(3 * KEPT):
        ahead.post(f"call {i}", f"call {i}")
    assert behind.agrees(behind.post("something else", ""))  # the other's first call is forgotten
    numbers = [behind.post(f"call {i}", f"call {i}") for i in range(1, 3 * KEPT)]
    assert not behind.agrees(numbers[-1])


def test_differences_too_old_to_be_shown_are_told_as_that(tmp_path: Path):
    boards = [Board(tmp_path, "0", [0, 1], me) for me in range(2)]
    for i in range(2 * KEPT):
        assert boards[0].announce([((), Call(f"call {i}", f"call {i}"))]) is None
    told = [boards[1].announce([((), Call(f"call {max(i, 1)}", f"call {i}"))]) for i in range(2 * KEPT)]
    first = next(refusal for refusal in told if refusal)
    assert "were different before this one, too long ago" in str(first.error)


def test_a_rank_makes_no_group_of_others():
    def check() -> None:
        handle = dist.new_group([0])
        if dist.get_rank():
            with pytest.raises(ValueError, match="rank 1 is not in this process group"):
                Group(handle)

    run(check)


def test_ranks_that_are_not_there_are_refused_at_the_call():
    def check() -> None:
        group, x = Group.world(), torch.ones(3)
        with pytest.raises(ValueError, match=r"send: to=2, but this group has 2 ranks: 0 to 1"):
            group.send(x, 2)
        with pytest.raises(ValueError, match=r"recv: source=-1, but this group has 2 ranks: 0 to 1"):
            group.recv(x, -1)
        with pytest.raises(ValueError, match=r"broadcast: root=2, but this group has 2 ranks: 0 to 1"):
            group.broadcast(x, root=2)
        with pytest.raises(ValueError, match=r"send: to=\d is this rank itself: copy the tensor instead"):
            group.send(x, group.rank)
        assert group.ledger.events == []

    run(check)


def test_tensors_that_cannot_travel_are_refused_at_the_call():
    def check() -> None:
        group, slanted = Group.world(), torch.ones(4, 6).t()
        whole = torch.ones(48)
        for call, words in {
            "all_reduce": lambda: group.all_reduce(slanted),
            "reduce_scatter": lambda: group.reduce_scatter(torch.ones(12), slanted),
            "all_gather": lambda: group.all_gather(whole, slanted),
            "broadcast": lambda: group.broadcast(slanted),
            "all_to_all": lambda: group.all_to_all(slanted, slanted),
            "send": lambda: group.send(slanted, 1 - group.rank),
            "recv": lambda: group.recv(slanted, 1 - group.rank),
        }.items():
            with pytest.raises(ValueError, match=rf"{call}: x \(6, 4\) is not contiguous in memory: pass x\.contig"):
                words()
        with pytest.raises(ValueError, match=r"all_reduce: x is torch\.sparse_coo, .* pass x\.to_dense\(\)"):
            group.all_reduce(whole.to_sparse())
        with pytest.raises(ValueError, match=r"all_reduce: op must be one of sum, mean, max, not 'min'"):
            group.all_reduce(whole, "min")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"all_reduce: the mean of torch.int64 is no torch.int64"):
            group.all_reduce(torch.ones(2, dtype=torch.int64), "mean")
        with pytest.raises(ValueError, match=r"all_reduce: torch.complex64 has no greatest"):
            group.all_reduce(torch.ones(2, dtype=torch.complex64), "max")
        with pytest.raises(ValueError, match=r"all_gather: x is torch.float64, out is torch.float32"):
            group.all_gather(whole, torch.ones(24).double())
        with pytest.raises(ValueError, match=r"what rank . sends itself must fit what it gets from itself"):
            group.all_to_all(torch.zeros(3), torch.zeros(3), in_splits=[1, 2], out_splits=[2, 1])
        with pytest.raises(ValueError, match=r"all_to_all: x has 3 rows, which 2 ranks cannot share equally"):
            group.all_to_all(torch.ones(3), torch.ones(3))
        assert group.ledger.events == []

    run(check)


def test_shapes_and_gradients_do_not_matter():
    def check() -> None:
        group = Group.world()
        x = torch.ones(2, 3, requires_grad=True)
        group.all_reduce(x)
        assert x.tolist() == [[2.0] * 3] * 2
        out = torch.empty(12)
        group.all_gather(out, x)
        assert out.tolist() == [2.0] * 12

    run(check)


def test_a_world_may_leave_the_comparison_out(monkeypatch):
    monkeypatch.setenv("REFIMPL_TRANSPORT", "gloo")  # shared memory would notice

    def work() -> float:
        x = torch.ones(20)
        Group.world().broadcast(x if dist.get_rank() else x[:10].mul_(2))
        return x.sum().item()

    with launch.World(2, device="cpu", compare=False) as world:
        assert world.call(work) == [30.0, 30.0]  # rank 1 has half of it, and is not told


TORCHRUN = """
import sys, torch, torch.distributed as dist, refimpl
from refimpl import Group
refimpl.join("cpu")
group, case = Group.world(), sys.argv[1]
if case == "leaves" and group.rank == 1:
    sys.exit(0)
group.all_reduce(torch.ones(4 if group.rank else 6) if case == "differs" else torch.ones(4), tag="loss")
"""


def torchrun(tmp_path: Path, case: str) -> str:
    script = tmp_path / "script.py"
    script.write_text(TORCHRUN)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script, case]
    environ = {**os.environ, "GLOO_SOCKET_IFNAME": LOOPBACK, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=120)
    assert done.returncode != 0
    return done.stderr


def test_under_torchrun_ranks_that_differ_are_named(tmp_path: Path):
    err = torchrun(tmp_path, "differs")
    line = f"{tmp_path / 'script.py'}:8"
    assert f"rank 0: all_reduce (sum) of 6 float32, tag 'loss' at {line}" in err
    assert f"rank 1: all_reduce (sum) of 4 float32, tag 'loss' at {line}" in err
    assert "EnforceNotMet" not in err


def test_under_torchrun_who_waits_for_a_rank_that_left_says_in_which_call(tmp_path: Path):
    err = torchrun(tmp_path, "leaves")
    line = f"{tmp_path / 'script.py'}:8"
    assert f"RankLost: rank 0 waits in vain in all_reduce (sum) of 4 float32, tag 'loss' at {line}: rank 1 left" in err
    assert "rank 1: no call yet" in err


def two_engines(transport: str, joined_by: str) -> None:
    """Two groups of the same ranks, as two engines have them, used in another order on rank 0, at last."""
    os.environ["REFIMPL_TRANSPORT"] = transport
    if joined_by == "torch":
        del os.environ["REFIMPL_BOARD"]
    groups = [Group.world(), Group.world()]
    for group in groups:
        group.all_reduce(torch.ones(8), tag="norm")
    for group in groups if dist.get_rank() == 0 else groups[::-1]:
        group.all_reduce(torch.ones(8), tag="norm")


@pytest.mark.parametrize(
    ("transport", "ranks", "joined_by"), pairwise([NEAR, "gloo"], [2, 3], ["our launcher", "torch"])
)
def test_calls_of_two_groups_of_the_same_ranks_do_not_meet(transport: str, ranks: int, joined_by: str):
    """They would wait for ever in memory that is shared, and be added up over gloo: both calls look alike."""
    with pytest.raises(launch.RankError, match="ranks called collectives of different groups") as caught:
        run(two_engines, transport, joined_by, ranks=ranks)
    assert isinstance(caught.value.__cause__, CollectiveMismatch)
    said = re.findall(r"rank \d: (.*) at .*:\d+, in the group of call (\d+), .* at ", str(caught.value.__cause__))
    assert {call for call, _ in said} == {"all_reduce (sum) of 8 float32, tag 'norm'"}
    assert len({first for _, first in said}) == 2


def test_ranks_do_not_meet_while_another_calls_something_else():
    """Where memory is shared a group's first collective exchanges objects first: another's are not taken for these."""

    def work() -> list[str]:
        group = Group.world()
        if group.rank == 0:
            group.all_reduce(torch.ones(8), tag="start")
        return group.all_gather_object("mine")

    with pytest.raises(launch.RankError) as caught:
        run(work)
    text = str(caught.value.__cause__)
    assert re.search(r"rank 0: (a group's first collective at|has not come here yet)", text), text
    assert re.search(r"rank 1: (all_gather_object at|has not come here yet)", text), text
