"""Every schedule on real ranks against one process, bit for bit; what travels; what is refused; a rank that dies."""

import os
import signal
import weakref
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from pipeline_models import WIDTH, batches, build, gradients, loss, one_process, same
from torch import Tensor, UntypedStorage, nn
from torch.autograd.graph import saved_tensors_hooks
from worlds import run

from refimpl import launch
from refimpl.comm.group import Group
from refimpl.parallel.pipeline.layers import LayerSpec, TiedLayerSpec
from refimpl.parallel.pipeline.runner import Pipeline
from refimpl.parallel.pipeline.schedules.named import NAMES, schedule
from refimpl.parallel.pipeline.schedules.table import Table
from refimpl.parallel.pipeline.shared import sum_gradients
from refimpl.parallel.pipeline.ties import beside, shared

Found = tuple[dict[int, dict[str, Tensor | None]], Tensor, int]


def trained(table: Table, kind: str, lengths: tuple[int, ...] = (3,)) -> Found:
    """Each stage's gradients on this rank, every loss, and the bytes of activations and gradients sent."""
    group = Group.world()
    stages = {s: build(table.stages, s, kind) for s in table.holds(group.rank)}
    pipeline = Pipeline(table, stages, group, loss, dynamic=len(lengths) > 1)
    losses = pipeline.run(*batches(kind, table.micro_batches, lengths))
    if len(table.paths) > 1:
        pairs = zip(*table.paths, strict=True)
        for stage, ranks in enumerate(pairs):
            if group.rank in ranks:
                sum_gradients(group, ranks, list(stages[stage].parameters()))
    sent = group.ledger.sent_bytes("tag")
    bytes_ = sent.get("pipeline activations", 0) + sent.get("pipeline gradients", 0)
    return {s: gradients(stage) for s, stage in stages.items()}, pipeline.everywhere(losses), bytes_


def trained_all(names: list[str], ranks: int, micro: int, kind: str, lengths: tuple[int, ...] = (3,)) -> list[Found]:
    return [trained(schedule(name, ranks, micro), kind, lengths) for name in names]


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("kind", ["tensors", "nested"])
def test_gradients_are_those_of_one_process(ranks: int, kind: str) -> None:
    names = [name for name in NAMES if ranks % 2 == 0 or name != "dualpipe"]
    micro = ranks + 3  # neither a multiple of the ranks nor as many as DualPipe wants
    results = run(trained_all, names, ranks, micro, kind, ranks=ranks)
    for i, name in enumerate(names):
        table = schedule(name, ranks, micro)
        expected, losses = one_process(table.stages, kind, micro, len(table.paths))
        for rank in range(ranks):
            grads, everywhere, _ = results[rank][i]
            assert everywhere.tolist() == [x.item() for x in losses], name
            assert sorted(grads) == table.holds(rank)
            for stage, found in grads.items():
                assert same(found, expected[stage]) == {}, f"{name}, rank {rank}, stage {stage}"


def test_bytes_are_those_of_the_boundaries() -> None:
    """An activation and its gradient for each micro-batch and each boundary between ranks."""
    boundaries = {"1f1b": 1, "interleaved": 3, "zb-v": 2, "dualpipe": 1, "dualpipe-v": 2}
    results = run(trained_all, list(boundaries), 2, 4, "tensors")
    for i, (name, number) in enumerate(boundaries.items()):
        activation = 2 * 3 * WIDTH * 4
        assert sum(found[i][2] for found in results) == 2 * 4 * number * activation, name


@pytest.mark.parametrize("name", ["1f1b", "zb-v", "dualpipe", "dualpipe-v"])
def test_sequences_of_any_length_if_asked(name: str) -> None:
    lengths = (3, 5, 1, 4)
    results = run(trained_all, [name], 2, 5, "nested", lengths)
    table = schedule(name, 2, 5)
    expected, losses = one_process(table.stages, "nested", 5, len(table.paths), lengths)
    for ((grads, everywhere, _),) in results:
        assert everywhere.tolist() == [x.item() for x in losses]
        for stage, found in grads.items():
            assert same(found, expected[stage]) == {}


