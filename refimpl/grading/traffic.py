"""What an answer sent, as the ledger saw it, beside what it should have sent."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, Literal, TypeVar
from weakref import WeakSet

import torch.distributed as dist
from torch import Tensor, nn

from refimpl import launch
from refimpl.comm.collectives import Op
from refimpl.comm.group import Group
from refimpl.comm.work import Steps, Work
from refimpl.grading.calls import unwatched
from refimpl.grading.compare import Wrong, require
from refimpl.grading.late import Late
from refimpl.measure.ledger import Event, Ledger

T = TypeVar("T")
GRADIENT = "gradient of "  # how a mark in the ledger names one
LINES = 12  # of a transcript that are shown


@dataclass(frozen=True)
class Called:
    """What a rank reports when it starts a collective, so that it is known even if the rank never comes back."""

    text: str


class WatchedGroup(Group):
    """A Group whose ledger also says with whom (sends and receives are tagged "to 1" and "from 3"), and which reports
    each call at once, for the report of a hang. `oracle()`, the same for a grader's own use, reports nothing."""

    def __init__(self, handle: dist.ProcessGroup | None, control: Group) -> None:
        super().__init__(handle, transport="gloo")  # what the chapters teach; how it hangs is part of that
        self.control, self.told, self.moves = control, True, True
        self.late = WeakSet[Late]()

    def _run(self, op: str, sent: int, tag: str, async_op: bool, steps: Steps, *holds: Tensor) -> Work:
        tag = _own_half(op, tag)
        if self.told:
            launch.report(Called(_words(op, tag, sent)))
        if not self.moves:
            steps = iter(())
        with unwatched():
            return super()._run(op, sent, tag, async_op, steps, *holds)

    def _late(self, op: str, call: Callable[..., Work], filled: Sequence[Tensor], sent: Sequence[Tensor] = ()) -> Work:
        """call(*filled, *sent, async_op=True), as late as it may be; the answer's own calls alone."""
        if not self.told or not all(isinstance(t, Tensor) and t.is_contiguous() for t in (*filled, *sent)):
            return call(*filled, *sent, async_op=True)  # which refuses what is no such tensor
        with unwatched():
            work = Late(op, filled, sent)
            self.late.add(work)
            return work.begin(partial(call, async_op=True))

    def scratch(self) -> list[Tensor]:
        return [*super().scratch(), *(t for work in self.late for t in work.memory())]

    def send(self, x: Tensor, to: int, *, async_op: bool = False, tag: str = "") -> Work:
        begin = partial(super().send, to=to, tag=f"to {to}")
        return self._late(f"its send to {to}", begin, [], [x]) if async_op else begin(x)

    def recv(self, x: Tensor, source: int, *, async_op: bool = False, tag: str = "") -> Work:
        begin = partial(super().recv, source=source, tag=f"from {source}")
        return self._late(f"its recv from {source}", begin, [x]) if async_op else begin(x)

    def send_recv(self, x: Tensor, to: int, out: Tensor, source: int, *, async_op: bool = False, tag: str = "") -> Work:
        alone = "send_recv fills the memory that it sends, of which not all may have left: receive into another buffer"
        require(not _overlap(x, out), alone)
        return super().send_recv(x, to, out, source, async_op=async_op, tag=f"to {to} from {source}")

    def all_reduce(self, x: Tensor, op: Op = "sum", *, async_op: bool = False, tag: str = "") -> Work:
        begin = partial(super().all_reduce, op=op, tag=tag)
        return self._late("its all_reduce", begin, [x]) if async_op else begin(x)

    def reduce_scatter(self, out: Tensor, x: Tensor, op: Op = "sum", *, async_op: bool = False, tag: str = "") -> Work:
        begin = partial(super().reduce_scatter, op=op, tag=tag)
        return self._late("its reduce_scatter", begin, [out], [x]) if async_op else begin(out, x)

    def fresh(self, told: bool = True) -> "WatchedGroup":
        """The same ranks with an empty ledger, for what the answer does."""
        other = copy.copy(self)
        other.ledger, other.told = Ledger(), told
        return other

    def oracle(self) -> "WatchedGroup":
        """The same ranks with an empty ledger, for what the answer should do."""
        return self.fresh(told=False)

    def tally(self) -> "WatchedGroup":
        """As `oracle`, but calls are only entered in the ledger: nothing moves, no result is made, nobody waits."""
        other = self.oracle()
        other.moves = False
        return other

    def everyone(self, obj: T) -> list[T]:
        """Every rank's obj, in rank order, by connections that the answer does not use."""
        with unwatched():
            return self.control.all_gather_object(obj)

    def transcript(self) -> list[str]:
        """The collectives in the order in which they started: "send to 1, 20 bytes"."""
        return [_line(e) for e in starts(self.ledger)]


