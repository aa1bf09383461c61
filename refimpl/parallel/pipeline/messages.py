"""A table with its messages: what each rank computes, sends and receives, in one order that cannot deadlock.

Walk over the whole table by its clock and write down one list for all ranks: an operation where it begins, a message
where what it carries is made. A rank's program is its own lines of that list, and a message is a line of two ranks.

    clock  list               rank 0's program     rank 1's program
      0    F 0,0 on rank 0    F 0,0
      1    0 -> 1             send                 receive
      1    F 0,1 on rank 0    F 0,1
      1    F 1,0 on rank 1                         F 1,0
      ...

Nobody can be stuck, even where a send ends only when its receiver has come (a rendezvous): of all lines not done, the
first one can always be done, because its ranks have nothing before it. Two ranks that each sent first, and then
received, could wait for each other for ever; here both have the two messages in the same order.
torch.distributed.pipelining: schedules.py, _add_send_recv.
"""

from dataclasses import dataclass

from refimpl.parallel.pipeline.clock import play
from refimpl.parallel.pipeline.schedules.table import Op, Table, Value


@dataclass(frozen=True)
class Send:
    """This rank sends a value that it has made."""

    value: Value
    to: int


@dataclass(frozen=True)
class Recv:
    """This rank gets a value that another has made."""

    value: Value
    source: int


Line = Op | Send | Recv
Program = tuple[Line, ...]


def programs(table: Table) -> tuple[Program, ...]:
    """Of every rank. Costs of one length order them; programs of another cost are as right, and may wait more."""
    spans = play(table)
    lines: list[tuple[float, int, int, Op]] = []  # when; a message before the operations that begin then
    for rank, order in enumerate(table.orders):
        for op in order:
            lines.append((spans[op].begin, 1, rank, op))
            if op.gives and table.receiver(op.gives) is not None:
                lines.append((spans[op].end, 0, rank, op))
    result: list[list[Line]] = [[] for _ in table.orders]
    for _, is_op, rank, op in sorted(lines):
        if is_op:
            result[rank].append(op)
        elif op.gives and (to := table.receiver(op.gives)) is not None:
            result[rank].append(Send(op.gives, to))
            result[to].append(Recv(op.gives, rank))
    return tuple(map(tuple, result))