class Saved:
    """Stands in the graph for a tensor that autograd saved."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def graphs_alive(name: str) -> tuple[int, int, int]:
    """The most graphs of (stage, micro-batch) that autograd keeps on this rank after any forward, and the bound; the
    most activations that are there then, come or sent."""
    group = Group.world()
    table = schedule(name, group.size, 4 * group.size)
    graphs: list[weakref.WeakSet[Saved]] = []
    values: list[weakref.ref[UntypedStorage]] = []
    most = there = 0

    def watched(module: nn.Module, x: Any) -> Any:
        nonlocal most, there
        graphs.append(weakref.WeakSet())

        def pack(tensor: Tensor) -> Saved:
            saved = Saved(tensor.detach())  # one with a graph would keep its own node alive
            graphs[-1].add(saved)
            return saved

        with saved_tensors_hooks(pack, lambda saved: saved.tensor):
            out = module(x)
        values.extend(weakref.ref(t.untyped_storage()) for t in (x, out) if t.requires_grad)
        most, there = max(most, sum(map(bool, graphs))), max(there, sum(ref() is not None for ref in values))
        return out

    sent: list[Any] = []

    def send(*args: Any, **more: Any) -> Any:
        sent.append(Group.send(group, *args, **more))
        return sent[-1]

    stages = {s: partial(watched, build(table.stages, s, "tensors")) for s in table.holds(group.rank)}
    with mock.patch.object(group, "send", send):
        Pipeline(table, stages, group, loss).run(*batches("tensors", table.micro_batches))
    assert all(work.is_done for work in sent if work is not None), "a send that fails is heard of"
    assert not any(graphs), "all are gone when the step is over"
    return most, table.alive[group.rank], there


@pytest.mark.parametrize("name", NAMES)
def test_no_more_is_alive_than_the_table_states(name: str) -> None:
    for most, bound, values in run(graphs_alive, name):
        assert most == bound
        assert values <= 2 * bound + 1, "what has come or been sent is let go of"


def headers() -> tuple[list[int], list[int]]:
    """Messages that told shapes, in each of two steps: agreed once, and every time."""
    found = []
    for dynamic in (False, True):
        group = Group.world()
        table = schedule("1f1b", 2, 3)
        pipeline = Pipeline(table, {group.rank: build(2, group.rank, "tensors")}, group, loss, dynamic=dynamic)
        counts = []
        for _ in range(2):
            group.ledger.reset()
            pipeline.run(*batches("tensors", 3))
            counts.append(group.ledger.calls("tag").get("pipeline headers", 0))
        found.append(counts)
    return found[0], found[1]


def test_shapes_are_agreed_on_once_or_every_time() -> None:
    for once, always in run(headers):
        assert once == [2 + 2, 0], "size and header of one activation and one gradient"
        assert always == [3 * 4, 3 * 4]


def evaluated() -> tuple[list[float], list[float], bool, list[float]]:
    """Losses in training, in evaluation, whether that left gradients alone, and outputs of other lengths."""
    group = Group.world()
    table = schedule("1f1b", 3, 4)
    stage = build(3, group.rank, "nested")
    pipeline = Pipeline(table, {group.rank: stage}, group, loss)
    data = batches("nested", 4)
    trained = pipeline.everywhere(pipeline.run(*data)).tolist()
    before = {n: None if g is None else g.clone() for n, g in gradients(stage).items()}
    again = pipeline.everywhere(pipeline.evaluate(*data)).tolist()
    kept = same(gradients(stage), before) == {}
    pipeline.reset_shapes()
    outs = pipeline.evaluate(batches("nested", 4, (5,))[0])
    return trained, again, kept, [float(out[0].sum()) for out in outs.values()]


def test_evaluation_is_forward_alone() -> None:
    results = run(evaluated, ranks=3)
    for trained_, again, kept, _ in results:
        assert trained_ == again
        assert kept
    assert [len(outs) for *_, outs in results] == [0, 0, 4]


def wrong(what: str) -> None:
    group = Group.world()
    table = schedule("1f1b", 2, 4)
    data = batches("tensors", 4, (3, 5) if what == "shapes" else (3,))
    if what == "ranks":
        Pipeline(schedule("1f1b", 4, 4), {0: nn.Identity()}, group, loss)
    if what == "stages":
        Pipeline(table, {7: nn.Identity()}, group, loss)
    pipeline = Pipeline(table, {group.rank: build(2, group.rank, "tensors")}, group, loss)
    pipeline.run(data[0][:3] if what == "number" else data[0], data[1])


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("ranks", "1f1b is for 4 ranks, the group has 2"),
        ("stages", r"holds stages \[\d\] of the schedule 1f1b, and was given \[7\]"),
        ("number", "4 micro-batches: got 3 inputs on rank 0, which holds stage 0"),
        ("shapes", r"activations of stage 0: float32 \(2, 5, 6\) with a gradient is to be sent.*dynamic=True"),
    ],
)
def test_what_is_wrong_is_said(what: str, says: str) -> None:
    with pytest.raises(launch.RankError, match=rf"(?s){says}"):
        run(wrong, what)


class Falls(nn.Module):
    """Dies in the micro-batch it is told."""

    def __init__(self, inner: nn.Module, at: int) -> None:
        super().__init__()
        self.inner, self.left = inner, at

    def forward(self, x: Any) -> Any:
        self.left -= 1
        if self.left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.inner(x)


def falling(rank: int) -> None:
    group = Group.world()
    table = schedule("zb-h1", 4, 8)
    stage = build(4, group.rank, "tensors")
    module = Falls(stage, 5) if group.rank == rank else stage
    Pipeline(table, {group.rank: module}, group, loss).run(*batches("tensors", 8))


def summed() -> list[Tensor | None]:
    """Of two dtypes, in numbers whose order of addition shows, and one that only rank 2 has."""
    group = Group.world()
    params = [nn.Parameter(torch.zeros(2, dtype=d)) for d in (torch.float32, torch.float64, torch.float32)]
    for p in params[: 2 if group.rank < 2 else 3]:
        p.grad = torch.full_like(p, [1e8, 1.0, -1e8][group.rank])
    sum_gradients(group, [0, 1, 2], params)
    return [p.grad for p in params]


def test_shared_gradients_are_added_in_the_order_of_ranks() -> None:
    for grads in run(summed, ranks=3):
        assert [g.tolist() for g in grads if g is not None] == [[0.0] * 2, [1.0] * 2, [-1e8] * 2]


def test_what_is_tied_is_summed_once_over_all_that_have_it() -> None:
    """In DualPipe, where what is beside the tied weight is on two ranks as well."""
    specs = [
        TiedLayerSpec("words", nn.Linear, 3, 3),
        LayerSpec(nn.Linear, 3, 3),
        TiedLayerSpec("words", nn.Linear, 3, 3),
    ]
    modules = [nn.Linear(3, 3) for _ in specs]
    told = [beside(specs, nn.ModuleDict({"words": modules[0]}))] * 4
    found = shared(specs, [{3, 0}, {0, 3}, {2, 1}], 0, modules.__getitem__, told)
    assert found == [((0, 1, 2, 3), [modules[0].weight, modules[0].bias]), ((0, 3), [*modules[1].parameters()])]


def test_of_a_name_that_two_stages_have_with_two_shapes_is_told() -> None:
    specs = [TiedLayerSpec("words", nn.Linear, 3, 3), TiedLayerSpec("words", nn.Linear, 3, 4)]
    told = [beside(specs, nn.ModuleDict({"words": spec.build()})) for spec in specs]
    with pytest.raises(ValueError, match=r"^TiedLayerSpec 'words': bias is \[3\] on rank 0 and \[4\] on rank 1; "):
        shared(specs, [{0}, {1}], 2, [].__getitem__, [*told, {}])  # on a rank between them, too


class Inside(nn.Sequential):
    """Its first layer's weight by another name, and a norm."""

    def __init__(self, first: bool = True, normed: bool = True) -> None:
        super().__init__(nn.Linear(3, 3, bias=False), *([nn.LayerNorm(3)] if normed else []))
        self.first = first

    @property
    def words(self) -> Any:
        return self[0].weight


