"""Tensors of any dtype and shape: moved bit for bit by every way, added where torch can add them, else refused."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import worlds
from torch import Tensor

from refimpl.comm import halving, ring, tree
from refimpl.comm.composed import Composed
from refimpl.comm.group import Group
from refimpl.comm.native import Native
from refimpl.comm.streams import Streams

UNKNOWN_TO_GLOO = [torch.int16, torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2]
ALGORITHMS: list[Any] = [ring, halving]


def given(rank: int, n: int, dtype: torch.dtype) -> Tensor:
    """[n] of bytes that a rank draws: any of them is a number of an integer or float8 dtype."""
    draw = torch.Generator().manual_seed(rank)
    return torch.randint(0, 256, (n * dtype.itemsize,), generator=draw, dtype=torch.uint8).view(dtype)


def same(x: Tensor, expected: Tensor) -> bool:
    return torch.equal(x.view(torch.uint8), expected.view(torch.uint8))


def moved(group: Group) -> None:
    rank, ranks = group.rank, group.size
    for dtype in (*UNKNOWN_TO_GLOO, torch.bool, torch.complex128):
        rows = [given(r, 5 * ranks, torch.uint8 if dtype == torch.bool else dtype) for r in range(ranks)]
        rows = [row % 2 == 0 for row in rows] if dtype == torch.bool else rows
        x, whole = rows[rank], torch.cat(rows)
        for gather in (group.all_gather, *(partial(by.all_gather, group) for by in ALGORITHMS)):
            out = torch.empty_like(whole)
            gather(out, x)
            assert same(out, whole), (dtype, gather)
        out = torch.empty_like(x)
        group.all_to_all(out, x)
        assert same(out, torch.cat([row.chunk(ranks)[rank] for row in rows])), dtype
        splits = [2 * (r != 1) for r in range(ranks)]  # rank 1 gets nothing
        out = torch.empty(0 if rank == 1 else 2 * ranks, dtype=dtype)
        received = [len(out) // ranks] * ranks
        group.all_to_all(out, x[: sum(splits)], out_splits=received, in_splits=splits)
        mine = [row[: sum(splits)].split(splits)[rank] for row in rows]
        assert same(out, torch.cat(mine)), dtype
        out = x.clone()
        group.broadcast(out, ranks - 1)
        assert same(out, rows[-1]), dtype
        group.send_recv(x, (rank + 1) % ranks, out, (rank - 1) % ranks)
        assert same(out, rows[rank - 1]), dtype


def by_each() -> None:
    for transport in ("gloo", worlds.NEAR):
        moved(Group.world(transport=transport))
    moved(Group(dist.group.WORLD, transport=Native(dist.group.WORLD, "nccl", Streams())))  # its way, spoken by gloo


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_dtype_is_moved_bit_for_bit(ranks: int) -> None:
    worlds.run(by_each, ranks=ranks, device="cpu")


def widened() -> list[float]:
    group = Group(dist.group.WORLD, transport=Native(dist.group.WORLD, "nccl", Streams()))
    group.reduce_scatter(out := torch.empty(2), torch.arange(4, dtype=torch.bfloat16))
    return out.tolist()


def test_a_library_that_converts_nothing_reduces_into_a_wider_dtype_too() -> None:
    assert worlds.run(widened, ranks=2, device="cpu") == [[0.0, 2.0], [4.0, 6.0]]


def native() -> None:
    """What NCCL has no number for, its way spoken by gloo."""
    group = Group(dist.group.WORLD, transport=Native(dist.group.WORLD, "nccl", Streams()))
    short = torch.ones(4, dtype=torch.int16)
    refused = r"NCCL cannot add torch.int16: reduce x\.int\(\), or ask for .*deterministic=True"
    with pytest.raises(ValueError, match=f"all_reduce: {refused}"):
        group.all_reduce(short)
    with pytest.raises(ValueError, match=f"reduce_scatter: {refused}"):
        group.reduce_scatter(short[:2], short)
    assert not group.ledger.events
    group.reduce_scatter(out := torch.empty(1, dtype=torch.complex64), torch.tensor([1 + 2j, 3 - 4j]))
    assert out.item() == [2 + 4j, 6 - 8j][group.rank]
    group.all_reduce(out)
    assert out.item() == 8 - 4j
    exact = Group(dist.group.WORLD, transport=Composed(dist.group.WORLD, "nccl", Streams()))  # of deterministic=True
    exact.all_reduce(short)
    assert short.tolist() == [2] * 4


def test_what_nccl_cannot_add_is_refused_before_it_is_sent() -> None:
    worlds.run(native, ranks=2, device="cpu")


def added() -> None:
    for transport in ("gloo", worlds.NEAR):
        group = Group.world(transport=transport)
        for reduce in (group.all_reduce, *(partial(by.all_reduce, group) for by in (*ALGORITHMS, tree))):
            x = torch.arange(7, dtype=torch.int16) * (group.rank + 1)
            reduce(x)
            assert torch.equal(x, torch.arange(7, dtype=torch.int16) * sum(range(1, group.size + 1)))
            for dtype in (torch.float8_e4m3fn, torch.uint32):
                # One element: only the rank whose chunk it is would notice, and the others wait for it.
                with pytest.raises(ValueError, match=rf"all_reduce: torch cannot add {dtype}: reduce x\.float\(\)"):
                    reduce(torch.zeros(1, dtype=dtype))


def test_integers_of_any_size_are_added_and_what_has_no_sum_is_refused_on_every_rank() -> None:
    worlds.run(added, ranks=3, device="cpu")


def shaped() -> None:
    group = Group.world()
    ranks = group.size
    for by in ALGORITHMS:
        for shape in ((), (2, 3), (1, 4), (0, 2)):
            x = torch.full(shape, float(group.rank))
            whole = torch.empty(ranks, *shape)
            by.all_gather(group, whole, x)
            assert torch.equal(whole, torch.stack([torch.full(shape, float(r)) for r in range(ranks)])), (by, shape)
            by.all_gather(group, whole, whole[group.rank])
            part = torch.empty(shape)
            by.reduce_scatter(group, part, whole, "max")
            assert torch.equal(part, torch.full(shape, float(group.rank)))
        with pytest.raises(ValueError, match=r"all_gather: x is torch.int64, out is torch.float32"):
            by.all_gather(group, torch.empty(ranks), torch.ones(1, dtype=torch.int64))
        with pytest.raises(ValueError, match=r"all_gather: x \(3, 2\) is not contiguous"):
            by.all_gather(group, torch.empty(6 * ranks), torch.ones(2, 3).t())
    for by in (*ALGORITHMS, tree):
        with pytest.raises(ValueError, match=r"all_reduce: x \(3, 2\) is not contiguous"):
            by.all_reduce(group, torch.ones(2, 3).t())
        weight = torch.nn.Parameter(torch.ones(2, 3))
        by.all_reduce(group, weight, "mean")
        assert torch.equal(weight, torch.ones(2, 3))


def test_the_algorithms_take_any_shape_as_groups_own_do() -> None:
    worlds.run(shaped, ranks=3, device="cpu")


def inferred(transport: str) -> None:
    """Each collective begun in one mode and waited for in the other, then the group's buffers used in the other."""
    group = Group.world(transport=transport)
    x, ranks = torch.arange(4.0 * group.size), group.size
    calls: list[Callable[[Tensor, Tensor], Any]] = [
        lambda x, out: (group.all_reduce(x, async_op=True), x),
        lambda x, out: (group.reduce_scatter(out[:4], x, async_op=True), out[:4]),
        lambda x, out: (group.all_gather(out, x, async_op=True), out),
        lambda x, out: (group.all_to_all(out[: len(x)], x, async_op=True), out[: len(x)]),
    ]
    for call in calls:
        results = []
        for made, begun, waited in [(0, 0, 0), (1, 1, 0), (0, 0, 1), (1, 0, 0), (0, 1, 0), (0, 0, 0)]:
            with torch.inference_mode(bool(made)):
                mine, out = x.clone(), torch.empty(len(x) * ranks)
            with torch.inference_mode(bool(begun)):
                work, result = call(mine, out)
            with torch.inference_mode(bool(waited)):
                work.wait()
            results.append(result.tolist())
        assert results == results[:1] * len(results)


