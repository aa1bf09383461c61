"""Which blocks of a chain to checkpoint: every k-th, sqrt(L), or what costs least time within a number of bytes.

A `Plan` says how a chain of blocks runs: a number is a block whose activations are kept, `Again(inside)` is a stretch
of blocks of which only the first one's input is kept, and that runs by the plan `inside` when backward needs it. So
plans nest. L equal blocks, an input of 1, saved s beside it; bytes at the peak, and forwards run in all:

    plan             bytes                    forwards
    keep             L (1 + s)                L
    every(1)         L + s                    2 L
    every(k)         L/k + k (1 + s)          2 L       least at k = sqrt(L / (1 + s)), or sqrt(L) where s is small
    best(budget)     at most the budget       the fewest there are

`best` is dynamic programming over (first block, last block, bytes left). With T(i, t, m) the least time to run blocks i
to t, whose input is there, and to have what their backward needs, in m bytes:

    T(i, t, m) = min( f_i + T(i+1, t, m - saved_i - input_{i+1}),                                       keep block i
                      min over j:  f_i + .. + f_{j-1} + T(j, t, m - input_j) + T(i, j-1, m) )           Again: i to j-1

Bytes are what is held whenever a block has just run (`peak`), which is what a `MemoryMeter` counts then; a block's own
temporaries, 5,056 bytes of random state a checkpoint and gradients come on top. The search takes every input for kept,
also one that a block's backward does not need (tanh's): what it finds fits, and something faster may fit too.

Chen et al. 2016, arXiv:1604.06174 (sqrt); Beaumont et al. 2019, "Optimal checkpointing for heterogeneous chains"
(Rotor), arXiv:1911.13214: its dynamic programme, here with the early stop of `checkpoint`. DeepSpeed leaves the choice
to the user.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

SLOTS = 2000  # sizes are rounded up to this fraction of the budget


@dataclass(frozen=True)
class Block:
    """One block of a chain, as measured. input, output, saved, stopped: bytes; forward, backward: seconds.

    output: 0 if it is a view of the input. saved: what autograd keeps of the block beside its input, its output and its
    parameters. keeps_input, keeps_output: whether it keeps these too. stopped: what is there beside input and `saved`
    where a run for backward stops, as soon as all is saved: nothing behind a last product; a block that ends with tanh
    runs to its end, and has tanh's result, which is kept, and tanh's input. None: nothing is saved, as of a view.
    """

    input: int
    output: int
    saved: int
    forward: float
    backward: float = 0.0
    stopped: int | None = 0
    keeps_input: bool = True
    keeps_output: bool = False


@dataclass(frozen=True)
class Again:
    """Blocks that run twice: by `inside` when backward needs them."""

    inside: "Plan"


Plan = tuple["int | Again", ...]


def keep(layers: int) -> Plan:
    """Nothing is computed again."""
    return tuple(range(layers))


def every(k: int, layers: int) -> Plan:
    """Stretches of k blocks, each computed again as a whole. ValueError if k < 1."""
    if k < 1:
        raise ValueError(f"a stretch has at least 1 block, not {k}")
    return tuple(Again(tuple(range(i, min(i + k, layers)))) for i in range(0, layers, k))


def sqrt(layers: int) -> Plan:
    """Stretches of sqrt(L) blocks, rounded up: Chen et al.'s."""
    return every(math.isqrt(max(layers - 1, 0)) + 1, layers)


def blocks_of(plan: Plan) -> Iterator[int]:
    """The blocks that a plan runs, in order."""
    for part in plan:
        if isinstance(part, Again):
            yield from blocks_of(part.inside)
        else:
            yield part


def peak(plan: Plan, blocks: Sequence[Block]) -> int:
    """The most bytes that are held when a block has just run: in forward, or when it runs again in backward."""
    return blocks[0].input + max(_samples(plan, blocks, 0, again=False))


def _samples(plan: Plan, blocks: Sequence[Block], held: int, again: bool) -> Iterator[int]:
    """Bytes beside the first block's input at each block's end. `again`: the run stops in the last block that saves."""
    if again:
        saving = [place for place, part in enumerate(plan) if _saves(blocks[i] for i in blocks_of((part,)))]
        plan = plan[: saving[-1] + 1] if saving else ()
    stretches: list[tuple[Again, int]] = []
    passed = 0  # of what one part has handed to the next, and nobody keeps so far
    for place, part in enumerate(plan):
        is_last = again and place == len(plan) - 1
        if isinstance(part, Again):
            held, passed = held + passed, 0
            stretches.append((part, held))
            if not is_last:  # else its input is all that is missing
                yield from _passing(part.inside, blocks, held)
                passed = next((blocks[i].output for i in reversed([*blocks_of((part,))]) if blocks[i].output), 0)
            continue
        block = blocks[part]
        if block.keeps_input:
            held, passed = held + passed, 0
        held += block.saved
        yield held + passed + ((block.stopped or 0) if is_last else block.output)
        passed = block.output or passed
        if block.keeps_output:
            held, passed = held + passed, 0
    for part, held_before in stretches:
        yield from _samples(part.inside, blocks, held_before, again=True)


def _saves(blocks: Iterable[Block]) -> bool:
    return any(block.stopped is not None for block in blocks)