def starts(ledger: Ledger, op: str | None = None) -> list[Event]:
    """The collectives (of one kind) that were started, in order."""
    return [e for e in ledger.events if e.phase == "start" and op in (None, e.op)]


def same_traffic(
    group: WatchedGroup, oracle: WatchedGroup, what: str, *, calls: bool = True, itemsize: int = 4
) -> None:
    """Raise Wrong unless this rank sent as many bytes with each collective as the oracle (in as many calls).

    itemsize: bytes of an element; below 4, a collective with twice the bytes is recognised as one in fp32.
    """
    found, expected = group.ledger, oracle.ledger
    if found.sent_bytes() == expected.sent_bytes() and (not calls or found.calls() == expected.calls()):
        return
    mine, theirs = sum(found.sent_bytes().values()), sum(expected.sent_bytes().values())
    if not found.calls() and expected.calls():
        headline = f"{what} moved nothing through `group`: every byte must go through the group it was given"
    elif extra := sorted(set(found.calls()) - set(expected.calls())):
        headline = f"{what} uses {', '.join(extra)}, expected only {', '.join(expected.calls())}"
    elif itemsize == 2 and (op := wider(found, expected)):
        headline = f"{what}: each {op} carries 2x the bytes: is the buffer fp32 where the parameters have 16 bits?"
    elif mine != theirs:
        headline = f"{what} sends {mine:,} bytes from this rank, expected {theirs:,}" + _times(mine, theirs)
    else:
        calls_made, wanted = len(starts(found)), len(starts(expected))
        how = f"in {calls_made} calls, not {wanted}" if calls_made != wanted else "by other collectives than expected"
        headline = f"{what} sends the right bytes {how}"
    raise Wrong(headline, *side_by_side(group.transcript(), oracle.transcript()))


def wider(found: Ledger, expected: Ledger) -> str:
    """The collective that sends twice the bytes in the right number of calls, where all others are right; or ""."""
    mine, theirs = found.sent_bytes(), expected.sent_bytes()
    wrong = [op for op in theirs if mine.get(op) != theirs[op]]
    same = found.calls() == expected.calls() and len(wrong) == 1
    return wrong[0] if same and mine[wrong[0]] == 2 * theirs[wrong[0]] else ""


def not_too_early(events: Sequence[Event], buckets: Sequence[Sequence[str]], op: str) -> None:
    """Raise Wrong if a bucket, by the names of its parameters, was sent before the last of its gradients was marked."""
    marks = [(i, e.op.removeprefix(GRADIENT)) for i, e in enumerate(events) if e.phase == "mark"]
    launches = [i for i, e in enumerate(events) if (e.phase, e.op) == ("start", op)]
    if len(launches) > len(buckets):
        return  # some are no buckets: `same_traffic` tells
    for number, (at, bucket) in enumerate(zip(launches, buckets, strict=False)):
        if late := ", ".join(name for i, name in marks if name in bucket and i > at):
            raise Wrong(f"bucket {number} is launched before the gradient of {late} is there: wait for this backward's")


def places(group: Group, op: str, which: Literal["out", "x"]) -> list[int]:
    """Where in memory lies what `op` of this group, called as op(out, x), reads or fills from now on."""
    found: list[int] = []
    call = getattr(group, op)

    def called(out: Tensor, x: Tensor, *args: Any, **options: Any) -> Any:
        found.append((out if which == "out" else x).data_ptr())
        return call(out, x, *args, **options)

    setattr(group, op, called)
    return found


