"""Checkpoints' inputs on their way to the host and back: in order, and without a wait (see paper.py)."""

from functools import partial
from unittest.mock import patch

import paper
import pytest
import torch
from stream_log import Recorder, Watch
from torch import Tensor, nn

from refimpl import launch
from refimpl.activation.arena import Contiguous
from refimpl.activation.checkpoint import Checkpoint
from refimpl.activation.home import Home, Host, Partitioned
from refimpl.comm.group import Group

pytestmark = pytest.mark.xdist_group("pretend")
LAYERS = 3


def home_of(name: str, group: Group) -> Home:
    host = Host() if "host" in name else Contiguous(LAYERS)
    return Partitioned(group, host if "+" in name else None) if "shared" in name else host


class Side(Host):
    """Copies back on a stream of its own, which does not wait for the copy there."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder, self.stream = recorder, recorder.new()

    def get(self, packed: object) -> Tensor:
        with self.recorder.use(self.stream):
            return super().get(packed)  # type: ignore[arg-type]


def checkpointed(name: str, group: Group, recorder: Recorder, watch: Watch) -> None:
    layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(LAYERS)).to(paper.DEVICE)
    with patch.object(Partitioned, "_compare"):  # once, and it waits for an answer
        checkpoint = Checkpoint(Side(recorder) if name == "unordered" else home_of(name, group))
        batch = torch.ones(4, 8, device=paper.DEVICE)
        watch.asked.clear()
        for _ in range(2):
            x = batch * 2
            for layer in layers:
                x = checkpoint(lambda x, layer=layer: torch.tanh(layer(x)), x)
            x.square().mean().backward()


@pytest.mark.parametrize("name", ["host", "shared", "shared + host", "contiguous"])
def test_inputs_come_back_behind_their_leaving(name: str, on_paper: launch.World) -> None:
    seen = on_paper.call(paper.seen, partial(checkpointed, name))[0]
    assert (seen.races, seen.asked) == ([], {})


def test_an_order_that_is_missing_is_seen(on_paper: launch.World) -> None:
    assert on_paper.call(paper.seen, partial(checkpointed, "unordered"))[0].races != []
