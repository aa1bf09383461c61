"""What travels between processes: a tensor's own elements, and not the buffer that it is cut out of."""

import json
import os
import pickle
from collections.abc import ValuesView
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from worlds import run

from refimpl.comm.group import Group
from refimpl.comm.objects import to_everyone
from refimpl.ranks import travel
from refimpl.ranks.travel import dumps, loads

FLAT = torch.arange(100_000.0)
CUT = {"row": FLAT[7:19], "turned": FLAT[:20].view(4, 5).t(), "sparse": FLAT[::1000], "none": FLAT[:0]}


@pytest.fixture(params=["cloudpickle", "plain pickle"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "plain pickle":
        monkeypatch.setattr(travel, "by_value", None)


@pytest.mark.parametrize("name", CUT)
def test_a_part_of_a_buffer_travels_alone(name: str, way: None) -> None:
    message = dumps([CUT[name]] * 2)
    assert len(message) < 2_000 < len(pickle.dumps(CUT[name]))
    first, second = loads(message)
    assert torch.equal(first, CUT[name])
    assert first is second


def test_so_do_parameters_and_what_requires_a_gradient(way: None) -> None:
    p, x = nn.Parameter(FLAT[:5], requires_grad=False), FLAT[5:9].detach().requires_grad_()
    message = dumps((p, x))
    assert len(message) < 2_000
    q, y = loads(message)
    assert type(q) is nn.Parameter
    assert (q.requires_grad, y.requires_grad) == (False, True)
    assert torch.equal(q, p)
    assert torch.equal(x, y)


@pytest.mark.parametrize("own", [ValuesView, os.path.join, json.JSONDecoder, ThreadPoolExecutor, dist.ReduceOp])
def test_what_any_process_has_travels_by_its_name(own: object, way: None) -> None:
    """No finder knows Python 3.14's collections.abc, nor torch._C._distributed_c10d."""
    assert len(dumps(own)) < 100
    assert loads(dumps(own)) is own


SPARSE = pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # of torch 2.11


@pytest.mark.parametrize(
    "x",
    [
        torch.zeros(1).expand(9),
        pytest.param(torch.eye(3).to_sparse(), marks=SPARSE),
        torch.zeros(3, device="meta"),
        torch.zeros(2, dtype=torch.bool),
    ],
)
def test_other_tensors_travel_as_torch_has_it(x: Tensor, way: None) -> None:
    y = loads(dumps(x))
    assert (y.shape, y.dtype, y.layout, y.device) == (x.shape, x.dtype, x.layout, x.device)
    assert x.layout != torch.strided or y.stride() == x.stride()


def test_gathered_objects_have_no_buffers_with_them() -> None:
    def work() -> tuple[int, bool]:
        sizes = []

        def counted(handle: dist.ProcessGroup, message: bytes) -> list[bytes]:
            sizes.append(len(message))
            return to_everyone(handle, message)

        group = Group.world()
        mine = torch.arange(100_000.0)[group.rank : group.rank + 3]
        with patch("refimpl.comm.control.to_everyone", counted):
            said = group.all_gather_object({"x": mine})
        return sizes[0], all(torch.equal(one["x"], torch.arange(rank, rank + 3.0)) for rank, one in enumerate(said))

    for size, right in run(work, ranks=3):
        assert size < 2_000
        assert right
