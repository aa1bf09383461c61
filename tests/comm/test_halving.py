"""Halving and doubling: right on any number of ranks, in log2 N messages, in its own order of additions."""

import functools
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import worlds
from given import SIZES, agrees, everyone, given
from torch import Tensor

from refimpl.comm import halving
from refimpl.comm.alpha_beta import steps
from refimpl.comm.group import Group

run = functools.partial(worlds.run, device="cpu")

# Block b on its way, g the ranks' numbers for it, counted from b on: g[-1] is rank b-1's.
ORDERS: dict[int, Callable[[Callable[[int], Tensor]], Tensor]] = {
    2: lambda g: g(0) + g(-1),
    3: lambda g: (g(0) + g(-2)) + g(-1),
    4: lambda g: (g(0) + g(-2)) + (g(-1) + g(-3)),
    6: lambda g: ((g(0) + g(-3)) + (g(-2) + g(-5))) + (g(-1) + g(-4)),
}


def all_of_it() -> list[str]:
    """On a rank: every size, dtype and operation; what is wrong."""
    group, wrong = Group.world(), []
    for n in SIZES:
        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            rows = everyone(group.size, n * group.size, dtype)
            for op in ("sum", "max") if dtype == torch.int64 else ("sum", "mean", "max"):
                x, out = rows[group.rank].clone(), torch.empty(n, dtype=dtype)
                halving.reduce_scatter(group, out, x, op)
                if not agrees(out, rows.view(group.size, group.size, n)[:, group.rank], op):
                    wrong.append(f"reduce_scatter {n} {dtype} {op}")
                if not torch.equal(x, rows[group.rank]):
                    wrong.append("reduce_scatter wrote into x")
                whole = torch.empty_like(x)
                halving.all_gather(group, whole, out)
                odd = rows[group.rank][: max(0, len(x) - 1)].clone()
                halving.all_reduce(group, odd, op)
                if not agrees(odd, rows[:, : len(odd)], op) or not torch.equal(odd, whole[: len(odd)]):
                    wrong.append(f"all_reduce {n} {dtype} {op}")
    scalar = torch.tensor(float(group.rank))
    halving.all_reduce(group, scalar)
    if scalar.shape != () or scalar.item() != sum(range(group.size)):
        wrong.append(f"a number without dimensions: {scalar}")
    own = torch.arange(3.0) + group.rank
    whole = torch.empty(group.size, 3)
    whole[group.rank] = own
    halving.all_gather(group, whole, whole[group.rank])
    halving.reduce_scatter(group, whole[group.rank], whole)
    if not torch.equal(whole[group.rank], own * group.size):
        wrong.append("in place")
    return wrong


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6])
def test_right_on_every_size_dtype_and_operation(ranks: int) -> None:
    assert run(all_of_it, ranks=ranks) == [[]] * ranks


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_bytes_messages_order_and_torchs_own(ranks: int) -> None:
    n = 1001

    def check() -> tuple[list[tuple[str, int]], Tensor, Tensor]:
        group = Group.world()
        x = given(group.rank, n)
        halving.all_reduce(group, x)
        theirs = given(group.rank, n, torch.float64)
        dist.all_reduce(theirs)
        starts = [(e.tag, e.sent_bytes) for e in group.ledger.events if e.phase == "start" and e.op == "send"]
        return starts, x, theirs

    results = run(check, ranks=ranks)
    assert sum(size for starts, _, _ in results for _, size in starts) == 2 * 4 * n * (ranks - 1)
    rounds = steps("halving", ranks)  # what the alpha-beta model charges
    for starts, x, theirs in results:
        assert [tag for tag, _ in starts] == ["halving"] * rounds + ["doubling"] * rounds
        assert torch.equal(x, results[0][1])
        torch.testing.assert_close(x.double(), theirs, rtol=1e-4, atol=1e-2)
    if ranks == 4:  # half of the buffer, then a quarter
        assert [round(size / n) for _, size in results[0][0]] == [2, 1, 1, 2]
    blocks = [x.tensor_split(ranks) for x in everyone(ranks, n)]
    expected = [ORDERS[ranks](lambda k, b=b: blocks[(b + k) % ranks][b]) for b in range(ranks)]  # type: ignore[misc]
    assert torch.equal(results[0][1], torch.cat(expected))
    in_rank_order = functools.reduce(torch.add, everyone(ranks, n))
    assert torch.equal(results[0][1], in_rank_order) == (ranks == 2)


def test_the_order_of_six() -> None:
    def check() -> Tensor:
        x = given(Group.world().rank, 61)
        halving.all_reduce(Group.world(), x)
        return x

    blocks = [x.tensor_split(6) for x in everyone(6, 61)]
    expected = torch.cat([ORDERS[6](lambda k, b=b: blocks[(b + k) % 6][b]) for b in range(6)])  # type: ignore[misc]
    assert all(torch.equal(x, expected) for x in run(check, ranks=6))


def test_rounds_end_with_one_block_whatever_the_number() -> None:
    for size in range(1, 200):
        found = list(halving.rounds(size))
        assert len(found) == steps("halving", size) == (size - 1).bit_length()
        assert sum(there - kept for kept, there in found) == size - 1  # blocks sent: no more than a ring
        assert all(2 * kept >= there for kept, there in found)  # what arrives fits into what is kept


def test_what_does_not_fit_is_refused_before_anything_is_sent() -> None:
    def check() -> None:
        group = Group.world()
        with pytest.raises(ValueError, match=f"halving reduce_scatter on rank {group.rank}: 5 elements are not 2 rank"):
            halving.reduce_scatter(group, torch.empty(2), torch.empty(5))
        with pytest.raises(ValueError, match="halving all_gather"):
            halving.all_gather(group, torch.empty(5), torch.empty(2))
        with pytest.raises(ValueError, match=r"mean of torch\.int64"):
            halving.all_reduce(group, torch.zeros(2, dtype=torch.int64), "mean")
        with pytest.raises(ValueError, match="not contiguous"):
            halving.all_reduce(group, torch.zeros(2, 3).t())
        assert group.ledger.events == []

    run(check, ranks=2)