@pytest.mark.parametrize("transport", ["gloo", worlds.NEAR])
def test_a_collective_begun_in_inference_mode_is_waited_for_outside_it(transport: str) -> None:
    worlds.run(inferred, transport, ranks=2, device="cpu")


def elsewhere() -> None:
    """As in a job of NCCL alone, with gloo in its place: nothing is begun."""
    handle = dist.new_group(backend="cuda:gloo")
    group = Group(handle, device=torch.device("cuda"), streams=Streams())
    x, other = torch.ones(group.size), 1 - group.rank
    calls: list[tuple[Any, tuple[Any, ...]]] = [
        (group.all_reduce, (x,)),
        (group.reduce_scatter, (x[:1], x)),
        (group.all_gather, (x, x[:1])),
        (group.all_gather, (list(x.split(1)), x[:1])),  # type: ignore[no-untyped-call]
        (group.all_to_all, (x, x)),
        (group.broadcast, (x,)),
        (group.send, (x, other)),
        (group.recv, (x, other)),
        (group.send_recv, (x, other, x.clone(), other)),
    ]
    for call, args in calls:
        with pytest.raises(ValueError, match=r'is on cpu, and .* on cuda alone: pass \w+\.to\("cuda"\), or a group'):
            call(*args)
    assert group.ledger.calls() == {}


def test_a_tensor_on_a_device_that_the_group_does_not_serve_is_refused() -> None:
    worlds.run(elsewhere, ranks=2)


def noted(made: list[str], call: Callable[..., Any], *args: Any, **options: Any) -> Any:
    made.append(call.__name__)
    return call(*args, **options)


def swapped() -> list[str]:
    """Ranks 0 and 2 alone, by NCCL's way, which gloo speaks: which of torch's calls they made, in order."""
    world, made = dist.group.WORLD, list[str]()
    group = Group(world, transport=Native(world, "nccl", Streams()))
    with ExitStack() as stack:
        for name in ("isend", "irecv", "batch_isend_irecv"):
            stack.enter_context(patch.object(dist, name, partial(noted, made, getattr(dist, name))))
        if group.rank != 1:
            x, out = torch.full((1 << 20,), float(group.rank)), torch.empty(1 << 20)
            group.send_recv(x, 2 - group.rank, out, 2 - group.rank)
            assert torch.equal(out, 2 - x)
    return made


def test_two_of_several_ranks_swap_without_a_communicator_of_all() -> None:
    """NCCL makes that at a group's first call, for which all must come, where torch is told no device."""
    assert worlds.run(swapped, ranks=3) == [["isend", "irecv"], [], ["irecv", "isend"]]
