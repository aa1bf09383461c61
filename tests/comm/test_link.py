"""A slow link: what it is asked for, when messages arrive, what crossed, and that nothing else changes."""

import functools
import os
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import worlds
from test_group import exact, given, reduced
from torch import Tensor, nn
from training import STAGES, Job, train
from worlds import NEAR, WAYS

from refimpl import launch
from refimpl.comm import link as links
from refimpl.comm.axes import neighbours
from refimpl.comm.composed import Composed
from refimpl.comm.group import Group
from refimpl.comm.link import COLLECTIVE, Cables, Link
from refimpl.comm.mesh import Mesh
from refimpl.comm.throttled import Throttled
from refimpl.comm.work import Work

run = functools.partial(worlds.run, device="cpu")
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
FAST = Link(1e12, 1e-6)
TWO_NODES = ((0, 2), (0, 3), (1, 2), (1, 3))  # of four ranks, said in pairs


@pytest.mark.parametrize(
    ("text", "bits", "latency"),
    [
        ("1Gbit/s 100us", 1e9, 1e-4),
        ("100 Mbit/s, 2 ms", 1e8, 2e-3),
        ("0.1gbit/s", 1e8, 0.0),
        ("2.5Gbps 0s", 2.5e9, 0.0),
        ("125MB/s 1.5µs", 1e9, 1.5e-6),
        ("9600bit/s 250ns", 9600.0, 2.5e-7),
        (" 1e6kbit/s 1e-3s ", 1e9, 1e-3),
        ("10gbit 1ms", 1e10, 1e-3),
    ],
)
def test_a_link_is_said_in_words(text: str, bits: float, latency: float) -> None:
    found = Link.parse(text)
    assert (found.bits_per_second, found.latency) == (pytest.approx(bits), pytest.approx(latency))


@pytest.mark.parametrize(
    "text",
    [
        "fast",
        "1",
        "1Gbit/s 100",
        "-1Gbit/s",
        "0Gbit/s 1us",
        "1Gbit/s -1us",
        "100us",
        "1Xbit/s",
        "1e400Gbit/s 1us",
        "1Gbit/s 1e400s",
    ],
)
def test_a_malformed_variable_is_named_and_a_right_one_shown(text: str) -> None:
    with pytest.raises(ValueError, match=r'REFIMPL_LINK=.* is no link: .*such as REFIMPL_LINK="1Gbit/s 100us"'):
        Link.of_environment({"REFIMPL_LINK": text})


def test_no_variable_is_no_link() -> None:
    assert Link.of_environment({}) is None
    assert Link.of_environment({"REFIMPL_LINK": " "}) is None


@pytest.mark.parametrize(
    "wrong", [(0.0,), (-1.0,), (float("nan"),), (1e9, -1.0), (1e9, float("inf")), (1e9, 0.0, ((1, 1),))]
)
def test_what_is_no_link_is_refused(wrong: tuple[Any, ...]) -> None:
    with pytest.raises(ValueError, match="a link"):
        Link(*wrong)


def test_it_lies_between_nodes_or_pairs_and_without_either_between_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    every = [(a, b) for a in range(4) for b in range(4) if a != b]

    def far(link: Link) -> set[tuple[int, int]]:
        return {pair for pair in every if link.cable(*pair, 4) is not None}

    assert far(FAST) == set(every)
    monkeypatch.setenv("REFIMPL_RANKS_PER_NODE", "2")
    both = {pair for a, b in TWO_NODES for pair in ((a, b), (b, a))}
    assert far(FAST) == both == far(Link(1e9, 0.0, TWO_NODES))
    # The ranks of a node share one cable each way; each pair has its own.
    assert len({FAST.cable(*pair, 4) for pair in both}) == 2
    assert len({Link(1e9, 0.0, TWO_NODES).cable(*pair, 4) for pair in both}) == 8


