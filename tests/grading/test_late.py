"""What a learner does with memory too early is told in every run, not only where the transfer is slow."""

from pathlib import Path

import pytest
from answers import graded

RESTS = "until work.wait() it must rest"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (
            "work = group.all_reduce(x, async_op=True)\ny = x.clone()\nwork.wait()\nreturn y",
            "not yet: wait() first",
        ),
        ("work = group.all_reduce(x, async_op=True)\nx += 1\nwork.wait()\nreturn x", RESTS),
        (
            "y, out = torch.cat([x, x]), torch.empty(2)\nwork = group.reduce_scatter(out, y, 'mean', async_op=True)\n"
            "y.zero_()\nwork.wait()\nreturn out * 2",
            f"memory changed while its reduce_scatter was under way in it: {RESTS}",
        ),
        (
            "y, out = x.clone(), torch.empty(2)\nwork = group.send(y, 1 - group.rank, async_op=True)\n"
            "group.recv(out, 1 - group.rank)\ny += out\nwork.wait()\nreturn y",
            "memory changed while its send to",
        ),
        (
            "out = torch.zeros(2)\nwork = group.recv(out, 1 - group.rank, async_op=True)\n"
            "group.send(x, 1 - group.rank)\ny = x + out\nwork.wait()\nreturn y",
            "not yet: wait() first",
        ),
    ],
)  # fmt: skip
def test_it_is_told(tmp_path: Path, body: str, said: str) -> None:
    assert said in graded(tmp_path, body).text


@pytest.mark.parametrize(
    "body",
    [
        "work = group.all_reduce(x, async_op=True)\nwork.wait()\nwork.wait()\nreturn x",
        # The result may lie in what is sent.
        "y = torch.cat([x, x])\nout = y.view(2, -1)[group.rank]\ngroup.reduce_scatter(out, y, async_op=True).wait()\n"
        "return out",
        # Both at once, through other memory.
        "out = torch.empty(2)\nworks = [group.recv(out, 1 - group.rank, async_op=True),"
        " group.send(x, 1 - group.rank, async_op=True)]\nfor work in works:\n    work.wait()\nreturn x + out",
    ],
)
def test_who_waits_is_right(tmp_path: Path, body: str) -> None:
    assert graded(tmp_path, body).outcome == "pass"


def test_a_transfer_that_nobody_can_begin_is_refused_as_ever(tmp_path: Path) -> None:
    said = graded(tmp_path, "group.send(x, 7, async_op=True)").text
    assert "to=7, but this group has 2 ranks" in said
