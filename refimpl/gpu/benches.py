"""The benches of `refimpl bench` on the GPUs: a rank for each, by NCCL; with one GPU one rank, where nothing is sent.

One rank shows what our own work costs beside the peers', without communication.
"""

from collections.abc import Iterator
from statistics import median

import torch

from refimpl import launch
from refimpl.bench import comm, zero
from refimpl.bench.race import Turns, slowest
from refimpl.gpu.part import Finding


def run(device: torch.device, seconds: float) -> Iterator[Finding]:
    small = device.type == "cpu"
    ranks = 2 if small else torch.cuda.device_count()
    turns = Turns(1, 1, 1) if small else Turns(4, 4, 2)
    workload = zero.Workload(100_000 if small else 100_000_000, 1 if small else 8, 64 if small else 512, turns)
    with launch.World(ranks, device=device.type) as world:
        for stage in zero.STAGES:
            # Beside torch's own: whether an installed DeepSpeed runs with this torch is not what is asked.
            laps = world.call(zero.heat, stage, workload, False, timeout=seconds / 2)
            try:
                zero.check_same_work(laps)
            except ValueError as error:  # the times of the others are worth having
                yield Finding(f"stage {stage}: all ways have the same losses", str(error), False)
                continue
            times = slowest([lap.times for lap in laps])
            ms = {name: median(steps) for name, steps in times.items()}
            yield Finding(f"stage {stage}, ms a step on {ranks} rank(s)", ms)
        for collective in comm.COLLECTIVES:
            size = 10_000 if small else 100_000_000
            times = slowest(world.call(comm.heat, collective, size, turns, timeout=seconds / 2))
            found = {way: median(calls) for way, calls in times.items()}
            yield Finding(f"{collective}, {size:,} bytes, ms on {ranks} rank(s)", found)
