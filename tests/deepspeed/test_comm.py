"""deepspeed.comm: every collective against what it must give, at 1 to 3 ranks; joining; a world without a launcher."""

import datetime
import os
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as torch_dist
import worlds
from foreign import run_python
from torch import Tensor, nn

from refimpl import deepspeed
from refimpl.deepspeed import comm as dist
from refimpl.deepspeed.runtime.comm.coalesced_collectives import reduce_scatter_coalesced
from refimpl.deepspeed.utils import groups
from refimpl.ranks import cards


def row(rank: int, size: int) -> Tensor:
    """What rank has: [size], element i tells rank and i."""
    return torch.arange(size, dtype=torch.float32) + 10 * rank


def reductions() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    total = torch.stack([row(r, size) for r in range(size)]).sum(0)
    x = row(rank, size)
    dist.all_reduce(x, prof=True, log_name="x", debug="y")
    assert x.equal(total)
    x = row(rank, size)
    dist.all_reduce(x, op=dist.ReduceOp.MAX, async_op=True).wait()
    assert x.equal(row(size - 1, size))
    x = row(rank, size)
    dist.reduce(x, dst=0)
    assert rank or x.equal(total)
    one = torch.zeros(1)
    dist.reduce_scatter_tensor(one, row(rank, size))
    assert one.equal(total[rank : rank + 1])
    dist.TorchBackend.get_reduce_scatter_function()(one.zero_(), row(rank, size))
    assert one.equal(total[rank : rank + 1])
    dist.reduce_scatter(one, list(row(rank, size).split(1)))
    assert one.equal(total[rank : rank + 1])
    xs = [row(rank, size), row(rank, size)]
    dist.all_reduce_coalesced(xs)
    assert all(x.equal(total) for x in xs)
    dist.all_reduce_coalesced(most := [row(rank, size), row(rank, size)], op=dist.ReduceOp.MAX)
    assert all(x.equal(row(size - 1, size)) for x in most)


def exchanges() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    everyone = torch.stack([row(r, size) for r in range(size)])
    rows = [torch.zeros(size) for _ in range(size)]
    dist.all_gather(rows, row(rank, size))
    flat = torch.zeros(size * size)
    dist.all_gather_into_tensor(flat, row(rank, size))
    assert torch.stack(rows).equal(everyone)
    assert flat.equal(everyone.flatten())
    dist.all_gather_coalesced([flat.zero_()], [row(rank, size)])
    assert flat.equal(everyone.flatten())
    dist.TorchBackend.get_all_gather_function()(flat.zero_(), row(rank, size))
    assert flat.equal(everyone.flatten())
    column = torch.zeros(size)
    dist.all_to_all_single(column, row(rank, size))
    assert column.equal(everyone[:, rank])
    if worlds.TORCH >= (2, 12):  # 2.11's gloo has no exchange of lists
        columns = [torch.zeros(1) for _ in range(size)]
        dist.all_to_all(columns, list(row(rank, size).split(1)))
        assert torch.cat(columns).equal(everyone[:, rank])
    x = row(rank, size)
    dist.broadcast(x, src=size - 1)
    assert x.equal(everyone[-1])
    dist.gather(row(rank, size), rows if rank == 0 else None, dst=0)
    assert rank or torch.stack(rows).equal(everyone)
    dist.scatter(x, list(everyone.unbind()) if rank == 0 else None, src=0)
    assert x.equal(everyone[rank])
    objects: list[object] = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": r} for r in range(size)]
    objects = [rank] if rank == 0 else [None]
    dist.broadcast_object_list(objects, src=0)
    assert objects == [0]
    dist.barrier()
    dist.monitored_barrier(timeout=datetime.timedelta(seconds=30))


