"""A group by levels: whoever trains with it takes it as it is, and gets the bits of (g0 + g1) + (g2 + g3)."""

import functools
import gc
import threading
from contextlib import nullcontext
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import worlds
from given import everyone, given
from torch import Tensor
from training import STAGES, Job, adamw, tokens

from refimpl import launch
from refimpl.comm.axes import neighbours
from refimpl.comm.behind import Behind
from refimpl.comm.group import Group
from refimpl.comm.level_model import Choice
from refimpl.comm.levels import ByLevels, of_mesh, two_level, world
from refimpl.comm.mesh import Mesh
from refimpl.comm.process_group import of_rows
from refimpl.engine.assemble import connect
from refimpl.zero.config import ZeroConfig

run = functools.partial(worlds.run, device="cpu")


def by_node(g: Tensor) -> Tensor:
    """[4, n] -> [n]"""
    return (g[0] + g[1]) + (g[2] + g[3])


def collectives() -> list[str]:
    group, wrong = two_level(Group.world(), near=2), []
    me = group.rank
    assert isinstance(group.transport, ByLevels)
    assert group.handle is Group.world().handle
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        for n in (0, 1, 5, 1001):
            rows = everyone(4, 4 * n, dtype)
            x, out, whole = rows[me].clone(), torch.empty(n, dtype=dtype), torch.empty(4 * n, dtype=dtype)
            # Begun one after another, waited for in an order of each rank's own.
            works = {
                "reduce_scatter": group.reduce_scatter(out, rows[me].clone(), "max", async_op=True),
                "all_reduce": group.all_reduce(x, async_op=True),
                "all_gather": group.all_gather(whole, rows[me][:n].contiguous(), async_op=True),
            }
            for name in sorted(works, reverse=bool(me % 2)):
                works[name].wait()
            if not torch.equal(out, rows.amax(0).view(4, n)[me]):
                wrong.append(f"reduce_scatter {n} {dtype}")
            if dtype != torch.bfloat16 and not torch.equal(x, by_node(rows)):
                wrong.append(f"all_reduce {n} {dtype}")
            if not torch.equal(whole.view(4, n), rows[:, :n]):
                wrong.append(f"all_gather {n} {dtype}")
    lists = [torch.empty(3) for _ in range(4)]
    group.all_gather(lists, given(me, 3))
    if not all(torch.equal(part, given(r, 3)) for r, part in enumerate(lists)):
        wrong.append("all_gather into a list")
    x = torch.full((2,), float(me))
    group.broadcast(x, 3)
    ring = torch.empty(2)
    group.send_recv(torch.full((2,), float(me)), (me + 1) % 4, ring, (me - 1) % 4)
    group.barrier()
    if x[0] != 3 or ring[0] != (me - 1) % 4 or group.all_gather_object(me) != [0, 1, 2, 3]:
        wrong.append("broadcast or messages")
    splits, moved = [me, 0, 1, 2], torch.empty(4 * [0, 0, 1, 2][me] + (sum(range(4)) if me == 0 else 0), 2)
    taken = [[r, 0, 1, 2][me] for r in range(4)]
    group.all_to_all(moved[: sum(taken)], torch.full((sum(splits), 2), float(me)), out_splits=taken, in_splits=splits)
    if moved[: sum(taken), 0].tolist() != [float(r) for r in range(4) for _ in range(taken[r])]:
        wrong.append("all_to_all in uneven parts")
    return wrong


def test_collectives_by_levels() -> None:
    assert run(collectives, ranks=4) == [[]] * 4


JOB = Job(steps=3)


def trained() -> dict[str, dict[str, Tensor] | None]:
    """Each stage's weights by two levels, on rank 0, and DDP's by the flat group."""
    levels, found = two_level(Group.world(), near=2), {}
    for name, group in [*((name, levels) for name in STAGES), ("flat", Group.world())]:
        torch.manual_seed(group.rank)
        model = JOB.make()
        stage = STAGES.get(name, STAGES["ddp"])(model, JOB.optimizer(model), group, ZeroConfig(**JOB.config))
        for step in range(JOB.steps):
            stage.backward(model(tokens(step, group.rank)))
            stage.step()
        found[name] = stage.full_state_dict()
    return found


def one_process() -> dict[str, Tensor]:
    """Plain torch: four micro-batches, their gradients added by node."""
    torch.manual_seed(0)
    model = JOB.make()
    optimizer = adamw(model)
    used = [p for p in model.parameters() if p.requires_grad]
    for step in range(JOB.steps):
        grads = [torch.autograd.grad(model(tokens(step, r)), used, allow_unused=True) for r in range(4)]
        for p, *g in zip(used, *grads, strict=True):
            p.grad = None if g[0] is None else ((g[0] + g[1]) + (g[2] + g[3])) / 4
        optimizer.step()
    return model.state_dict()


def test_ddp_and_the_stages_end_with_one_processs_bits() -> None:
    found = run(trained, ranks=4)[0]
    flat, expected = found.pop("flat"), one_process()
    assert flat is not None
    for name, weights in found.items():
        assert weights is not None
        for key, value in expected.items():
            assert torch.equal(weights[key], value), f"{name}: {key}"
    assert any(not torch.equal(flat[key], value) for key, value in expected.items())  # another order, other bits


def after_a_group_of_some() -> list[float]:
    """A script's own group, of ranks 0 and 1: from then on ranks are in different numbers of groups."""
    dist.new_group([0, 1])
    found = []
    for group in (two_level(Group.world(), near=2), *neighbours(Group.world(), 2)):
        x = torch.ones(1)
        group.all_reduce(x)
        found.append(x.item())
    return found


