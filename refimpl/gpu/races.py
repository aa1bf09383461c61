"""Part 3: the race hunt. Random delays on every stream must not change a bit.

The truth is the same program with all of its work on one stream, where everything happens in the order in which it was
queued. The hunted run has real streams, on which `Twins` and `Restless` spin at random. And to know that the hunt sees
races at all: the same with some waits left out, which must change bits now and then. Some, because a later wait makes
every second one needless (tests/zero/stream_log.py), and the others show only where the delays fall so.
"""

import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from refimpl.comm.group import Group
from refimpl.comm.streams import CudaStreams, Event, Streams, streams_of
from refimpl.gpu.part import Finding
from refimpl.gpu.twins import Twins, poisoned
from refimpl.gpu.workload import STAGES, Workload, differing

RANK, SIZE = 1, 4
CYCLES = (1_000_000, 8_000_000)  # of one delay: some tenths of a millisecond to some milliseconds
LEFT_OUT = 8  # waits of a run's 170 to 380


class Restless(CudaStreams):
    """A GPU's streams on which `dally()` comes after every wait. `skip`: the numbers of waits that are left out."""

    def __init__(self, device: torch.device, dally: Callable[[], None], skip: frozenset[int] = frozenset()) -> None:
        super().__init__(device)
        self.dally, self.skip, self.waits = dally, skip, 0

    def wait(self, event: Event) -> None:
        self.waits += 1
        if self.waits - 1 not in self.skip:
            super().wait(event)
        self.dally()


def run(device: torch.device, seconds: float) -> Iterator[Finding]:
    deadline = time.monotonic() + 0.9 * seconds
    torch.use_deterministic_algorithms(True)
    workload = Workload(width=64, layers=2, steps=2) if device.type == "cpu" else Workload(width=128, layers=3, steps=3)
    truths, waits = {}, {}
    for stage in STAGES:
        truths[stage], _ = trained(stage, workload, device, Streams(), _nothing)
        again, _ = trained(stage, workload, device, Streams(), _nothing)
        apart = differing(truths[stage], again)
        yield Finding(f"{stage}: one stream, twice the same bits", apart or "equal", not apart)
        applied = all(t.isfinite().all() for t in truths[stage].values()) and not truths[stage]["skipped"]
        yield Finding(f"{stage}: all is finite, no step skipped", bool(applied), bool(applied))
    seeds: dict[str, int] = dict.fromkeys(STAGES, 0)
    wrong: dict[str, list[int]] = {stage: [] for stage in STAGES}
    while min(seeds.values()) == 0 or (time.monotonic() < deadline - 0.4 * seconds and device.type == "cuda"):
        for stage in STAGES:
            weights, waits[stage] = hunted(stage, workload, device, seeds[stage])
            wrong[stage] += [seeds[stage]] if differing(truths[stage], weights) else []
            seeds[stage] += 1
    for stage in STAGES:
        found = {"runs": seeds[stage], "waits a run": waits[stage], "seeds that differ": wrong[stage][:5]}
        yield Finding(f"{stage}: random delays change no bit", found, not wrong[stage])
    if device.type == "cuda":
        yield from left_out(workload, device, truths, waits, deadline)


def left_out(
    workload: Workload, device: torch.device, truths: dict[str, Any], waits: dict[str, int], deadline: float
) -> Iterator[Finding]:
    """Runs with some waits left out, random ones each time."""
    chance = random.Random(0)
    for place, stage in enumerate(STAGES):
        runs, seen = 0, 0
        until = time.monotonic() + (deadline - time.monotonic()) / (len(STAGES) - place)
        while runs == 0 or time.monotonic() < until:
            skip = frozenset(chance.sample(range(waits[stage]), min(LEFT_OUT, waits[stage])))
            seen += is_seen(stage, workload, device, truths[stage], runs, skip)
            runs += 1
        found = {"runs": runs, "seen": seen}
        yield Finding(f"{stage}: {LEFT_OUT} waits left out change bits", found, seen > 0)


def is_seen(
    stage: str, workload: Workload, device: torch.device, truth: dict[str, Tensor], seed: int, skip: frozenset[int]
) -> bool:
    """Whether a run without these waits has other bits, or stumbles: what is read too early may be NaN.

    Then the words that ranks compare with the norm are no whole numbers. An illegal access is no such error.
    """
    try:
        weights, _ = hunted(stage, workload, device, seed, skip)
    except (ValueError, ArithmeticError):
        return True
    return bool(differing(truth, weights))


def hunted(
    stage: str, workload: Workload, device: torch.device, seed: int, skip: frozenset[int] = frozenset()
) -> tuple[dict[str, Tensor], int]:
    """The weights after a run with delays, and how many waits it had. On a CPU nothing is delayed."""
    if device.type == "cpu":
        return trained(stage, workload, device, streams_of(device), _nothing)
    chance = random.Random(seed)
    most = chance.choice(CYCLES)

    def dally() -> None:
        if chance.random() < 0.5:
            torch.cuda._sleep(chance.randrange(most))  # type: ignore[no-untyped-call]

    return trained(stage, workload, device, Restless(device, dally, skip), dally)


def trained(
    name: str, workload: Workload, device: torch.device, streams: Streams, dally: Callable[[], None]
) -> tuple[dict[str, Tensor], int]:
    """A short training among twins -> this rank's own weights and optimizer state by number, and the waits."""
    group = Group(None, device=device, streams=streams, transport=Twins(RANK, SIZE, streams, dally))
    with poisoned():
        stage = workload.stage(name, group, check_order=False)
        for module in stage.model.modules():
            module.register_forward_pre_hook(lambda *_: dally())
        for step in range(workload.steps):
            workload.step(stage, workload.batch(step, RANK).to(device))
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    kept = [*stage.update.owned.values(), *(t for t in stage.update.state() if t.dim())]
    state = {str(i): tensor.detach().to("cpu", copy=True) for i, tensor in enumerate(kept)}
    state["skipped"] = torch.tensor(stage.skipped_steps, dtype=torch.int32)
    return state, getattr(streams, "waits", 0)


def _nothing() -> None:
    """No delay."""
