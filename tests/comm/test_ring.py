"""The ring: right sums, exactly the promised bytes, and its own order of additions."""

import functools

import pytest
import torch
import worlds
from given import given
from torch import Tensor

from refimpl.comm import ring
from refimpl.comm.group import Group

run = functools.partial(worlds.run, device="cpu")  # gloo, also where there is a GPU

RANKS = [1, 2, 3, 4]
SIZES = [0, 1, 2, 5, 24, 1001]


def exact(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@pytest.mark.parametrize("ranks", RANKS)
def test_integers_are_summed_exactly_on_any_size(ranks: int) -> None:
    def check() -> None:
        group = Group.world()
        for n in SIZES:
            inputs = [given(r, n * ranks, torch.int64) for r in range(ranks)]
            mine, total = inputs[group.rank], torch.stack(inputs).sum(0)

            chunk = torch.empty(n, dtype=torch.int64)
            ring.reduce_scatter(group, chunk, mine)
            exact(chunk, total.view(ranks, n)[group.rank])
            exact(mine, given(group.rank, n * ranks, torch.int64))  # only read

            whole = torch.empty(n * ranks, dtype=torch.int64)
            ring.all_gather(group, whole, chunk)
            exact(whole, total)

            uneven = mine[: max(0, n * ranks - 1)].clone()
            ring.all_reduce(group, uneven)
            exact(uneven, total[: len(uneven)])

    run(check, ranks=ranks)


@pytest.mark.parametrize("ranks", RANKS)
def test_in_place_forms(ranks: int) -> None:
    def check() -> None:
        group = Group.world()
        inputs = [given(r, 7 * ranks, torch.int64) for r in range(ranks)]
        x = inputs[group.rank].clone()
        own = x.view(ranks, 7)[group.rank]
        ring.reduce_scatter(group, own, x)
        ring.all_gather(group, x, own)
        exact(x, torch.stack(inputs).sum(0))

        square = torch.full((3, 3), group.rank + 1)
        ring.all_reduce(group, square)
        exact(square, torch.full((3, 3), ranks * (ranks + 1) // 2))

    run(check, ranks=ranks)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_chunk_c_is_added_from_rank_c_plus_1_round_to_rank_c(ranks: int) -> None:
    def check() -> Tensor:
        x = given(Group.world().rank, 1001)
        ring.all_reduce(Group.world(), x)
        return x

    def in_ring_order(chunks: list[Tensor], c: int) -> Tensor:
        total = chunks[(c + 1) % ranks]
        for hop in range(2, ranks + 1):
            total = total + chunks[(c + hop) % ranks]
        return total

    results = run(check, ranks=ranks)
    inputs = [given(r, 1001) for r in range(ranks)]
    by_chunk = zip(*(x.tensor_split(ranks) for x in inputs), strict=True)
    expected = torch.cat([in_ring_order(list(chunks), c) for c, chunks in enumerate(by_chunk)])
    for result in results:
        exact(result, expected)

    # Any order stays within (N-1) roundings of the partial sums, each at most the sum of magnitudes.
    true = torch.stack(inputs).double().sum(0)
    bound = (ranks - 1) * torch.finfo(torch.float32).eps * torch.stack(inputs).double().abs().sum(0)
    assert ((results[0].double() - true).abs() <= bound).all()

    in_rank_order = inputs[0]
    for x in inputs[1:]:
        in_rank_order = in_rank_order + x
    # Two numbers add up the same either way round; from three on the ring's order shows.
    assert torch.equal(results[0], in_rank_order) == (ranks == 2)


@pytest.mark.parametrize("ranks", RANKS)
def test_it_sends_exactly_the_promised_bytes(ranks: int) -> None:
    n = 12 * 8

    def check() -> list[int]:
        sent = []
        whole, chunk = torch.zeros(n), torch.zeros(n // ranks)
        for collective in (
            lambda group: ring.all_reduce(group, whole),
            lambda group: ring.reduce_scatter(group, chunk, whole),
            lambda group: ring.all_gather(group, whole, chunk),
        ):
            group = Group.world()
            collective(group)
            sent.append(group.ledger.sent_bytes().get("send", 0))
            assert group.ledger.open_calls() == []
        return sent

    share = 4 * n * (ranks - 1) // ranks
    assert run(check, ranks=ranks) == [[2 * share, share, share]] * ranks


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_uneven_sizes_send_no_padding(ranks: int) -> None:
    def check() -> list[int]:
        sent = []
        for n in SIZES:
            group = Group.world()
            ring.all_reduce(group, torch.zeros(n))
            assert group.ledger.calls()["send"] == 2 * (ranks - 1)
            sent.append(group.ledger.sent_bytes()["send"])
        return sent

    by_rank = run(check, ranks=ranks)
    for i, n in enumerate(SIZES):
        assert sum(sent[i] for sent in by_rank) == 2 * 4 * n * (ranks - 1)


def test_sizes_that_do_not_fit_are_an_error_before_anything_is_sent() -> None:
    def check() -> None:
        group = Group.world()
        with pytest.raises(
            ValueError, match=rf"ring reduce_scatter on rank {group.rank}: 5 elements are not 2 ranks x 2"
        ):
            ring.reduce_scatter(group, torch.empty(2), torch.empty(5))
        with pytest.raises(ValueError, match=rf"ring all_gather on rank {group.rank}: 5 elements are not 2 ranks x 2"):
            ring.all_gather(group, torch.empty(5), torch.empty(2))
        assert group.ledger.events == []

    run(check, ranks=2)
