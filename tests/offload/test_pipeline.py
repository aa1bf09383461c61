"""Reading, computing and writing overlap, by the order of events; after an error nothing is under way."""

from collections import Counter

import pytest

from refimpl.offload.blocks import OffloadError
from refimpl.offload.pipeline import pipelined


class Log:
    """What begins and ends, in order; a transfer ends when it is waited for."""

    def __init__(self, fails: str = "") -> None:
        self.events: list[str] = []
        self.fails = fails

    def transfer(self, name: str) -> "Way":
        self.events.append(f"{name} begins")
        return Way(self, name)


class Way:
    def __init__(self, log: Log, name: str) -> None:
        self.log, self.name = log, name

    def wait(self) -> None:
        self.log.events.append(f"{self.name} ends")
        if self.name == self.log.fails:
            raise OffloadError(self.name)


def run(log: Log, items: int, rooms: int) -> None:
    read_into: dict[str, int] = {}

    def read(item: int, room: str) -> Way:
        assert room not in read_into, f"{room} still holds item {read_into.get(room)}"
        read_into[room] = item
        return log.transfer(f"r{item}")

    def write(item: int, room: str) -> Way:
        assert read_into.pop(room) == item
        return log.transfer(f"w{item}")

    for item, _ in pipelined(range(items), [f"room {i}" for i in range(rooms)], read, write):
        log.events.append(f"c{item}")


def test_three_buffers_read_compute_and_write_at_once() -> None:
    log = Log()
    run(log, 6, 3)
    at = {event: place for place, event in enumerate(log.events)}
    for k in range(1, 5):
        assert at[f"r{k + 1} begins"] < at[f"c{k}"] < at[f"r{k + 1} ends"], log.events
        assert at[f"w{k - 1} begins"] < at[f"c{k}"], log.events
    for k in range(2, 5):  # the disk still writes k - 1 while k is computed with
        assert at[f"c{k}"] < at[f"w{k - 1} ends"], log.events


@pytest.mark.parametrize("items", [0, 1, 2, 7])
@pytest.mark.parametrize("rooms", [1, 2, 3, 5])
def test_every_item_is_read_computed_with_and_written_once_in_order(items: int, rooms: int) -> None:
    log = Log()
    run(log, items, rooms)
    kinds = {kind: [e for e in log.events if e.startswith(kind)] for kind in "rcw"}
    assert kinds["c"] == [f"c{k}" for k in range(items)]
    assert Counter(kinds["r"]) == Counter(f"r{k} {what}" for k in range(items) for what in ("begins", "ends"))
    assert Counter(kinds["w"]) == Counter(f"w{k} {what}" for k in range(items) for what in ("begins", "ends"))


def test_one_buffer_does_all_in_turn() -> None:
    log = Log()
    run(log, 2, 1)
    one = "r{0} begins,r{0} ends,c{0},w{0} begins,w{0} ends"
    assert log.events == [*one.format(0).split(","), *one.format(1).split(",")]


@pytest.mark.parametrize("fails", ["r2", "w1", "w5"])
def test_after_an_error_nothing_is_under_way(fails: str) -> None:
    log = Log(fails)
    with pytest.raises(OffloadError, match=fails):
        run(log, 6, 3)
    begun = {e.split()[0] for e in log.events if e.endswith("begins")}
    ended = {e.split()[0] for e in log.events if e.endswith("ends")}
    assert begun == ended
