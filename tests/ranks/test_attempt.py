"""Ranks that are started again meet among themselves, whatever the attempt before has left in the store."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import PrefixStore, Store, TCPStore

from refimpl.ranks.attempt import of_this_attempt

LIMIT = timedelta(seconds=30)


@pytest.fixture
def server() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=LIMIT)


def client(server: TCPStore) -> Store:
    return PrefixStore("job", TCPStore("127.0.0.1", server.port, is_master=False, timeout=LIMIT))


def attempt(server: TCPStore, size: int, after: list[str] | None = None) -> list[tuple[bool, str]]:
    """By each rank: whether the store was empty of `address`, and what rank 0 has written there then.

    `after`: rank 0 has said these names before any other rank comes.
    """
    stores = [client(server) for _ in range(size)]

    def join(rank: int) -> tuple[bool, str]:
        ours = of_this_attempt(stores[rank], rank, size, LIMIT)
        is_new = rank > 0 or not ours.check(["address"])
        if rank == 0:
            ours.set("address", str(id(stores)))
        return is_new, ours.get("address").decode()

    with ThreadPoolExecutor(size) as threads:
        first = threads.submit(join, 0)
        while after is not None and client(server).get("attempt").decode().split()[1:] != after:
            pass
        others = [threads.submit(join, rank) for rank in range(1, size)]
        found = [first, *others]
        assert {address for _, address in (one.result() for one in found)} == {str(id(stores))}
        return [one.result() for one in found]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_an_attempt_sees_nothing_of_the_one_before(server: TCPStore, size: int) -> None:
    for _ in range(3):
        assert all(is_new for is_new, _ in attempt(server, size))


def test_a_rank_that_comes_late_is_not_taken_for_its_predecessor(server: TCPStore) -> None:
    attempt(server, 3)
    before = [client(server).get(f"joined/{rank}").decode() for rank in (1, 2)]
    assert all(is_new for is_new, _ in attempt(server, 3, after=before))


def test_a_rank_that_never_comes_is_told(server: TCPStore) -> None:
    attempt(server, 2)
    with pytest.raises(RuntimeError, match=r"rank 1: after 0:00:00.* not all 2 ranks of this attempt have come"):
        of_this_attempt(client(server), 1, 2, timedelta(milliseconds=30))
    with pytest.raises(RuntimeError, match=r"rank 0: after 0:00:00.* not all 2 ranks"):
        of_this_attempt(client(server), 0, 2, timedelta(milliseconds=30))