def point_to_point() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    x = torch.zeros(size)
    if size > 1 and rank < 2:
        if rank == 0:
            dist.send(row(0, size), 1)
            dist.isend(row(0, size), 1).wait()
        else:
            dist.recv(x, 0)
            assert x.equal(row(0, size))
            dist.irecv(x.zero_(), 0).wait()
            assert x.equal(row(0, size))
    pair = dist.new_group(ranks=[0, size - 1] if size > 1 else [0])
    assert dist.get_rank(pair) == {0: 0, size - 1: min(1, size - 1)}.get(rank, -1)
    assert dist.get_world_size(dist.get_world_group()) == size
    if dist.get_rank(pair) >= 0:
        assert dist.get_global_rank(pair, dist.get_world_size(pair) - 1) == size - 1
        assert dist.get_all_ranks_from_group(pair) == sorted({0, size - 1})
    assert (groups._get_data_parallel_rank(), groups._get_data_parallel_world_size()) == (rank, size)
    assert groups._get_sequence_parallel_world_size() == groups._get_model_parallel_world_size() == 1
    assert torch_dist.get_world_size(groups._clone_world_group()) == size


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_collectives(ranks: int) -> None:
    for job in (reductions, exchanges, point_to_point):
        worlds.run(job, ranks=ranks)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process that is not joined to anything, before and after."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "REFIMPL_DEVICE"):
        monkeypatch.setenv(name, "")  # so that what joining sets is taken back
        monkeypatch.delenv(name)
    yield
    if torch_dist.is_initialized():
        torch_dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def own_pair() -> tuple[float, float]:
    """The first and the last stage of each of two pipelines, as diffusion-pipe asks for them."""
    rank = dist.get_rank()
    pair, x = dist.new_group(ranks=[rank % 2, rank % 2 + 2]), torch.tensor(float(rank))
    dist.all_reduce(x, group=pair)
    alone = dist.new_group([rank], use_local_synchronization=True)
    dist.all_reduce(y := torch.tensor(float(rank)), group=alone)
    return x.item(), y.item()


def test_ranks_that_ask_for_different_groups_at_once_get_their_own() -> None:
    assert worlds.run(own_pair, ranks=4) == [(2, 0), (4, 1), (2, 2), (4, 3)]


def test_a_process_without_a_launcher_is_rank_0_of_1() -> None:
    assert (dist.get_rank(), dist.get_world_size(), dist.get_local_rank(), dist.get_world_group()) == (0, 1, 0, None)
    with pytest.raises(RuntimeError, match="dist_init_required=False"):
        dist.init_distributed(dist_init_required=False)
    dist.init_distributed(timeout=datetime.timedelta(seconds=30))
    dist.init_distributed()  # once is enough
    assert dist.is_initialized()
    assert (dist.get_rank(), dist.get_world_size(), os.environ["LOCAL_RANK"]) == (0, 1, "0")
    reductions()
    exchanges()


@pytest.mark.usefixtures("alone")
def test_a_script_without_a_launcher_asks_torch_for_its_rank_after_initialize() -> None:
    deepspeed.initialize(model=nn.Linear(2, 2), config={"train_batch_size": 1})
    assert (torch_dist.get_rank(), torch_dist.get_world_size()) == (0, 1)


@pytest.mark.usefixtures("alone")
def test_one_of_several_ranks_does_not_go_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(RuntimeError, match=r"rank 1 of 2, .* has not joined the others"):
        dist.init_distributed()


