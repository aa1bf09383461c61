"""The path: all that a rank does with its units, in order, and what it is expected to do next.

    expected next                                          where
    what the trace of this iteration has there             inside an iteration
    what came after this many of the same in a row         at its end: another iteration, a step
    nothing: it is the first time                          where it was never before

An iteration runs from a forward of the model (or of a part called by itself) to the next one, to the step, or to a
state_dict, and has a trace of its own for each kind: with and without gradients, in training and in evaluation mode.
Ranks that have done the same so far expect the same, so one that does as expected need not ask; any other calls the
roll first.
"""

import weakref

from refimpl.comm.group import Group
from refimpl.zero.flat import Bucket
from refimpl.zero.gather.order import RollCall, Standing, stuck
from refimpl.zero.gather.prefetch import Pass, Trace
from refimpl.zero.hooks import weakly


class Outline:
    """What comes after what: after n times `what` in a row that which came last time, at first `what` once more.

    So three micro-batches and a step are expected after they were seen once, and evaluations in any number.
    """

    def __init__(self) -> None:
        self.after: dict[tuple[str, int], str] = {}
        self.last = ("", 0)

    @property
    def expected(self) -> str:
        return self.after.get(self.last, self.last[0])

    def add(self, what: str) -> None:
        if what != self.expected:
            self.after[self.last] = what
        self.last = (what, self.last[1] + 1 if what == self.last[0] else 1)


class Path:
    """Where one rank is. `begin` and `visit` return once it is sure that every rank does the same."""

    def __init__(self, group: Group, check: bool) -> None:
        self.patience, self.last_call = group.patience, group.last_call
        self.outline, self.traces = Outline(), dict[str, Trace]()
        self.trace = Trace()  # of the iteration under way
        self.at = 0  # things done
        self.roll_call = RollCall(group) if check and group.size > 1 else None
        if self.roll_call:  # the group may outlive this path, and holds it weakly: it can go while others are asked
            ask = weakly(self.stalled)
            self.patience.ask.append(ask)
            self.forget = weakref.finalize(self, self.patience.ask.remove, ask)

    def begin(self, what: str) -> None:
        """An iteration begins, or a step."""
        if what != self._expected():
            self._leave(what)
        self.at += 1
        self.outline.add(what)
        self.trace = self.traces.setdefault(what, Trace())
        self.trace.restart()

    def visit(self, bucket: Bucket, during: Pass) -> None:
        """This rank is about to use or to reduce `bucket`."""
        if self.trace.next != (bucket, during):
            self._leave(words(bucket, during))
        self.at += 1
        self.trace.visit(bucket, during)

    def _expected(self) -> str:
        """What this rank did here the last time, "" if it never was here."""
        return self.outline.expected if self.trace.next is None else words(*self.trace.next)

    def _leave(self, what: str) -> None:
        if self.roll_call:
            self.roll_call(Standing(self.at, self.patience.begun, what, self._expected()))

    def fails(self, error: Exception) -> Exception:
        """This rank cannot do what it is about to: the others, which wait for it, hear why. What to raise."""
        if self.roll_call:
            self.roll_call(Standing(self.at, self.patience.begun, "", "", str(error)))
        return error

    def stalled(self, number: int) -> None:
        """This rank has waited long for collective `number`: if a calling rank is the reason, call too."""
        assert self.roll_call is not None
        mine = Standing(self.at, self.patience.begun, "", "", waits=f", in or after {self.last_call()}")
        if stuck(number, self.roll_call.said()):
            self.roll_call(mine)
        self.roll_call.look_elsewhere(mine)

    def remove(self) -> None:
        """Nobody is asked for this path any more."""
        if self.roll_call:
            self.forget()
            self.roll_call.leave()


def words(bucket: Bucket, during: Pass) -> str:
    """For a reader: "forward of blocks.0", and whose gradients are reduced."""
    return f"{during} of {bucket.name}"