def _passing(plan: Plan, blocks: Sequence[Block], held: int) -> Iterator[int]:
    """Bytes at each block's end in a stretch's first run, which keeps nothing: a call holds its input while it runs."""
    for place, part in enumerate(plan):
        given = blocks[next(blocks_of((part,)))].input if place else 0
        if isinstance(part, Again):
            yield from _passing(part.inside, blocks, held + given)
        else:
            yield held + given + blocks[part].output


def forwards(plan: Plan, blocks: Sequence[Block]) -> float:
    """Seconds of all forwards that a plan runs, those in backward included."""
    return sum(blocks[i].forward for i in blocks_of(plan)) + sum(
        forwards(part.inside, blocks) for part in plan if isinstance(part, Again)
    )


def slowdown(plan: Plan, blocks: Sequence[Block]) -> float:
    """A step's time with the plan, in steps that keep everything."""
    plain = sum(b.forward + b.backward for b in blocks)
    return (forwards(plan, blocks) + sum(b.backward for b in blocks)) / plain


def best(blocks: Sequence[Block], budget: int) -> Plan:
    """The plan of least time with `peak(plan, blocks) <= budget`. ValueError names the least budget that would do.

    Exact up to rounding: where they have no larger divisor, sizes are rounded up to 1/2000 of the budget.
    """
    if peak(keep(len(blocks)), blocks) <= budget:
        return keep(len(blocks))
    plan = _Search(blocks, budget).plan()
    if plan is None:
        generous = _Search(blocks, peak(keep(len(blocks)), blocks))
        raise ValueError(f"no plan fits into {budget} bytes; the least that does needs about {generous.least()}")
    return plan


Times = NDArray[np.float64]  # [slots + 1], by bytes left


class _Search:
    """The tables of the dynamic programme: for each stretch, by slots left, the least time and the first decision."""

    def __init__(self, blocks: Sequence[Block], budget: int) -> None:
        self.blocks, self.layers = blocks, len(blocks)
        self.room = budget - blocks[0].input
        sizes = [size for b in blocks for size in (b.input, b.output, b.saved, b.stopped or 0)]
        divisor = max(1, math.gcd(*sizes))
        self.unit = divisor if self.room // divisor <= SLOTS else -(-self.room // SLOTS)
        self.slots = max(0, self.room // self.unit)
        self.into = [self._slots(b.input) for b in blocks] + [self._slots(blocks[-1].output)]
        self.out = [self._slots(b.output) for b in blocks]
        self.saved = [self._slots(b.saved) for b in blocks]
        self.stopped = [self._slots(b.stopped or 0) for b in blocks]
        # again[i][t]: when blocks i to t run for backward; first[i]: in the first run, i to the last.
        self.again: dict[tuple[int, int], Times] = {}
        self.first: dict[int, Times] = {}
        self.choice: dict[tuple[int, int, bool], NDArray[np.int64]] = {}  # 0: keep, j: Again up to block j - 1
        if self.room >= 0:
            self._fill()

    def _slots(self, size: int) -> int:
        return -(-size // self.unit)

    def _fill(self) -> None:
        last = self.layers - 1
        for i in range(last, -1, -1):
            for t in range(i, self.layers):
                self.again[i, t] = self._stretch(i, t, is_first_run=False)
        for i in range(last, -1, -1):
            self.first[i] = self._stretch(i, last, is_first_run=True)

    def _stretch(self, i: int, t: int, is_first_run: bool) -> Times:
        def rest(j: int) -> Times:
            return self.first[j] if is_first_run else self.again[j, t]

        taken = self.saved[i] + self.out[i]
        stops = not is_first_run and not _saves(self.blocks[i + 1 : t + 1])
        time = np.full(self.slots + 1, self.blocks[i].forward)
        if i < t:
            time += self._with_less(rest(i + 1), taken)
        time[: self.saved[i] + self.stopped[i] if stops else taken] = np.inf
        choice = np.zeros(self.slots + 1, dtype=np.int64)
        need, seconds = 0, 0.0  # of running i to j - 1 and keeping nothing
        for j in range(i + 1, t + 2 if is_first_run else t + 1):
            seconds += self.blocks[j - 1].forward
            need = max(need, self.into[j] + (self.into[j - 1] if j - 1 > i else 0))
            other = seconds + self.again[i, j - 1]
            if j <= t:
                other = other + self._with_less(rest(j), self.into[j])
            other[:need] = np.inf
            choice[other < time] = j
            time = np.minimum(time, other)
        self.choice[i, t, is_first_run] = choice
        return time

    def _with_less(self, time: Times, slots: int) -> Times:
        """`time` by what is left before `slots` are taken."""
        less = np.full(self.slots + 1, np.inf)
        if slots <= self.slots:
            less[slots:] = time[: self.slots + 1 - slots]
        return less

    def plan(self) -> Plan | None:
        if self.room < 0 or not np.isfinite(self.first[0][self.slots]):
            return None
        return self._walk(0, self.layers - 1, self.slots, is_first_run=True)

    def _walk(self, i: int, t: int, slots: int, is_first_run: bool) -> Plan:
        parts: list[int | Again] = []
        while i <= t:
            j = int(self.choice[i, t, is_first_run][slots])
            if j == 0:
                parts.append(i)
                slots -= self.saved[i] + self.out[i]
                i += 1
            else:
                parts.append(Again(self._walk(i, j - 1, slots, is_first_run=False)))
                slots -= self.into[j]
                i = j
        return tuple(parts)

    def least(self) -> int:
        """The smallest budget for which there is a plan."""
        return self.blocks[0].input + int(np.argmax(np.isfinite(self.first[0]))) * self.unit