@pytest.mark.usefixtures("alone")
def test_nccl_without_a_gpu_becomes_gloo_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.warns(UserWarning, match="gloo"):
        dist.init_distributed(dist_backend="nccl")
    assert torch_dist.get_backend() == "gloo"


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(("gpus", "taken"), [(0, "gloo"), (1, "cpu:gloo,cuda:nccl")])
def test_a_library_for_each_device(gpus: int, taken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As DeepSpeed's own example of ZeRO-3 asks for it."""
    made = []
    monkeypatch.delenv("REFIMPL_DEVICE", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(cards, "card", str)
    monkeypatch.setattr(torch_dist, "init_process_group", lambda backend, **more: made.append(backend))
    dist.init_distributed(dist_backend="cuda:nccl,cpu:gloo")
    assert made == [taken]


@pytest.mark.usefixtures("alone")
def test_a_rank_that_is_not_joined_yet_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match="init_distributed"):
        dist.get_rank()


def test_ranks_that_name_a_meeting_point_themselves(tmp_path: object) -> None:
    code = (
        "import sys, subprocess, torch, deepspeed.comm as dist\n"
        "rank = int(sys.argv[2])\n"
        "more = [sys.executable, '-m', 'refimpl.as_deepspeed', *sys.argv[:2], '1']\n"
        "other = None if rank else subprocess.Popen(more)\n"
        "dist.init_distributed(init_method=sys.argv[1], rank=rank, world_size=2)\n"
        "x = torch.ones(1)\n"
        "dist.all_reduce(x)\n"
        "assert x.item() == 2 and dist.get_rank() == rank\n"
        "assert other is None or other.wait(60) == 0\n"
        "print('met')\n"
    )
    script = f"{tmp_path}/script.py"
    with open(script, "w") as file:
        file.write(code)
    said = run_python("-m", "refimpl.as_deepspeed", script, f"file://{tmp_path}/meet", "0")
    assert said.split() == ["met", "met"]


def elsewhere() -> None:
    """As on NCCL, with gloo in its place."""
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.new_group(backend="cuda:gloo")
    x, rows, other = torch.ones(size), [torch.ones(1) for _ in range(size)], 1 - rank
    for call, args in (
        (dist.all_reduce, (x,)),
        (dist.inference_all_reduce, (x,)),
        (dist.all_gather, (rows, x[:1])),
        (dist.all_gather_into_tensor, (x, x[:1])),
        (dist.reduce_scatter_tensor, (x[:1], x)),
        (dist.reduce_scatter, (x[:1], rows)),
        (dist.all_to_all_single, (x, x)),
        (dist.all_to_all, (rows, rows)),
        (dist.broadcast, (x, 0)),
        (dist.reduce, (x, 0)),
        (dist.gather, (x[:1], rows if rank == 0 else None)),
        (dist.scatter, (x[:1], rows if rank == 0 else None)),
        (dist.send, (x, other)),
        (dist.recv, (x, other)),
        (dist.isend, (x, other)),
        (dist.irecv, (x, other)),
        (dist.all_reduce_coalesced, ([x, x],)),
        (dist.all_gather_coalesced, ([x], [x[:1]])),
    ):
        with pytest.raises(ValueError, match=r"is on cpu, and .* on cuda alone: pass tensor\.to"):
            call(*args, group=group)
    with pytest.raises(ValueError, match=r"irecv: tensor is on cpu"):
        dist.batch_isend_irecv([dist.P2POp(dist.irecv, x, other, group)])
    only = dist.new_group([0])
    dist.all_reduce(x, group=only)  # torch's warning, on the rank that is not in it, says enough


def test_a_tensor_on_a_device_that_the_group_does_not_serve_is_refused() -> None:
    worlds.run(elsewhere, ranks=2, device="cpu")


def coalesced() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for dtype in (torch.float32, torch.float16):
        every = [[row(r, n).to(dtype).view(-1, 1) for n in (6, 7, 1, 0)] for r in range(size)]
        parts = reduce_scatter_coalesced(every[rank], dist.get_world_group())
        for i, part in enumerate(parts):
            mean = torch.stack([one[i].double() for one in every]).mean(0).view(-1)
            c = -(-len(mean) // size)
            assert torch.allclose(part.double(), mean[rank * c : (rank + 1) * c], rtol=2e-3)
            assert part.dtype == dtype


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_each_rank_gets_its_part_of_the_mean_of_many_tensors(ranks: int) -> None:
    worlds.run(coalesced, ranks=ranks, device="cpu")
