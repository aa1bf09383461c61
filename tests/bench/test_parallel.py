"""Splitting beside torch's: all contestants of every heat compute the same losses; the rows are what they say."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import worlds
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from refimpl.bench import parallel
from refimpl.bench.parallel import (
    KINDS,
    OURS,
    PEER,
    Kind,
    Run,
    Workload,
    bubble,
    heat,
    measure,
    pipeline_steps,
    rank_rows,
)
from refimpl.bench.parallel_peers import TorchRing
from refimpl.bench.peers import ALONE
from refimpl.bench.race import Turns
from refimpl.bench.zero import check_same_work
from refimpl.comm.group import Group
from refimpl.parallel.pipeline.schedules.named import schedule

TINY = Workload(
    width=32, layers=4, batch=2, context=8, micro_batches=4, sequence=32, turns=Turns(turns=1, steps=2, warm_up=1)
)
HEATS = [
    pytest.param(axis, kind, 2, marks=worlds.ZB_V if kind in ("zb-v", "dualpipe-v") else ())
    for axis, kinds in KINDS.items()
    for kind in kinds
]


@pytest.mark.parametrize(("axis", "kind", "ranks"), [*HEATS, ("tensor", "sequence", 4), ("pipeline", "1f1b", 4)])
def test_ours_and_torchs_reach_the_same_loss(axis: str, kind: str, ranks: int) -> None:
    runs = worlds.run(heat, axis, kind, TINY, ranks=ranks)
    check_same_work(runs)
    told = [run for run in runs if run.losses[OURS]]
    assert len(told) == (1 if axis == "pipeline" else ranks), "a pipeline's loss is known where its last stage is"
    for run in told:
        assert len(run.losses[OURS]) == len(run.losses[PEER]) == 4
        assert run.losses[OURS][-1] < run.losses[OURS][0], "the weights are updated"
    names = {OURS, PEER} | ({ALONE} if axis == "pipeline" else set())
    assert all(run.times.keys() == names and {len(ms) for ms in run.times.values()} == {2} for run in runs)


class Names(TorchDispatchMode):
    """What is called."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(op.overloadpacket.__name__)
        return op(*args, **kwargs or {})


@pytest.fixture
def fake() -> Iterator[None]:
    """Rank 1 of 2, alone."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    yield
    dist.destroy_process_group()


def test_torchs_ring_calls_the_devices_kernel(fake: None) -> None:
    """On a device that only says what shapes come."""
    q, k, v = (torch.zeros(1, 4, 64, 16, device="meta", requires_grad=True) for _ in range(3))
    with Names() as names:
        out: Tensor = TorchRing.apply(q, k, v, dist.group.WORLD)  # type: ignore[no-untyped-call]
        out.sum().backward()  # type: ignore[no-untyped-call]
    kernel = "_scaled_dot_product_efficient_attention"
    called = [name for name in names.seen if "dot_product" in name]
    assert called == [kernel] * 2 + [f"{kernel}_backward"] * 2
    assert q.grad is not None
    assert q.grad.shape == q.shape


def test_compute_alone_is_timed_until_the_device_is_done(fake: None, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.device] = []

    def now(device: torch.device) -> float:
        asked.append(device)
        return float(len(asked))

    monkeypatch.setattr(parallel, "now", now)
    operations: dict[Kind, list[float]] = {}
    pipeline_steps(Group.world(), TINY, "1f1b", operations)[ALONE]()
    assert operations == {("F", 1): [1.0] * 4, ("B", 1): [1.0] * 4}
    assert set(asked) == {torch.device("cpu")}


def test_compute_alone_does_every_operation_of_the_table() -> None:
    for kind, kinds in (("1f1b", {"F", "B"}), ("zb-h1", {"F", "I", "W"})):
        runs = worlds.run(heat, "pipeline", kind, TINY, ranks=2)
        assert [run.operations.keys() for run in runs] == [{(kind, stage) for kind in kinds} for stage in range(2)]
        assert all(seconds > 0 for run in runs for seconds in run.operations.values())


@pytest.mark.parametrize(
    ("axis", "change", "says"),
    [
        ("pipeline", {"layers": 6}, r"6 layers do not make 4 equal stages \(gpipe, 4 ranks\)"),
        ("tensor", {"context": 9}, "9 tokens cannot be dealt out equally to 2 ranks"),
        ("tensor", {"width": 384}, "6 heads cannot be dealt out equally to 4 ranks"),
        ("context", {"sequence": 20}, "20 tokens does not divide into 8 chunks for 4 ranks"),
    ],
)
def test_sizes_that_do_not_divide_are_refused_before_anything_runs(
    axis: str, change: dict[str, int], says: str
) -> None:
    parallel.check([2, 4], [axis], replace(TINY, layers=8))
    with pytest.raises(ValueError, match=says):
        parallel.check([2, 4], [axis], replace(TINY, **change))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "took", "expected"),
    [
        ("1f1b", {"F": 1.0, "B": 2.0}, 1 / 4),  # (p-1)(f+b) of m(f+b)
        ("interleaved", {"F": 1.0, "B": 2.0}, 1 / 8),  # of two chunks
    ],
)
def test_the_bubble_is_the_tables(kind: str, took: dict[str, float], expected: float) -> None:
    """The mean of the ranks' durations counts."""
    table = schedule(kind, 2, 4)
    runs = [
        Run({}, {}, {(op, stage): took[op] * (1 + share) for op in took for stage in table.holds(rank)})
        for rank, share in enumerate((-0.5, 0.5))
    ]
    assert bubble(table, runs) == pytest.approx(expected)


def test_where_backward_is_split_the_bubble_is_the_clocks_with_each_stages_own_durations() -> None:
    table = schedule("zb-h1", 2, 4)
    for first, expected in (((1.0, 1.0), 1 / 12), ((0.0, 2.0), 1 / 12), ((1.0, 1.5), None)):
        own = [dict(zip("IW", first, strict=True)), {"I": 1.0, "W": 1.0}]
        runs = [
            Run({}, {}, {("F", rank): 1.0} | {(op, rank): took for op, took in own[rank].items()}) for rank in (0, 1)
        ]
        found = bubble(table, runs)
        assert found == pytest.approx(expected) if expected else 0 < found < 1 / 4


def test_ratios_are_of_steps_taken_together_and_of_the_fastest() -> None:
    first = {OURS: [10.0, 30.0], PEER: [20.0, 40.0], ALONE: [8.0, 16.0]}
    second = {OURS: [50.0], PEER: [50.0], ALONE: [40.0]}
    ours, peer, alone = rank_rows([first, second], "pipeline", "1f1b", 2, "plain", wait=0.25)
    assert (ours.step_ms, ours.ratio, ours.fastest_ratio) == (30.0, 0.75, 0.5)
    assert (ours.of_formula, ours.fastest_of_formula) == (1.0, 1.0)
    assert (peer.implementation, peer.ratio, peer.of_formula) == (PEER, 1.0, 2.0)
    assert (alone.implementation, alone.of_formula) == (ALONE, 0.8)
    assert all(row.of_formula is None for row in rank_rows([first], "tensor", "plain", 2, "plain"))


def test_with_fewer_cores_than_ranks_no_formula_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, held in ((1, False), (2, True)):
        monkeypatch.setattr(parallel, "cores", lambda cores=cores: cores)
        ((*rows,),) = measure([2], ["pipeline"], TINY, ["gpipe"])
        assert [row.pages for row in rows] == ["plain"] * 3 + ["huge"] * 3
        assert all((row.of_formula is not None) == held for row in rows)
