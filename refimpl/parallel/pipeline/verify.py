"""Is this table right? Any table, whoever wrote it: complete, in order, free of deadlock, and what it states is so.

complete    each stage's F and whole backward once for each micro-batch, on the rank where the stage lies
in order    every operation has what it needs when its turn comes
deadlock    its programs end even if a send ends only when its receiver has come
alive       no rank keeps more activations than stated
bubble      the clock's is the formula's, where there is one
"""

from collections import Counter
from collections.abc import Sequence

from refimpl.parallel.pipeline import clock
from refimpl.parallel.pipeline.clock import ScheduleError
from refimpl.parallel.pipeline.messages import Line, Program, Recv, Send, programs
from refimpl.parallel.pipeline.schedules.table import UNIT, Cost, Op, Table, Value


def verify(table: Table, costs: Sequence[Cost] = (UNIT,)) -> None:
    """ScheduleError that says what is wrong. `costs`: those for which the bubble is compared with the formula."""
    complete(table)
    run_synchronously(table, programs(table))
    for rank, (found, stated) in enumerate(zip(clock.alive(table), table.alive, strict=True)):
        if found > stated:
            raise ScheduleError(f"{table.name}: rank {rank} keeps {found} activations alive, {stated} are stated")
    for cost in costs:
        found_, stated_ = clock.bubble(table, cost), table.bubble(cost)
        if stated_ is not None and abs(found_ - stated_) > 1e-9 * max(1, stated_):
            raise ScheduleError(f"{table.name}: the bubble is {found_:g} for {cost}, the formula says {stated_:g}")


def complete(table: Table) -> None:
    """Each stage's work once for each micro-batch, where the stage lies."""
    seen = Counter(op for order in table.orders for op in order)
    for rank, order in enumerate(table.orders):
        for op in order:
            if not (0 <= op.stage < table.stages and 0 <= op.micro < table.micro_batches):
                raise ScheduleError(f"{table.name}: rank {rank} computes {op}: there is no such")
            if table.rank_of(op.stage, op.micro) != rank:
                raise ScheduleError(f"{table.name}: rank {rank} computes {op}, which lies on another rank")
    for stage in range(table.stages):
        for micro in range(table.micro_batches):
            f, b, i, w = (seen[Op(kind, stage, micro)] for kind in ("F", "B", "I", "W"))
            if f != 1 or (b, i, w) not in ((1, 0, 0), (0, 1, 1)):
                raise ScheduleError(
                    f"{table.name}: stage {stage}, micro-batch {micro}: F {f} times, B {b}, I {i}, W {w}; F must be "
                    "there once, and B, or I and W"
                )


def run_synchronously(table: Table, lists: Sequence[Program]) -> None:
    """Do the lines of all programs, a message only when both its ranks have come to it. ScheduleError if it stops."""
    left = [list(reversed(program)) for program in lists]
    has: list[set[Value]] = [set() for _ in lists]
    moved = True
    while moved:
        moved = False
        for rank, lines in enumerate(left):
            while lines and _done(table, rank, lines[-1], left, has):
                lines.pop()
                moved = True
    if any(left):
        stuck = "; ".join(f"rank {rank}: {_words(lines[-1])}" for rank, lines in enumerate(left) if lines)
        raise ScheduleError(f"{table.name}: with sends that wait for their receiver nobody goes on. {stuck}")


def _done(table: Table, rank: int, line: Line, left: list[list[Line]], has: list[set[Value]]) -> bool:
    """Do one line if it can be done. A message is done for both of its ranks, by the sender."""
    if isinstance(line, Op):
        if not has[rank].issuperset(line.needs(table.stages)):
            return False
        if line.gives:
            has[rank].add(line.gives)
        return True
    if isinstance(line, Recv):
        return False
    other = left[line.to]
    if line.value not in has[rank] or not other or other[-1] != Recv(line.value, rank):
        return False
    other.pop()
    has[line.to].add(line.value)
    return True


def _words(line: Line) -> str:
    if isinstance(line, Op):
        return f"to compute {line}"
    what = f"{line.value.way} of stage {line.value.stage}, micro-batch {line.value.micro}"
    return f"to send {what} to rank {line.to}" if isinstance(line, Send) else f"to get {what} from rank {line.source}"
