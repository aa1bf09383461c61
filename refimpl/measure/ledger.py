"""The ledger: every collective a rank starts and ends, with the bytes it sends, in order.

A claim such as "ZeRO-3 sends 1.5 times the bytes of DDP" is a sum over this list, and a claim such as "the reduction
overlaps backward" is the order of two entries in it. Bytes are those that this rank puts on the wire for its payload
(N ranks, a buffer of n bytes): all-reduce 2n(N-1)/N, reduce-scatter and all-gather n(N-1)/N, send n.

Times are the host's: an "end" is when somebody waited. On a GPU the host only queues; there `Ledger(timed=True)` also
has each collective's begin and end recorded on the stream that it runs on: see `device_ms`.
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    import pandas as pd

    from refimpl.measure.comms_log import CommsLog

Phase = Literal["start", "end", "mark"]
Entry = tuple[Phase, str, str, int, int, int]  # the fields of an `Event`


class Event(NamedTuple):
    """One entry. `call` ties a start to its end (-1 for a mark); `sent_bytes` is charged at the start."""

    phase: Phase
    op: str
    tag: str
    call: int
    sent_bytes: int
    time_ns: int


@dataclass(slots=True)
class Total:
    """All calls of one collective under one tag."""

    calls: int = 0
    sent_bytes: int = 0
    crossed_bytes: int = 0  # of what was really sent: over slow links, to other nodes


class Ledger:
    """Events of one rank, in the order in which they happened. Not shared between threads.

    `sent_bytes`, `calls` and `table` are exact over everything since `reset`. `events` forgets: it holds the last
    `keep` events, so that a long training does not fill memory.
    """

    log: "CommsLog | None" = None  # who also wants to know each collective's latency: see `CommsLog`

    def __init__(self, keep: int = 100_000, timed: bool = False) -> None:
        """ValueError if keep < 1."""
        if keep < 1:
            raise ValueError(f"keep must be at least 1 event, not {keep}")
        self.keep, self.timed = keep, timed
        # Plain tuples, of which every gradient makes one: as fast to make as can be, and the garbage collector, which
        # would walk over 100,000 events now and then, leaves a tuple of strings and numbers out.
        self._events: deque[Entry] = deque(maxlen=keep)
        self._started: dict[int, Entry] = {}
        self._totals: dict[tuple[str, str], Total] = {}  # (op, tag) -> since the last reset
        self._calls = 0
        self._held: deque[tuple[int, int]] = deque(maxlen=keep)
        self._spans: dict[int, tuple[Any, Any]] = {}  # call -> (begun, done), events of the collective's stream

    def start(self, op: str, sent_bytes: int, tag: str = "") -> int:
        """A collective begins. `sent_bytes`: what this rank sends. Returns the id to hand to `end`."""
        call, self._calls = self._calls, self._calls + 1
        event: Entry = ("start", op, tag, call, sent_bytes, time.perf_counter_ns())
        self._events.append(event)
        self._started[call] = event
        total = self._totals.setdefault((op, tag), Total())
        total.calls += 1
        total.sent_bytes += sent_bytes
        return call

    def end(self, call: int, *span: Any, held: Sequence[tuple[int, int]] = ()) -> None:
        """The collective's result is usable. KeyError if `call` is not open. `span`: two timed events, or nothing.

        held: from when to when, in ns, the host stood still for it.
        """
        begun = self._started.pop(call)
        if span:
            self._spans[call] = (span[0], span[1])
            if len(self._spans) > self.keep:
                del self._spans[next(iter(self._spans))]
        self._events.append(("end", begun[1], begun[2], call, 0, time.perf_counter_ns()))
        self._held += held

    def cross(self, op: str, crossed_bytes: int, tag: str = "") -> None:
        """So many bytes of a collective under way go over a slow link (see `refimpl.comm.link`)."""
        self._totals.setdefault((op, tag), Total()).crossed_bytes += crossed_bytes

    def mark(self, name: str) -> None:
        """A named instant, so that its place among the collectives can be compared."""
        self._events.append(("mark", name, "", -1, 0, time.perf_counter_ns()))

    def reset(self) -> None:
        """Forget all events and sums. Collectives that are still open stay open."""
        self._events.clear()
        self._totals.clear()
        self._spans.clear()
        self._held.clear()

    def device_ms(self, ms: Callable[[Any, Any], float]) -> dict[int, float]:
        """Milliseconds that each ended call took on its own stream, its wait for the caller's not counted.

        `ms(begun, done)` is that of the group's `streams`; the host waits for the last event. Empty unless `timed`, and
        on a device without streams.
        """
        return {call: ms(begun, done) for call, (begun, done) in self._spans.items()}

    def open_calls(self) -> list[Event]:
        """Collectives that have started and not ended: what a rank that hangs is waiting for."""
        return list(map(Event._make, self._started.values()))

    @property
    def events(self) -> list[Event]:
        """What happened, the latest last; see the class for how far back."""
        return list(map(Event._make, self._events))

    @property
    def held(self) -> list[tuple[int, int]]:
        """From when to when, in ns of `Event.time_ns`, the host stood still for a collective; see the class."""
        return list(self._held)

    def sent_bytes(self, by: Literal["op", "tag"] = "op") -> dict[str, int]:
        """Bytes this rank sent, summed by collective or by tag."""
        return self._summed(by, lambda total: total.sent_bytes)

    def crossed_bytes(self, by: Literal["op", "tag"] = "op") -> dict[str, int]:
        """Bytes this rank sent over slow links, summed by collective or by tag; without those that sent none there."""
        sums = self._summed(by, lambda total: total.crossed_bytes)
        return {name: size for name, size in sums.items() if size}

    def calls(self, by: Literal["op", "tag"] = "op") -> dict[str, int]:
        """Number of collectives started, by collective or by tag."""
        return self._summed(by, lambda total: total.calls)

    def _summed(self, by: Literal["op", "tag"], count: Callable[[Total], int]) -> dict[str, int]:
        sums: Counter[str] = Counter()
        for (op, tag), total in self._totals.items():
            sums[tag if by == "tag" else op] += count(total)
        return dict(sums)

    def table(self) -> "pd.DataFrame":
        """One row a (collective, tag): calls and bytes sent by this rank."""
        import pandas as pd

        rows = [(op, tag, total.calls, total.sent_bytes) for (op, tag), total in self._totals.items()]
        return pd.DataFrame(rows, columns=["collective", "tag", "calls", "sent_bytes"])

    def chrome_trace(self, rank: int = 0) -> dict[str, Any]:
        """The kept events in Chrome's trace format (times in microseconds): json.dump it, open it in a trace viewer."""
        rows: list[dict[str, Any]] = []
        events = self.events
        ends = {e.call: e.time_ns for e in events if e.phase == "end"}
        for e in events:
            base = {"name": e.op, "pid": rank, "ts": e.time_ns / 1e3}
            if e.phase == "mark":
                rows.append({**base, "ph": "i", "s": "t", "tid": 0})
            elif e.phase == "start":
                # Async events ("b"/"e"): overlapping collectives each get a lane of their own.
                shared = {**base, "cat": "comm", "id": e.call, "tid": 1}
                rows.append({**shared, "ph": "b", "args": {"tag": e.tag, "sent_bytes": e.sent_bytes}})
                if e.call in ends:
                    rows.append({**shared, "ph": "e", "ts": ends[e.call] / 1e3})
        return {"traceEvents": rows, "displayTimeUnit": "ms"}