def test_ranks_may_have_been_in_different_numbers_of_groups() -> None:
    assert launch.run(after_a_group_of_some, ranks=4, timeout=30, device="cpu") == [[4.0, 2.0, 2.0]] * 4


def test_one_level_is_the_group_itself_and_what_does_not_fit_is_refused() -> None:
    def check() -> None:
        group = Group.world()
        assert two_level(group, near=1) is group
        assert two_level(group, near=3) is group
        assert two_level(group) is group  # this machine is one node
        with pytest.raises(ValueError, match="3 ranks are not nodes of 2 each"):
            two_level(group, near=2)
        with pytest.raises(ValueError, match="not nodes of 0"):
            two_level(group, near=0)

    run(check, ranks=3)


def test_the_environment_says_it_for_scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    def check() -> tuple[bool, Tensor, bool]:
        group = world()
        x = given(group.rank, 100)
        group.all_reduce(x)
        model = JOB.make()
        stage = STAGES["zero2"](model, JOB.optimizer(model))
        both = isinstance(stage.group.transport, ByLevels) and isinstance(connect().transport, ByLevels)
        part = Group(of_rows([[0, 1, 2], [3]]))
        uneven = r"the ranks \[0, 1, 2\] are not spread evenly over nodes: \{0: 2, 1: 1\}"
        with pytest.raises(ValueError, match=uneven) if part.size > 1 else nullcontext():
            two_level(part)
        return isinstance(group.transport, ByLevels), x, both

    monkeypatch.setenv("REFIMPL_COLLECTIVES", "two-level")
    monkeypatch.setenv("REFIMPL_RANKS_PER_NODE", "2")
    for is_by_levels, x, stage_is in run(check, ranks=4):
        assert is_by_levels
        assert stage_is
        assert torch.equal(x, by_node(everyone(4, 100)))
    monkeypatch.setenv("REFIMPL_COLLECTIVES", "by-magic")
    with pytest.raises(ValueError, match="REFIMPL_COLLECTIVES must be two-level, measured or flat"):
        world()


def test_a_mesh_and_a_choice() -> None:
    """What is chosen is done, by size; the far axis must come first."""

    def check() -> tuple[Tensor, Tensor, dict[str, int], dict[str, int]]:
        mesh = Mesh({"node": 2, "local": 2})
        group = of_mesh(
            mesh, "node", "local", lambda collective, size: Choice(size > 1000, "ring" if size > 1000 else "halving")
        )
        transport = group.transport
        assert isinstance(transport, ByLevels)
        small, large = given(group.rank, 10), given(group.rank, 1000)
        group.all_reduce(small)
        group.all_reduce(large)
        with pytest.raises(ValueError, match="in the mesh's order"):
            of_mesh(mesh, "local", "node")
        tags = [part.ledger.calls("tag") for part in (transport.flat, transport.far)]
        return small, large, tags[0], tags[1]

    for small, large, flat, far in run(check, ranks=4):
        g = everyone(4, 10)
        blocks = [[row.tensor_split(4)[b] for row in g] for b in range(4)]
        assert torch.equal(small, torch.cat([(g[b] + g[b - 2]) + (g[b - 1] + g[b - 3]) for b, g in enumerate(blocks)]))
        assert torch.equal(large, by_node(everyone(4, 1000)))  # of two ranks a ring's sum is any other's
        assert set(flat) >= {"halving", "doubling"}
        assert far.keys() == {"ring"}


def test_what_fails_behind_is_told_to_who_waits_and_the_thread_ends_with_its_owner() -> None:
    behind, done = Behind(), []
    gate = threading.Event()
    slow = behind.begin(lambda: [gate.wait()][1:])
    last = behind.begin(lambda: done.append(threading.current_thread()) or [])
    broken = behind.begin(lambda: [1 / 0])
    with pytest.raises(RuntimeError, match="not over yet"):
        slow.wait(timedelta(0))
    assert not last.is_completed()
    gate.set()
    last.wait()
    slow.wait()
    with pytest.raises(ZeroDivisionError):
        broken.wait()
    [thread] = done
    del behind
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


def test_a_rank_that_leaves_is_an_error_of_who_waits() -> None:
    def check() -> None:
        group = two_level(Group.world(), near=2)
        group.all_reduce(torch.zeros(3))
        if group.rank == 3:
            raise SystemExit("gone")
        group.all_reduce(torch.zeros(3))

    with pytest.raises(Exception, match="rank 3"):
        run(check, ranks=4)


def test_it_goes_on_while_nobody_looks() -> None:
    """All steps, near and far, are taken while this rank's own thread computes and calls nothing of the group's."""

    def check() -> None:
        group = two_level(Group.world(), near=2)
        x = torch.ones(1000)
        work = group.all_reduce(x, async_op=True)
        [transfer] = work._handles
        while not transfer.handle.is_completed():
            torch.ones(200, 200) @ torch.ones(200, 200)
        assert x[0] == 4
        work.wait()
        events = [(event.phase, event.op) for event in group.ledger.events]
        assert events == [("start", "all_reduce"), ("end", "all_reduce")]

    run(check, ranks=4)


def test_torchs_process_groups_are_its_own() -> None:
    """The caller's groups stay free for the caller: both can be used at once."""

    def check() -> None:
        mesh = Mesh({"node": 2, "local": 2})
        group = of_mesh(mesh, "node", "local")
        x, y = torch.ones(1000), torch.ones(1000)
        work = group.all_reduce(x, async_op=True)
        mesh.group("local").all_reduce(y)
        dist.all_reduce(y)
        work.wait()
        assert x[0] == 4
        assert y[0] == 8

    run(check, ranks=4)