def results(group: Group) -> list[Tensor]:
    """Every collective and message in several dtypes and sizes, 0 and odd ones among them, awaited at once or later."""
    ranks, me, found, works = group.size, group.rank, list[Tensor](), list[Work]()
    right, left = (me + 1) % ranks, (me - 1) % ranks
    for dtype, size, later in (
        (F32, 7, False),
        (F32, 24, True),
        (BF16, 3, True),
        (F16, 0, True),
        (torch.int64, 5, False),
    ):
        whole = given(me, size, dtype)
        works += [group.all_reduce(whole, "max" if dtype == torch.int64 else "mean", async_op=later)]
        part, parts = given(me, size, dtype), torch.zeros(size * ranks, dtype=dtype)
        works += [group.all_gather(parts, part, async_op=later)]
        listed = [torch.zeros(size, dtype=dtype) for _ in range(ranks)]
        works += [group.all_gather(listed, part, async_op=later)]
        out, x = torch.zeros(size, dtype=dtype), given(me, size * ranks, dtype)
        works += [group.reduce_scatter(out, x, async_op=later)]
        swapped = torch.zeros_like(x)
        works += [group.all_to_all(swapped, x, async_op=later)]
        copy = given(me, size, dtype).view(1, -1)
        works += [group.broadcast(copy, root=ranks - 1, async_op=later)]
        rows = [(me + other) % 3 for other in range(ranks)]  # to each other rank, and from it; some none
        uneven, y = torch.zeros(sum(rows), 2, dtype=dtype), given(me, 2 * sum(rows), dtype).view(-1, 2)
        works += [group.all_to_all(uneven, y, out_splits=rows, in_splits=rows, async_op=later)]
        found += [whole, parts, *listed, out, swapped, copy, uneven]
        if ranks > 1:
            passed = torch.zeros(size, dtype=dtype)
            works += [group.send_recv(part, right, passed, left, async_op=later)]
            found += [passed]
    for work in works:
        work.wait()
    return found


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_bits_and_counted_bytes_are_those_without_it(ranks: int) -> None:
    def check() -> None:
        plain = Group.world()
        expected = results(plain)
        for way, link in (("gloo", FAST), ("", Link(1e12, 0.0, ((0, ranks - 1),)) if ranks > 1 else FAST), ("", FAST)):
            group = Group.world(transport=way, link=link)
            assert isinstance(group.transport, Throttled) == (ranks > 1)
            for actual, right in zip(results(group), expected, strict=True):
                exact(actual, right)
            assert group.ledger.sent_bytes() == plain.ledger.sent_bytes()
        group.share_messages()
        for actual, right in zip(results(group), expected, strict=True):
            exact(actual, right)

    run(check, ranks=ranks)


@pytest.mark.parametrize("way", ["", "gloo"])
def test_a_message_arrives_when_its_last_byte_has_left_and_latency_later(way: str) -> None:
    """No later could be said of a busy machine; no sooner is what the link is for."""

    def spans() -> list[tuple[float, float]]:
        group, found = Group.world(transport=way, link=Link(8e6, 0.02)), []  # a byte a microsecond
        big, small, many = torch.zeros(10_000), torch.zeros(1), torch.zeros(2, 5_000)
        other = torch.empty_like(big)
        calls: list[Callable[[], object]] = [
            lambda: group.send(small, 1) if group.rank == 0 else group.recv(small, 0),
            lambda: group.send_recv(big, 1 - group.rank, other, 1 - group.rank),
            lambda: group.all_reduce(big),
            lambda: group.all_gather(many, many[0].clone()),
            lambda: group.broadcast(big, root=0),
        ]
        for call in calls:
            begun = time.monotonic()
            call()
            found.append((begun, time.monotonic()))
        return found

    by_call = list(zip(*run(spans, ranks=2), strict=True))
    back = 1e-4  # at most so much is taken off, for the caller's way back
    after = [
        [back + end - by_call[c][1 - r][0] for r, (_, end) in enumerate(by_call[c])] for c in range(5)
    ]  # since it was sent
    assert after[0][1] >= 0.02
    assert min(after[1]) >= 0.04 + 0.02  # 40,000 bytes, and both directions at once
    assert min(back + end - begun for begun, end in by_call[2]) >= 2 * (
        0.02 + 0.02
    )  # two halves of 20,000, there and back
    assert min(after[3]) >= 0.02 + 0.02
    assert by_call[4][0][1] - by_call[4][0][0] >= 0.04  # the root's own end
    assert after[4][1] >= 0.04 + 0.02