def test_layers_of_a_key_that_are_built_otherwise_share_the_tied_weight_alone() -> None:
    """gdGPT's BLOOM: the norm behind the embedding would be the one before the head, and was, in silence."""

    def share(normed: bool, last: bool) -> list[tuple[tuple[int, ...], list[nn.Parameter]]]:
        specs = [TiedLayerSpec("ends", Inside, first, normed, tied_weight_attr="words") for first in (True, not last)]
        modules = [spec.build() for spec in specs]
        told = [beside(specs, nn.ModuleDict({"ends": module})) for module in modules]
        return shared(specs, [{0}, {1}], 1, modules.__getitem__, told)

    assert [len(params) for _, params in share(normed=True, last=False)] == [3]
    assert [len(params) for _, params in share(normed=False, last=True)] == [1]
    with pytest.raises(ValueError, match=r"0 is built with first=True and layer 1 with first=False.* 1\.bias too: "):
        share(normed=True, last=True)


def test_a_rank_that_shares_no_gradients_with_others_is_told() -> None:
    with pytest.raises(ValueError, match=r"rank 0 is none of the ranks \[1, 2\] that share these gradients"):
        sum_gradients(Group(None), [1, 2], [])


def test_a_rank_that_dies_in_mid_pipeline_is_named() -> None:
    with pytest.raises(launch.RankDied, match=r"^rank 2 was killed by SIGKILL"):
        launch.run(falling, 2, ranks=4, timeout=60)


class Unlucky(nn.Module):
    """Raises in its third micro-batch."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.calls = inner, 0

    def forward(self, x: Any) -> Any:
        self.calls += 1
        if self.calls == 3:
            raise ArithmeticError("no third one")
        return self.inner(x)


def raising() -> None:
    group = Group.world()
    stage = build(3, group.rank, "tensors")
    table = schedule("1f1b", 3, 6)
    module = Unlucky(stage) if group.rank == 1 else stage
    Pipeline(table, {group.rank: module}, group, loss).run(*batches("tensors", 6))


def test_a_rank_that_raises_is_named() -> None:
    with pytest.raises(launch.RankError, match=r"^rank 1 raised ArithmeticError: no third one"):
        launch.run(raising, ranks=3, timeout=60)