def mark_gradients(model: nn.Module, ledger: Ledger) -> None:
    """Enter each gradient in the ledger at the moment it is complete; before the answer puts its own hooks there."""
    for name, p in model.named_parameters():
        if p.requires_grad:
            hook = p.register_post_accumulate_grad_hook  # untyped in torch
            hook(lambda _, name=name: ledger.mark(GRADIENT + name))  # type: ignore[no-untyped-call]


def one_at_a_time(group: WatchedGroup, what: str) -> None:
    """Raise Wrong if more than one send, or more than one receive, was under way at the same time."""
    for op in ("send", "recv"):
        most = most_under_way([e for e in group.ledger.events if e.op == op])
        if most > 1:
            raise Wrong(f"{what} has {most} {op}s under way at once, each with its buffer: wait for one, then the next")


def most_under_way(events: Sequence[Event]) -> int:
    """The largest number of collectives that were under way at the same time."""
    steps = ({"start": 1, "end": -1}.get(e.phase, 0) for e in events)
    return max(accumulate(steps), default=0)


def all_done(group: Group, what: str) -> None:
    """Raise Wrong if a collective was started and never waited for."""
    if left := group.ledger.open_calls():
        raise Wrong(
            f"{what} returns while {len(left)} of its transfers are still under way: wait() for every async work",
            *[f"  still open: {_line(e)}" for e in left[:LINES]],
        )


def side_by_side(found: list[str], expected: list[str]) -> list[str]:
    """Two transcripts in two columns, the first difference marked."""
    rows = max(len(found), len(expected))
    first = next((i for i in range(rows) if found[i : i + 1] != expected[i : i + 1]), rows)
    start = max(0, first - LINES // 2)
    lines = ["what this rank sent, in order:", f"     {'yours':<34}expected"]
    for i in range(start, min(rows, start + LINES)):
        left, right = ("".join(side[i : i + 1]) or "-" for side in (found, expected))
        lines.append(f"{i + 1:3}  {left:<34}{right}{'   <- first difference' if i == first else ''}")
    return lines + ([f"     ... {rows - start - LINES} more"] if rows > start + LINES else [])


def each_rank(calls: Mapping[int, list[str]]) -> list[str]:
    """What every rank called, a column each, the last ones."""
    rows = max((len(mine) for mine in calls.values()), default=0)
    if not rows:
        return ["no rank has called a collective"]
    lines = [
        "what the ranks called, in order:",
        "     " + "".join(f"{f'rank {rank}':<26}" for rank in sorted(calls)).rstrip(),
    ]
    for i in range(max(0, rows - LINES // 2), rows):
        cells = ("".join(calls[rank][i : i + 1]) or "-" for rank in sorted(calls))
        lines.append(f"{i + 1:3}  " + "".join(f"{cell:<26}" for cell in cells).rstrip())
    return lines


def _overlap(x: object, y: object) -> bool:
    """Whether two tensors, each without gaps, have bytes in common."""
    if not isinstance(x, Tensor) or not isinstance(y, Tensor):
        return False
    return x.data_ptr() < y.data_ptr() + y.nbytes and y.data_ptr() < x.data_ptr() + x.nbytes


def _line(e: Event) -> str:
    return _words(e.op, e.tag, e.sent_bytes)


def _own_half(op: str, tag: str) -> str:
    """Of send_recv's "to 1 from 3" what its send, or its recv, is about."""
    to, also, source = tag.partition(" from ")
    return tag if not also else to if op == "send" else f"from {source}"


def _words(op: str, tag: str, sent: int) -> str:
    if op == "recv":
        return f"recv from {tag.partition(' from ')[2] or tag.removeprefix('from ')}"
    return f"{op}{' ' + tag if op == 'send' else ''}, {sent:,} bytes"


def _times(mine: int, theirs: int) -> str:
    return f": exactly {mine // theirs}x" if theirs and mine != theirs and mine % theirs == 0 else ""
