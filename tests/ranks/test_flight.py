"""A rank that computes, with a collective behind it that never ended: as a GPU's ranks hang."""

import ctypes
import re
import resource
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from refimpl import launch
from refimpl.ranks import flight


def queues_and_goes_on() -> None:
    torch.ones(1).sum().item()
    x = torch.ones(4)
    dist.all_reduce(x)
    if dist.get_rank() == 0:
        dist.all_reduce(x, async_op=True)
        dist.broadcast(x, 0, async_op=True)
    while True:
        time.sleep(0.01)


def line_of(text: str) -> str:
    lines = Path(__file__).read_text().splitlines()
    return f"{__file__}:{next(n for n, line in enumerate(lines, 1) if text in line)}"


def test_a_rank_that_computes_says_what_it_still_waits_for() -> None:
    with pytest.raises(launch.RankTimeout) as caught:
        launch.run(queues_and_goes_on, timeout=2, device="cpu")
    _, first, second = str(caught.value).splitlines()
    told = f"; its oldest unfinished collective is all_reduce, from {line_of('x, async_op=True)')}"
    assert first.startswith("  rank 0 computes at ")
    assert first.endswith(told)
    assert second.startswith("  rank 1 computes at ")
    assert "collective" not in second


def test_an_answer_after_the_worlds_end_is_nobodys(tmp_path: Path) -> None:
    """Seen in chapter 06: a thread's traceback on stderr, of a rank whose folder had just gone."""
    flight.write(tmp_path / "gone" / "flight0")


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA is Linux's")
def test_a_rank_without_memory_for_an_answer_says_where_it_stands() -> None:
    """The thread that is asked could begin no other, ended, and took the rank and the folder of all with it."""

    def full() -> None:
        used = int(re.findall(r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text())[0]) * 1024
        resource.setrlimit(resource.RLIMIT_DATA, (used + 100_000, resource.RLIM_INFINITY))
        while True:
            pass

    with pytest.raises(launch.RankTimeout) as caught:
        launch.run(full, timeout=1, device="cpu")
    assert str(caught.value).count("computes at ") == 2


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA is Linux's")
def test_a_rank_without_memory_says_so() -> None:
    """It had none to put its error into words: the line was missing, or it ended with a traceback of its own."""

    def fill() -> None:
        ctypes.CDLL(None).mallopt(-3, 1 << 16)  # what is larger is given back at once
        used = int(re.findall(r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text())[0]) * 1024
        resource.setrlimit(resource.RLIMIT_DATA, (used + 10_000_000, resource.RLIM_INFINITY))
        held = []
        for size in (1 << 18, 1 << 15, 1 << 12, 1 << 8):
            with suppress(RuntimeError, MemoryError):  # Python's own, of a tensor's object
                while True:
                    held.append(torch.empty(size))
        torch.empty(1 << 20)

    with pytest.raises(launch.RankError, match=r"raised RuntimeError(.|\n)*torch\.empty\(1 << 20\)"):
        launch.run(fill, ranks=2, device="cpu")
