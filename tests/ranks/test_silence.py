"""A rank that the machine has no time for has not hung."""

import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from refimpl import launch
from refimpl.ranks import silence
from refimpl.ranks.silence import awake, waited

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux says who waits for a CPU")


def computes(seconds: float) -> tuple[float, float]:
    """For so long of CPU time; -> (seconds it took by the clock, seconds it stood ready)."""
    before, begun = waited([multiprocessing.current_process()]), time.monotonic()
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass
    return time.monotonic() - begun, waited([multiprocessing.current_process()]) - before


def test_who_stands_ready_is_awake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that the machine has no time for is not still: the bytes that it moves are on their way."""
    for thread, (ran, stood) in enumerate([(1, 2), (3, 4)]):
        (tmp_path / f"proc/7/task/{thread}").mkdir(parents=True)
        (tmp_path / f"proc/7/task/{thread}/schedstat").write_text(f"{ran}000000000 {stood}000000000 9\n")
    monkeypatch.setattr(silence, "Path", lambda path: tmp_path / path.removeprefix("/"))
    assert awake([SimpleNamespace(pid=7)]) == pytest.approx(1 + 2 + 3 + 4)  # type: ignore[list-item]


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
