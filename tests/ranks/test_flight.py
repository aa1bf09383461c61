"""A rank that computes, with a collective behind it that never ended: as a GPU's ranks hang."""

import time
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
