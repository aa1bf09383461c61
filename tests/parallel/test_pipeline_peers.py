"""The same stages, micro-batches and loss under torch.distributed.pipelining: equal losses, equal gradients."""

import pytest
import torch
from pipeline_models import WIDTH, build, gradients, loss, same
from torch import Tensor
from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage
from worlds import ZB_V, run

from refimpl.comm.group import Group
from refimpl.parallel.pipeline.runner import Pipeline
from refimpl.parallel.pipeline.schedules.named import schedule

MICRO = 4  # a power of two: torch divides the sum of the gradients, we each loss


def data() -> tuple[Tensor, Tensor]:
    torch.manual_seed(3)
    return torch.randn(MICRO * 2, 3, WIDTH), torch.randn(MICRO * 2, 3)


def both(name: str, cls: str) -> tuple[dict[int, dict[str, str]], list[float], list[float]]:
    """What differs in each stage's gradients; our losses, and torch's on the rank that has the last stage."""
    group = Group.world()
    table = schedule(name, group.size, MICRO)
    held = table.holds(group.rank)
    ours = {s: build(table.stages, s, "tensors") for s in held}
    theirs = {s: build(table.stages, s, "tensors") for s in held}
    x, y = data()
    pipeline = Pipeline(table, ours, group, loss)
    losses = pipeline.everywhere(pipeline.run(x.chunk(MICRO), y.chunk(MICRO)))

    parts = [PipelineStage(theirs[s], s, table.stages, torch.device("cpu")) for s in held]
    single = cls in ("ScheduleGPipe", "Schedule1F1B")
    peer = getattr(pipelining, cls)(parts[0] if single else parts, n_microbatches=MICRO, loss_fn=loss)
    found: list[Tensor] = []
    first, last = 0 in held, table.stages - 1 in held
    peer.step(*([x] if first else []), **({"target": y, "losses": found} if last else {}))
    different = {s: same(gradients(ours[s]), gradients(theirs[s])) for s in held}
    return different, losses.tolist(), [found_.item() for found_ in found]


@pytest.mark.parametrize(
    ("name", "cls"),
    [
        ("gpipe", "ScheduleGPipe"),
        ("1f1b", "Schedule1F1B"),
        ("interleaved", "ScheduleInterleaved1F1B"),
        ("zb-h1", "ScheduleInterleavedZeroBubble"),
        pytest.param("zb-v", "ScheduleZBVZeroBubble", marks=ZB_V),
        pytest.param("dualpipe-v", "ScheduleDualPipeV", marks=ZB_V),
    ],
)
def test_torch_computes_the_same(name: str, cls: str) -> None:
    for different, losses, theirs in run(both, name, cls):
        assert {s: d for s, d in different.items() if d} == {}
        assert theirs in ([], losses)
