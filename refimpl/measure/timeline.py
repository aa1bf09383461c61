"""The timeline of a step, from a ledger: what is computed when, what travels, and for how long the host stands still.

    with phase(ledger, "step"):
        with phase(ledger, "forward"):
            loss = model(batch)
        with phase(ledger, "backward"):
            loss.backward()
        with phase(ledger, "update"):
            optimizer.step()
    timeline = timelines(ledger)[-1]

    exposed    the host waits for a collective, or does the collective's own work
    hidden     a collective is under way while the host does something else
    computing  all of the step that is not exposed

A collective is under way from its start to where somebody used its result, which may be after it arrived. Times are the
host's, in ns; on a GPU, where the host only queues, `Ledger.device_ms` and a profiler know more.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from refimpl.measure.ledger import Ledger

STEP = "step"


class Span(NamedTuple):
    """From `begin` to `end`, in ns. `name`: a phase's, or a collective's with its number in the step."""

    name: str
    begin: int
    end: int

    @property
    def ms(self) -> float:
        return (self.end - self.begin) / 1e6


@dataclass(frozen=True)
class Flight:
    """A collective under way, and the bytes that this rank sends for it."""

    span: Span
    tag: str
    sent_bytes: int


@dataclass(frozen=True)
class Timeline:
    """One step. `held`: where the host stood still, without overlap, in order."""

    step: Span
    phases: list[Span]
    flights: list[Flight]
    held: list[Span]

    @property
    def exposed_ms(self) -> float:
        """How long the host stood still for collectives."""
        return sum(span.ms for span in self.held)

    @property
    def hidden_ms(self) -> float:
        """How long anything was under way while the host did something else."""
        under_way = union(flight.span for flight in self.flights)
        return sum(span.ms for span in under_way) - sum(span.ms for span in overlap(under_way, self.held))

    def phase_ms(self, name: str) -> float:
        """Milliseconds of a phase without what is exposed in it. ValueError if the step has none of that name."""
        named = [span for span in self.phases if span.name == name]
        if not named:
            raise ValueError(f"timeline: no phase {name!r}; there are {sorted({span.name for span in self.phases})}")
        return sum(span.ms for span in named) - sum(span.ms for span in overlap(named, self.held))

    def lanes(self) -> list[list[Flight]]:
        """The collectives in as few rows as let none overlap another in its row."""
        rows: list[list[Flight]] = []
        for flight in sorted(self.flights, key=lambda flight: flight.span.begin):
            free = next((row for row in rows if row[-1].span.end <= flight.span.begin), None)
            if free is None:
                rows.append(free := [])
            free.append(flight)
        return rows


@contextmanager
def phase(ledger: Ledger, name: str) -> Iterator[None]:
    """Mark where it begins and ends. One that raises has no end, and is left out."""
    ledger.mark(f"begin {name}")
    yield
    ledger.mark(f"end {name}")


def timelines(ledger: Ledger) -> list[Timeline]:
    """Of each whole step that the ledger still has: of each phase named STEP, with the phases inside it."""
    spans: list[Span] = []
    open_: dict[str, int] = {}
    started: dict[int, Any] = {}
    flights: list[Flight] = []
    for event in ledger.events:
        what, _, name = event.op.partition(" ")
        if event.phase == "start":
            started[event.call] = event
        elif event.phase == "end" and event.call in started:
            begun = started.pop(event.call)
            flights.append(Flight(Span(event.op, begun.time_ns, event.time_ns), event.tag, begun.sent_bytes))
        elif event.phase == "mark" and what == "begin":
            open_[name] = event.time_ns
        elif event.phase == "mark" and what == "end" and name in open_:
            spans.append(Span(name, open_.pop(name), event.time_ns))
    held = union(Span("exposed", *interval) for interval in ledger.held)
    steps = [span for span in spans if span.name == STEP]
    inside = [span for span in spans if span.name != STEP]
    return [Timeline(one, _in(inside, one), _numbered(flights, one), overlap(held, [one])) for one in steps]


def _in(spans: Iterable[Span], whole: Span) -> list[Span]:
    return sorted((s for s in spans if whole.begin <= s.begin and s.end <= whole.end), key=lambda s: s.begin)


def _numbered(flights: Iterable[Flight], step: Span) -> list[Flight]:
    """Those that are begun in the step, in that order, each with its number."""
    mine = sorted((f for f in flights if step.begin <= f.span.begin < step.end), key=lambda f: f.span.begin)
    return [
        Flight(Span(f"{f.span.name} {i}", f.span.begin, min(f.span.end, step.end)), f.tag, f.sent_bytes)
        for i, f in enumerate(mine)
    ]


def union(spans: Iterable[Span]) -> list[Span]:
    """The same instants in spans that do not overlap, in order."""
    merged: list[Span] = []
    for span in sorted(spans, key=lambda span: span.begin):
        if merged and span.begin <= merged[-1].end:
            merged[-1] = merged[-1]._replace(end=max(merged[-1].end, span.end))
        else:
            merged.append(span)
    return merged


def overlap(these: Sequence[Span], those: Sequence[Span]) -> list[Span]:
    """Where both are; each of the two without overlap in itself. Named as `these`."""
    return [
        Span(a.name, max(a.begin, b.begin), min(a.end, b.end))
        for a in these
        for b in those
        if max(a.begin, b.begin) < min(a.end, b.end)
    ]


def chrome_trace(ranks: Mapping[int, Timeline]) -> dict[str, Any]:
    """Chrome's trace format, a process a rank: json.dump it, and open it in a trace viewer. Microseconds.

    Rows: the phases, what is exposed, then the collectives.
    """
    rows: list[dict[str, Any]] = []
    for rank, timeline in ranks.items():
        lanes = timeline.lanes()
        names = ["computing", "exposed", *(f"collectives {i}" for i in range(len(lanes)))]
        rows.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}})
        for tid, name in enumerate(names):
            rows.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": tid, "args": {"name": name}})
        rows += [_row(span, rank, 0) for span in (timeline.step, *timeline.phases)]
        rows += [_row(span, rank, 1) for span in timeline.held]
        for tid, lane in enumerate(lanes, start=2):
            rows += [_row(f.span, rank, tid, {"tag": f.tag, "sent_bytes": f.sent_bytes}) for f in lane]
    return {"traceEvents": rows, "displayTimeUnit": "ms"}


def _row(span: Span, rank: int, tid: int, args: Mapping[str, Any] | None = None) -> dict[str, Any]:
    whole = {"ph": "X", "name": span.name, "pid": rank, "tid": tid, "ts": span.begin / 1e3, "dur": span.ms * 1e3}
    return {**whole, "args": dict(args or {})}
