"""A rank that the machine has no time for has not hung."""

import multiprocessing
import os
import subprocess
import sys
import time

import pytest

from refimpl import launch
from refimpl.ranks.silence import waited

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux says who waits for a CPU")


def computes(seconds: float) -> tuple[float, float]:
    """For so long of CPU time; -> (seconds it took by the clock, seconds it stood ready)."""
    before, begun = waited([multiprocessing.current_process()]), time.monotonic()
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass
    return time.monotonic() - begun, waited([multiprocessing.current_process()]) - before


def test_a_slow_machine_is_no_hang() -> None:
    patience, work = 1.0, 0.7
    hog = [sys.executable, "-c", "while True: pass"]
    with launch.World(ranks=1) as world:
        world.call(computes, 0.1)
        busy = [subprocess.Popen(hog) for _ in range(3 * len(os.sched_getaffinity(0)))]
        try:
            [(took, stood)] = world.call(computes, work, timeout=patience)
        finally:
            for process in busy:
                process.kill()
                process.wait()
    assert took > patience  # or nothing was tried here
    assert took - stood < patience


def test_a_hang_is_one_however_busy() -> None:
    with launch.World(ranks=2) as world, pytest.raises(launch.RankTimeout, match="waits in"):
        world.call(one_waits, timeout=2)


def one_waits() -> None:
    import torch
    import torch.distributed as dist

    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1))
    else:
        time.sleep(1000)