def on_two_nodes() -> list[tuple[list[int], int, int]]:
    """All at one instant: (when each member's messages arrive here, when the own have left, crossed)."""
    os.environ["REFIMPL_RANKS_PER_NODE"] = "2"
    group, found = Group.world(), []
    try:
        for rate, latency in ((8e9, 5e-9), (4e9, 0.0)):  # 1 and 2 ns a byte
            cables = Cables(Link(rate, latency), group.handle)  # type: ignore[arg-type]
            group.barrier()
            left = 0
            for turn in range(4):  # one after the other
                if turn == group.rank:
                    cables.send(COLLECTIVE, {0: 100, 1: 200, 2: 300, 3: 400}, 1_000_000)
                    left = cables.send(COLLECTIVE, dict.fromkeys(range(4), 10), 1_000_000)
                group.barrier()
            dues = []
            for peer in range(4):
                dues += [cables.due(cables.expect(COLLECTIVE, {peer: 1})) for _ in range(2)]
            found.append((dues, left, cables.crossed))
    finally:
        del os.environ["REFIMPL_RANKS_PER_NODE"]
    return found


def test_the_ranks_of_a_node_share_its_cable_and_wait_in_line() -> None:
    by_rank = run(on_two_nodes, ranks=4)
    for link, (ns, latency) in enumerate(((1, 5), (2, 0))):
        free, arrivals = {0: 1_000_000, 1: 1_000_000}, {}
        for sender in range(4):
            for number, sizes in enumerate(([100, 200, 300, 400], [10] * 4)):
                for receiver in (2, 3) if sender < 2 else (0, 1):
                    free[sender // 2] += ns * sizes[receiver]
                    arrivals[sender, receiver, number] = free[sender // 2] + latency
        for rank in range(4):
            dues, left, crossed = by_rank[rank][link]
            assert dues == [arrivals.get((peer, rank, number), 0) for peer in range(4) for number in range(2)]
            last = 3 if rank < 2 else 1
            assert left == arrivals[rank, last, 1] - latency
            assert crossed == (300 + 400 if rank < 2 else 100 + 200) + 2 * 10


def late() -> list[int]:
    """How much sooner a rank stops waiting that comes back 30 us late, then 10 ms late; and with 5 us of latency."""
    group, found = Group.world(), []
    for latency in (1e-3, 5e-6):
        cables = Cables(Link(1e9, latency), group.handle)  # type: ignore[arg-type]
        cables.send(COLLECTIVE, {1 - group.rank: 8}, 0)
        group.barrier()
        words, now = cables.expect(COLLECTIVE, {1 - group.rank: 8}), [0]
        at, links.time = cables.due(words), SimpleNamespace(monotonic_ns=lambda now=now: now[0])  # type: ignore[assignment]
        for way_back in (30_000, 10_000_000):
            for _ in range(100):
                cables.waited(1_000_000_000)
                now[0] = 1_000_000_000 + way_back
                cables.returned()
                cables.returned()  # a call that has not waited
            found.append(at - cables.due(words))
        links.time = time  # type: ignore[assignment]
    return found


def test_the_way_back_is_taken_off_the_latency_and_no_more_than_that() -> None:
    assert launch.run(late, ranks=2, device="cpu") == [[30_000, 100_000, 5_000, 5_000]] * 2


def test_what_crosses_is_counted_by_collective_and_by_tag(monkeypatch: pytest.MonkeyPatch) -> None:
    def crossed() -> tuple[dict[str, int], dict[str, int], dict[str, int], list[str]]:
        os.environ["REFIMPL_RANKS_PER_NODE"] = "2"
        group = Group.world(link=FAST)
        near, far = neighbours(group, 2)
        kinds = [type(g.transport).__name__ for g in (group, near, far)]
        group.all_reduce(torch.ones(40), tag="a")
        group.reduce_scatter(torch.ones(10), torch.ones(40), tag="a")
        group.all_gather(torch.ones(40), torch.ones(10), tag="b")
        group.all_to_all(torch.ones(40), torch.ones(40), tag="b")
        group.broadcast(torch.ones(7), root=1)
        group.all_reduce(torch.ones(40), async_op=True, tag="c").wait()
        group.send_recv(torch.ones(3), group.rank ^ 2, torch.ones(3), group.rank ^ 2)
        group.send_recv(torch.ones(3), group.rank ^ 1, torch.ones(3), group.rank ^ 1)
        near.all_reduce(torch.ones(40))
        far.all_gather(torch.ones(20), torch.ones(10), tag="far")
        by_op, by_tag = group.ledger.crossed_bytes(), group.ledger.crossed_bytes("tag")
        group.ledger.reset()
        del os.environ["REFIMPL_RANKS_PER_NODE"]
        return by_op, by_tag, group.ledger.crossed_bytes(), kinds

    for rank, (by_op, by_tag, after, kinds) in enumerate(run(crossed, ranks=4)):
        half = 4 * 2 * 10  # to each rank of the other node a chunk
        assert by_op == {
            "all_reduce": 2 * 2 * half,
            "reduce_scatter": half,
            "all_gather": half + 4 * 10,
            "all_to_all": half,
            **({"broadcast": 2 * 28} if rank == 1 else {}),
            "send": 12,
        }
        assert by_tag == {"a": 3 * half, "b": 2 * half, "c": 2 * half, "": 12 + 56 * (rank == 1), "far": 40}
        assert after == {}
        assert kinds == ["Throttled", WAYS[NEAR], "Throttled"]


def test_groups_of_a_mesh_and_of_an_existing_group_have_the_link() -> None:
    def kinds() -> list[str]:
        plain, mesh = Group.world(), Mesh({"a": 2, "b": 2}, link=FAST)
        groups = [plain, plain.throttled(FAST), mesh.group("a"), mesh.group("a", "b"), mesh.group()]
        some = dist.new_group([0, 3])
        groups += [Group(some, link=Link(1e9, 0.0, ((0, 1),)))] if plain.rank in (0, 3) else []  # none of them is apart
        assert groups[1].ledger is plain.ledger
        return [type(g.transport).__name__ for g in groups]

    kind = [WAYS[NEAR], "Throttled", "Throttled", "Throttled", "Alone"]
    assert run(kinds, ranks=4) == [[*kind, WAYS[NEAR]], kind, kind, [*kind, WAYS[NEAR]]]


def test_an_all_reduce_of_some_ranks_goes_on_by_itself() -> None:
    """In a process group that is named by its ranks."""

    def check() -> float:
        x, some = torch.ones(3), dist.new_group([0, 2])
        if dist.get_rank() != 1:
            Group(some, link=FAST).all_reduce(x, async_op=True).wait()
        return x.sum().item()

    assert run(check, ranks=3) == [6.0, 3.0, 6.0]


def test_more_messages_than_are_kept_are_under_way() -> None:
    def many() -> None:
        links.KEPT = 4  # of this rank's process, which ends with this test
        group = Group.world(link=Link(1e9, 1e-3))
        x = [torch.full((3,), 100.0 * group.rank + i) for i in range(20)]
        y = [t.clone() for t in x]
        works = [group.broadcast(t, root=i % 2, async_op=True) for i, t in enumerate(x)]
        works += [group.recv(t, 0, async_op=True) if group.rank else group.send(t, 1, async_op=True) for t in y]
        for work in works:
            work.wait()
        for i in range(20):
            exact(x[i], torch.full((3,), 100.0 * (i % 2) + i))
            exact(y[i], torch.full((3,), float(i)))

    launch.run(many, ranks=2, device="cpu")


def test_ranks_that_torch_alone_has_joined_find_each_other() -> None:
    """No folder of ours: where cables lie is agreed on through torch's store, by whoever makes a group."""

    def alone() -> float:
        del os.environ["REFIMPL_BOARD"]
        rank, x = dist.get_rank(), torch.ones(5)
        lonely = Group.world(link=FAST) if rank == 2 else None
        (lonely or Group.world(link=FAST)).all_reduce(x)
        assert isinstance(Group(dist.group.WORLD, link=FAST, transport="gloo").transport, Composed)
        return x.sum().item()

    assert launch.run(alone, ranks=3, device="cpu") == [15.0] * 3


def test_pairs_beyond_the_job_and_ranks_of_several_machines_are_refused() -> None:
    def refused() -> None:
        with pytest.raises(ValueError, match=r"pairs \(\(0, 2\),\) name ranks beyond those of the job, 0 to 1"):
            Group.world(link=Link(1e9, 0.0, ((0, 2),)))
        here, links.host = links.host, lambda: f"host {dist.get_rank()}"
        found = ""
        try:
            Group.world(link=FAST)
        except RuntimeError as error:
            found = str(error)
        links.host = here
        said: list[str] = ["", ""]
        dist.all_gather_object(said, found)
        assert sum("on several: unset it" in text for text in said) == 1

    launch.run(refused, ranks=2, device="cpu")


def plain_loop() -> list[float]:
    """A script that knows nothing of links."""
    from refimpl import Zero2

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(9, 17), nn.Tanh(), nn.Linear(17, 1))
    stage = Zero2(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    assert type(stage.group.transport).__name__ == ("Throttled" if "REFIMPL_LINK" in os.environ else WAYS[NEAR])
    losses = []
    for step in range(3):
        loss = model(torch.full((4, 9), 0.1 * stage.group.rank + step)).square().mean()
        loss.backward()
        stage.step()
        stage.zero_grad()
        losses.append(loss.item())
    return losses


def test_a_script_is_throttled_by_the_variable_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = run(plain_loop, ranks=2)
    monkeypatch.setenv("REFIMPL_LINK", "1Gbit/s 100us")
    assert launch.run(plain_loop, ranks=2, device="cpu") == expected
    monkeypatch.setenv("REFIMPL_LINK", "1 gigabit")
    with pytest.raises(
        launch.RankError, match=r"REFIMPL_LINK='1 gigabit' is no link: .*REFIMPL_LINK=\"1Gbit/s 100us\""
    ):
        launch.run(plain_loop, ranks=2, device="cpu")


def on_a_link(stage: str, job: Job) -> tuple[Any, ...]:
    """The same run without a link and with one, on this rank."""
    plain = train(stage, job)
    os.environ.update(REFIMPL_LINK="1Tbit/s 1us", REFIMPL_RANKS_PER_NODE="2")
    try:
        slow = train(stage, job)
    finally:
        del os.environ["REFIMPL_LINK"], os.environ["REFIMPL_RANKS_PER_NODE"]
    return plain.weights, slow.weights, plain.losses, slow.losses, plain.sent, slow.sent


@pytest.mark.parametrize("stage", list(STAGES))
@pytest.mark.parametrize(("ranks", "dtype"), [(2, torch.float32), (4, torch.bfloat16)])
def test_every_stage_trains_to_the_same_bits(stage: str, ranks: int, dtype: torch.dtype) -> None:
    for weights, slow, losses, slow_losses, sent, slow_sent in run(
        on_a_link, stage, Job(steps=2, dtype=dtype), ranks=ranks
    ):
        assert (losses, sent) == (slow_losses, slow_sent)
        for name in weights or {}:
            exact(slow[name], weights[name])


def test_sums_are_in_rank_order() -> None:
    def check() -> None:
        x = given(dist.get_rank(), 1001, torch.float32)
        Group.world(link=FAST).all_reduce(x)
        exact(x, reduced([given(r, 1001, torch.float32) for r in range(4)], "sum"))

    run(check, ranks=4)
