"""The flat layout for any parameters and any number of ranks, drawn by hypothesis: nothing lost, nothing twice."""

from itertools import pairwise

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn

from refimpl.comm.group import Group
from refimpl.zero.flat import ALIGN, ALIGN_PARAMETER, Bucket, cut_into_buckets, round_up
from refimpl.zero.gather.owners import joined, owners

SHAPES = st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), min_size=1, max_size=6)
RANKS = st.integers(1, 5)
DTYPES = (torch.float32, torch.bfloat16)


class OneOf(Group):
    """One rank of `size`, seen without the others: all of them have the same values to begin with."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(None)
        self.rank, self.size = rank, size

    def broadcast(self, x: Tensor, root: int = 0, *, async_op: bool = False, tag: str = "") -> None:  # type: ignore[override]
        """What rank 0 has is here already."""


def parameters(shapes: list[tuple[int, ...]]) -> list[nn.Parameter]:
    """Every element another number."""
    params, start = [], 1
    for shape in shapes:
        numel = torch.Size(shape).numel()
        params.append(nn.Parameter(torch.arange(start, start + numel, dtype=torch.float32).view(shape)))
        start += numel
    return params


def on_every_rank(shapes: list[tuple[int, ...]], ranks: int) -> list[Bucket]:
    return [Bucket(parameters(shapes), OneOf(rank, ranks)) for rank in range(ranks)]


@given(st.integers(0, 10**12), st.integers(1, 10**6))
def test_rounding_up_adds_less_than_one_multiple(n: int, multiple: int) -> None:
    rounded = round_up(n, multiple)
    assert rounded % multiple == 0
    assert n <= rounded < n + multiple


@given(SHAPES, RANKS)
def test_parameters_lie_one_behind_the_other_and_the_rest_is_zero(shapes: list[tuple[int, ...]], ranks: int) -> None:
    expected = parameters(shapes)
    numel = sum(p.numel() for p in expected)
    for bucket in on_every_rank(shapes, ranks):
        assert bucket.full[bucket.full != 0].tolist() == list(range(1, numel + 1))
        assert not bucket.full[bucket.padding].any()
        assert len(bucket.padding) + numel == bucket.padded
        assert all(at % ALIGN_PARAMETER == 0 for at in bucket.offset.values())
        assert bucket.padded % (ranks * ALIGN) == 0
        assert bucket.padded - numel < ranks * ALIGN + ALIGN_PARAMETER * len(shapes)
        for p, original in zip(bucket.params, expected, strict=True):
            assert torch.equal(p, original)
            assert p.numel() == 0 or p.untyped_storage().data_ptr() == bucket.full.untyped_storage().data_ptr()


@given(SHAPES, RANKS)
@example([(0,)], 2)
def test_the_shards_of_all_ranks_are_the_whole(shapes: list[tuple[int, ...]], ranks: int) -> None:
    buckets = on_every_rank(shapes, ranks)
    shards = [bucket.shard(bucket.full) for bucket in buckets]
    assert {len(shard) for shard in shards} == {buckets[0].padded // ranks}
    assert torch.equal(torch.cat(shards), buckets[0].full)
    assert all(shard.storage_offset() % ALIGN == 0 for shard in shards)  # so also eight bytes at a time can be read


@given(SHAPES, RANKS)
def test_the_parts_on_all_ranks_are_the_parameter(shapes: list[tuple[int, ...]], ranks: int) -> None:
    buckets = on_every_rank(shapes, ranks)
    for i, original in enumerate(parameters(shapes)):
        parts = []
        for rank, bucket in enumerate(buckets):
            p = bucket.params[i]
            start, end = bucket.span(p)
            assert 0 <= start <= end <= bucket.padded // ranks
            assert [other.span(other.params[i], rank) for other in buckets] == [(start, end)] * ranks
            part = bucket.part(bucket.shard(bucket.full), p)
            assert torch.equal(part, bucket.shard(bucket.full)[start:end])
            assert torch.equal(bucket.cut(original.detach(), p, len(part)), part)
            assert torch.equal(bucket.part(bucket.full, p).view(p.shape), bucket.piece(bucket.full, p))
            assert torch.equal(bucket.pieces(bucket.full)[i], bucket.piece(bucket.full, p))
            parts.append(part)
        assert torch.equal(torch.cat(parts), original.flatten())


@st.composite
def models(draw: st.DrawFn) -> tuple[list[nn.Parameter], dict[nn.Parameter, int]]:
    """Parameters of several dtypes, in several optimizer groups."""
    kinds = draw(st.lists(st.tuples(st.integers(1, 6), st.sampled_from(DTYPES), st.integers(0, 1)), min_size=1))
    params = [nn.Parameter(torch.zeros(numel, dtype=dtype)) for numel, dtype, _ in kinds]
    return params, {p: group for p, (_, _, group) in zip(params, kinds, strict=True)}


@given(models(), st.integers(1, 15))
def test_buckets_hold_every_parameter_once_in_order_and_within_the_size(
    model: tuple[list[nn.Parameter], dict[nn.Parameter, int]], size: int
) -> None:
    params, group_of = model
    turn = {p: i for i, p in enumerate(reversed(params))}  # of backward
    buckets = cut_into_buckets(params, group_of, size)
    assert sorted(turn[p] for bucket in buckets for p in bucket) == list(range(len(params)))
    for bucket in buckets:
        assert [turn[p] for p in bucket] == sorted(turn[p] for p in bucket)
        assert len({(group_of[p], p.dtype) for p in bucket}) == 1
        assert len(bucket) == 1 or sum(p.numel() for p in bucket) <= size
    assert all(turn[a[-1]] < turn[b[-1]] for a, b in pairwise(buckets)), "in the order in which backward fills them"


@given(models(), st.integers(1, 15))
def test_no_bucket_ends_while_the_next_parameter_fits(
    model: tuple[list[nn.Parameter], dict[nn.Parameter, int]], size: int
) -> None:
    params, group_of = model
    turn = {p: i for i, p in enumerate(reversed(params))}
    for a in (buckets := cut_into_buckets(params, group_of, size)):
        alike = [b for b in buckets if (group_of[b[0]], b[0].dtype) == (group_of[a[0]], a[0].dtype)]
        later = [b for b in alike if turn[b[0]] > turn[a[0]]]
        if later:
            following = min(later, key=lambda b: turn[b[0]])
            assert sum(p.numel() for p in a) + following[0].numel() > size


@given(st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=5), min_size=1, max_size=4), st.integers(0, 120))
def test_neighbours_join_as_long_as_they_fit(widths: list[list[int]], most: int) -> None:
    """Rows of layers: a run is of one row, in order, within the size, and no shorter than it may be."""
    model = nn.ModuleList(nn.Sequential(*(nn.Linear(w, w) for w in row)) for row in widths)
    owner = owners(model, set())
    first = joined(model, owner, most)
    sizes = {path: sum(p.numel() for p in model.get_submodule(path).parameters()) for path in first}
    assert set(first) == set(owner.values())
    runs: dict[str, list[str]] = {}
    for path, of in first.items():
        runs.setdefault(of, []).append(path)
    assert [path for run in runs.values() for path in run] == list(dict.fromkeys(owner.values()))
    for run in runs.values():
        assert len({path.split(".")[0] for path in run}) == 1
        assert len(run) == 1 or sum(sizes[path] for path in run) <= most
    for one, other in pairwise(runs.values()):
        fits = sum(sizes[path] for path in [*one, other[0]]) <= most
        assert not (fits and one[0].split(".")[0] == other[0].split(".")[0])


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch's own
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:FutureWarning")  # its class from torch 2.14 on
def test_a_scripted_module_is_refused_by_name() -> None:
    """torch gives it no hooks, and says so of none in particular."""
    model = nn.Sequential(nn.Linear(2, 2), torch.jit.script(nn.Linear(2, 2)))
    with pytest.raises(TypeError, match=r"1 is TorchScript.* stage 2"):
        owners(model, set())
