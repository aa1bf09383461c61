"""The path and the roll call: ranks that part are named, whoever they are; ranks that do not say nothing."""

import copy
import io
import pickle
import re
from collections.abc import Callable
from contextlib import nullcontext, redirect_stderr
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import worlds
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from worlds import NEAR

from refimpl.comm.group import Group
from refimpl.comm.patience import Patience
from refimpl.launch import RankError, World, run
from refimpl.ranks.lost import RankLost
from refimpl.ranks.register import Register
from refimpl.zero.config import ZeroConfig
from refimpl.zero.gather.order import RankDivergence, RollCall, Standing, parted, stuck
from refimpl.zero.gather.path import Outline
from refimpl.zero.init import GatheredParameters
from refimpl.zero.stage import Stage
from refimpl.zero.zero2 import Zero2
from refimpl.zero.zero3 import Zero3

# The state machine, as tables.


def at(place: int, does: str = "", expected: str = "", begun: int = 0) -> Standing:
    return Standing(place, begun, does, expected)


@pytest.mark.parametrize(
    ("said", "doing"),
    [
        ([at(4, "b"), at(4, "b"), at(4, "b")], None),  # all take the same new way
        ([at(4, "b", "a"), at(4, "c", "a")], ["b", "c"]),  # each goes a way of its own
        ([at(4, "b", "a"), at(6)], ["b", "a"]),  # one went on, and waits further on
        ([at(6), at(4, "b", "a"), at(5)], ["a", "b", "a"]),
        ([at(9, "d", "c"), at(4, "b", "a")], ["a", "b"]),  # one left further on
        ([at(4, "b", "a"), at(4)], ["b", "waits for the others"]),  # in a collective of neither's path
    ],
)
def test_where_ranks_part(said: list[Standing], doing: list[str] | None) -> None:
    assert parted(said) == doing
    assert parted(said[::-1]) == (None if doing is None else doing[::-1])


@pytest.mark.parametrize(
    ("number", "said", "answer"),
    [
        (7, [None, None], False),  # nobody calls: the others are slow
        (7, [None, at(3, "b", begun=7)], False),  # who calls has begun it: it will be done
        (7, [None, at(3, "b", begun=9)], False),
        (7, [None, at(3, "b", begun=6)], True),  # who calls will not begin it
        (7, [None, at(3, "b", begun=9), at(3, "b", begun=6)], True),
    ],
)
def test_who_waits_in_vain(number: int, said: list[Standing | None], answer: bool) -> None:
    assert stuck(number, said) is answer


def surprises(words: str) -> list[int]:
    """Which of the words were not expected."""
    outline, found = Outline(), []
    for i, word in enumerate(words):
        if word != outline.expected:
            found.append(i)
        outline.add(word)
    return found


def test_who_has_come_and_gone_on_is_not_missed() -> None:
    """Rank 1 said its word after it was looked for, and stands at the next model when it is looked for there."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    store.set("0 has come to", '{"what": "reduction of 0"}')
    there = SimpleNamespace(all=store, rank=0, ranks=[4, 6], patience=Patience())
    there._elsewhere = lambda _: {1: "backward of 2"}
    RollCall._refuse_elsewhere(there, [1], list)  # type: ignore[arg-type]
    with pytest.raises(RankDivergence, match="rank 4: reduction of 0; rank 6: backward of 2"):
        RollCall._refuse_elsewhere(there, [1], lambda: [1])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("words", "unexpected"),
    [
        ("tststs", [0, 1, 2]),  # a training loop: each thing is new once
        ("ttstts", [0, 2, 3]),  # with two micro-batches
        ("eeeeee", [0]),  # evaluations alone
        ("tststseeetststseeets", [0, 1, 2, 6, 9, 11, 15]),  # evaluation now and then
        ("etsetsets", [0, 1, 2, 3]),  # and before each step
        ("tttsttsttsttts", [0, 3, 4, 6, 12]),  # the shorter cycle is new once, the longer one again
    ],
)
def test_what_is_expected_after_what(words: str, unexpected: list[int]) -> None:
    assert surprises(words) == unexpected


# Ranks that part.


class Chain(nn.Module):
    """Layers in the order of `plan`, each a unit; a word in between stands for what else may happen."""

    def __init__(self, inner: list[int], is_checkpointed: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, n), nn.ReLU(), nn.Linear(n, 8)) for n in inner)
        self.is_checkpointed = is_checkpointed

    def forward(self, x: Tensor, plan: tuple[int | str, ...]) -> Tensor:
        for part in plan:
            if part == "raise":
                raise ValueError("this batch is bad")
            if part == "detach":
                x = x.detach().requires_grad_()
            elif self.is_checkpointed:
                x = x + checkpoint(self.layers[int(part)], x, use_reentrant=False)  # type: ignore[operator]
            else:
                x = x + self.layers[int(part)](x)
        return x.square().mean()


USUAL = (0, 1, 2, 3, 4)
EQUAL, DIFFERENT = [8] * 5, [8, 160, 24, 72, 400]


def built(
    equal: bool = False,
    prefetch: bool = True,
    is_checkpointed: bool = False,
    handle: dist.ProcessGroup | None = None,
    **config: Any,
) -> Zero3:
    """A stage in a process group of its own: what is left of one case does not meet the next."""
    torch.manual_seed(0)
    model = Chain(EQUAL if equal else DIFFERENT, is_checkpointed)
    group = Group(handle or dist.new_group())
    group.patience.stall = group.patience.again = 0.05
    config = {"prefetch_bucket_size": 10**6 if prefetch else 0, "leaf_modules": (nn.Sequential,)} | config
    return Zero3(model, torch.optim.AdamW(model.parameters(), lr=1e-3), group, ZeroConfig(**config))


def train(stage: Stage, *plan: int | str, step: bool = True) -> None:
    stage.backward(stage.model(torch.ones(2, 8), plan or USUAL))
    if step:
        stage.step()


def forward(stage: Zero3) -> None:
    stage.model(torch.ones(2, 8), USUAL)


@torch.no_grad()
def evaluate(stage: Zero3) -> None:
    forward(stage)


def bad_batch(stage: Zero3) -> None:
    with pytest.raises(ValueError, match="this batch is bad"):
        train(stage, 0, 1, "raise")


A_FORWARD = r"a new forward of the model \(training, gradients\)"
WRONG_TURNS: dict[str, tuple[Callable[[Zero3], None], str, str]] = {
    # what one rank does in place of a step; what the others are said to do, and what that rank is
    "skips a module": (lambda stage: train(stage, 0, 2, 3, 4), r"forward of layers\.1", r"forward of layers\.2"),
    "runs one twice": (lambda stage: train(stage, 0, 1, 1, 2, 3, 4), r"forward of layers\.2", r"forward of layers\.1"),
    "swaps two": (lambda stage: train(stage, 0, 2, 1, 3, 4), r"forward of layers\.1", r"forward of layers\.2"),
    "leaves out the last": (lambda stage: train(stage, 0, 1, 2, 3), r"forward of layers\.4", r"backward of layers\.3"),
    "cuts backward short": (lambda stage: train(stage, 0, 1, "detach", 2, 3, 4), ".*", r"(reduction|backward) of .*"),
    "stops after forward": (forward, r"backward of layers\.4", A_FORWARD),
    "evaluates": (evaluate, A_FORWARD, r"a new forward of the model \(training, no gradients\)"),
    "does not step": (lambda stage: train(stage, step=False), "step", A_FORWARD),
    "steps at once": (lambda stage: stage.step(), A_FORWARD, "step"),
    "saves": (lambda stage: stage.model.state_dict(), A_FORWARD, "a state_dict of the model"),
    "saves a part": (lambda stage: stage.model.layers[1].state_dict(), A_FORWARD, r"a state_dict of layers\.1"),
    "raises": (bad_batch, r"forward of layers\.2", A_FORWARD),
}


def part(turn: Callable[[Zero3], None], stage: Zero3, after: int) -> str:
    """What this rank is told; the last rank takes the wrong turn after so many steps."""
    with pytest.raises(RankDivergence) as told:  # noqa: PT012
        for step in range(after + 3):
            if step == after and stage.group.rank == stage.group.size - 1:
                turn(stage)
            else:
                train(stage)
    text = str(told.value)
    told.value.__traceback__ = None  # torch 2.11 ends a checkpoint whose forward has failed when its frames are gone
    del told
    return text


def part_in_all_ways(turn: Callable[[Zero3], None], ways: list[tuple[bool, bool, bool]]) -> list[str]:
    return [part(turn, built(*way), after=2) for way in ways]


@pytest.mark.parametrize(("ranks", "transport"), [(2, "gloo"), (2, NEAR), (3, "gloo"), (4, NEAR)])
@pytest.mark.parametrize("name", list(WRONG_TURNS))
def test_every_rank_is_told_what_each_does(
    name: str, ranks: int, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With equal and different sizes, with prefetch and without, recomputed or not; no board looks on."""
    monkeypatch.setenv("REFIMPL_TRANSPORT", transport)
    turn, usual, wrong = WRONG_TURNS[name]
    ways = [(False, True, False), (True, False, True)]
    if ranks == 2:  # half of all ways each, in which any two choices meet
        ways = [way for way in product([True, False], repeat=3) if sum(way) % 2 == (transport == "gloo")]
    with World(ranks, compare=False) as world:
        told = world.call(part_in_all_ways, turn, ways)
        world.kill()  # what was begun in vain would keep the ranks from leaving by themselves
    assert all(texts == told[0] for texts in told)
    lines = "; ".join(f"rank {rank}: {wrong if rank == ranks - 1 else usual}" for rank in range(ranks))
    for way, text in zip(ways, told[0], strict=True):
        assert re.search(rf"through the model\. {lines}\. ZeRO-3 needs", text), (way, text)


CALLS: dict[str, Callable[[Group], object]] = {
    "barrier": lambda group: group.barrier(),
    "all_gather_object": lambda group: group.all_gather_object("mine"),
}


def call_alone(name: str) -> str:
    """What this rank is told; rank 0 makes a call that has no place in a path, and the others evaluate."""
    stage = built()
    train(stage)
    with pytest.raises(RankDivergence) as told:  # noqa: PT012
        if stage.group.rank == 0:
            CALLS[name](stage.group)
        else:
            evaluate(stage)
    return str(told.value)


@pytest.mark.parametrize(("ranks", "transport"), [(2, "gloo"), (3, NEAR)])
@pytest.mark.parametrize("name", CALLS)
def test_who_waits_in_a_call_that_the_others_do_not_make_says_where(
    name: str, ranks: int, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REFIMPL_TRANSPORT", transport)
    with World(ranks) as world:
        told = world.call(call_alone, name)
        world.kill()
    assert told == [told[0]] * ranks
    assert re.search(
        r"rank 0: waits for the others, in or after .* at .*test_order\.py:\d+; rank 1: a new forward", told[0]
    )


def part_alone(alone: bool) -> Tensor:
    """The weights after three steps; between them rank 0 may run a layer that is small, and so whole on every rank.

    As PEFT does of a prompt's encoder: the rank that saves runs it, gradients and all.
    """
    stage = built(param_persistence_threshold=100)
    for _ in range(3):
        train(stage)
        if alone and stage.group.rank == 0:
            assert stage.model.layers[0](torch.ones(2, 8)).requires_grad  # type: ignore[index, operator]
    evaluate(stage)
    return torch.cat([w.flatten() for w in stage.model.state_dict().values()])


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_part_that_every_rank_has_whole_may_run_on_one_alone(ranks: int) -> None:
    with_, without = (run(part_alone, alone, ranks=ranks) for alone in (True, False))
    assert all(mine.equal(without[0]) for mine in with_)


class Told(io.StringIO):
    """A rank's stderr; what is written there lets rank 1 go on."""

    def flush(self) -> None:
        dist.send(torch.ones(1), 1)


def save_alone() -> str:
    stage = built()
    stage.group.patience.unheard = 0
    told = Told()
    if dist.get_rank() == 0:
        with redirect_stderr(told):
            stage.model.state_dict()
    else:
        dist.recv(torch.ones(1), 0)  # where nobody sees it; and if rank 0 told nothing, both would wait for ever
        stage.model.state_dict()
    return told.getvalue()


def test_a_rank_that_saves_alone_says_whom_it_waits_for() -> None:
    told = run(save_alone, ranks=2)[0]
    assert told.startswith(
        "rank 0 has waited 0 s to hear from ranks that have not come here: 1. It is at: a state_dict of"
    )
    assert f"{__file__}:" in told
    assert "call it on all of them" in told
    assert "\n  rank 1: " in told


def names_alone() -> list[str]:
    """A state dict of rank 0 alone, where names are all that is asked; then one in a block with whole weights."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REFIMPL_STATE_DICT", "names")
        stage = built()
    train(stage)
    named = stage.model.state_dict() if dist.get_rank() == 0 else {}
    if named:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("REFIMPL_STATE_DICT", "names")
            with pytest.warns(UserWarning, match="written as an empty tensor.*save_16bit_model"):
                torch.save(named, file := io.BytesIO())
        file.seek(0)
        written = torch.load(file, weights_only=True)
        assert {name: p.numel() for name, p in written.items()} == dict.fromkeys(named, 0)
    for name, p in named.items():
        assert p.shape == stage.model.get_parameter(name).shape
        with pytest.raises(RuntimeError, match=f"parameter {re.escape(name)}: .* needs its values"):
            p.sum()
    with GatheredParameters(list(stage.model.parameters())):
        inside = stage.model.state_dict()
    whole = stage.full_state_dict() or {}
    assert all(torch.equal(inside[name], w) for name, w in whole.items())
    return [*named, *whole]


def test_where_names_are_all_that_is_asked_one_rank_alone_may_ask() -> None:
    first, *others = run(names_alone, ranks=2)
    assert first[: len(first) // 2] == first[len(first) // 2 :] == [*Chain(EQUAL, False).state_dict()]
    assert others == [[]]


def copy_alone(how: str) -> str:
    """What this rank is told; rank 0 copies the model, where the others do as usual and gather the same buffers."""
    stage = built()
    for _ in range(2):
        stage.model.state_dict()
    with pytest.raises(RankDivergence) as told:  # noqa: PT012
        if stage.group.rank == 0:
            copy.deepcopy(stage.model) if how == "copy" else pickle.dumps([*stage.model.parameters()])
        stage.model.state_dict()
        stage.group.barrier()
    return str(told.value)


@pytest.mark.parametrize(("how", "ranks"), [("copy", 2), ("pickle", 3)])
def test_a_copy_on_one_rank_alone_is_not_met_by_a_state_dict(how: str, ranks: int) -> None:
    with World(ranks) as world:
        told = world.call(copy_alone, how)
        world.kill()
    assert told == [told[0]] * ranks
    assert re.search(r"rank 0: a copy of a parameter .*; rank 1: a state_dict of the model", told[0])


def part_elsewhere(follows: bool) -> str:
    """What this rank is told: rank 0 goes on with the one of two models, and the others with the other one.

    follows: the others do what was expected of them, and wait in a collective; else they too call the roll.
    """
    handle = dist.new_group()
    one, other = built(handle=handle), built(handle=handle)
    for _ in range(2 if follows else 0):
        train(one)
        train(other)
    with pytest.raises(RankDivergence, match="have come to different models") as told:
        evaluate(one) if one.group.rank == 0 else train(other)
    return str(told.value)


@pytest.mark.parametrize(("ranks", "transport"), [(2, "gloo"), (3, NEAR)])
@pytest.mark.parametrize("follows", [False, True])
def test_ranks_at_different_models_are_told_which(
    follows: bool, ranks: int, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REFIMPL_TRANSPORT", transport)
    with World(ranks) as world:
        told = world.call(part_elsewhere, follows)
        world.kill()
    where = r" at .*test_order\.py:\d+ \(model {} under ZeRO-3\)"
    theirs = A_FORWARD + where.format(2)
    if follows:  # who calls the roll sees them in their call, unless they have said so themselves by then
        theirs = r".*call \d+, all_gather .* at .*test_order\.py:\d+(, in the group of| \(model 2 under ZeRO-3\))"
    for text in told:
        assert re.search(rf"rank 0: a new forward of the model \(training, no gradients\){where.format(1)}", text), text
        assert re.search(rf"rank [12]: {theirs}", text), text


def part_from_zero2() -> None:
    """Rank 0 goes on with a model under ZeRO-3, where it calls the roll, and the others with one under ZeRO-2."""
    handle, model = dist.new_group(), Chain(EQUAL, False)
    one, other = built(handle=handle), Zero2(model, torch.optim.AdamW(model.parameters()), Group(handle))
    train(one)
    train(other)
    evaluate(one) if one.group.rank == 0 else train(other)


@pytest.mark.parametrize(("ranks", "transport"), [(2, "gloo"), (3, NEAR)])
def test_a_rank_in_a_call_of_another_stage_is_named_by_who_calls_the_roll(
    ranks: int, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REFIMPL_TRANSPORT", transport)
    rank_0 = r"rank 0: a new forward of the model \(training, no gradients\) at .*\(model 1 under ZeRO-3\)"
    other = r"rank [12]: call \d+, reduce_scatter .*test_order\.py:\d+, in the group of call \d+, .*test_order\.py:\d+"
    with pytest.raises(RankError, match=rf"come to different models, and wait for each other\. {rank_0}; {other}"):
        run(part_from_zero2, ranks=ranks)


def part_at_once(turn: Callable[[Zero3], None]) -> tuple[str, bool]:
    stage = built()
    return part(turn, stage, after=0), stage.group.patience.lost is None


@pytest.mark.parametrize("name", ["skips a module", "runs one twice", "stops after forward", "evaluates"])
def test_in_the_first_step_too(name: str) -> None:
    """Where every rank asks before it does anything, none has begun what others never will."""
    told = run(part_at_once, WRONG_TURNS[name][0], ranks=2)
    assert told[0] == told[1]
    assert told[0][1] is (name != "stops after forward")


class Rows(nn.Module):
    """Two rows of three layers, each row a unit; `plan` says which layers run."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.ModuleList(nn.ModuleList(nn.Linear(8, 8) for _ in range(3)) for _ in range(2))

    def forward(self, x: Tensor, plan: tuple[tuple[int, int], ...]) -> Tensor:
        for row, layer in plan:
            x = x + self.rows[row][layer](x)  # type: ignore[index]
        return x.square().mean()


ALL_LAYERS = tuple(product(range(2), range(3)))


def part_in_rows(left_out: tuple[tuple[int, int], ...], trains: bool) -> str:
    """What the ranks are told if the last one leaves out these layers; "" if nothing."""
    torch.manual_seed(0)
    model, group = Rows(), Group(dist.new_group())
    group.patience.stall = group.patience.again = 0.05
    stage = Zero3(model, torch.optim.AdamW(model.parameters(), lr=1e-3), group, ZeroConfig(unit_size=1000))
    assert [u.name for u in stage.units] == ["rows.0.0 to rows.0.2", "rows.1.0 to rows.1.2"]
    other = tuple(layer for layer in ALL_LAYERS if layer not in left_out)
    try:
        for step in range(4):
            with torch.set_grad_enabled(trains):
                plan = other if step == 2 and group.rank == group.size - 1 else ALL_LAYERS
                loss = model(torch.ones(2, 8), plan)
            if trains:
                stage.backward(loss)
                stage.step()
    except RankDivergence as error:
        return str(error)
    return ""


@pytest.mark.parametrize("ranks", [2, 3])
def test_joined_units_part_where_the_ranks_would_send_something_else(ranks: int) -> None:
    """A layer less in a row gathers the same; but the row is reduced elsewhere, as one of its gradients is missing."""
    parted = {
        ALL_LAYERS[3:4]: ("reduction of rows.1.0 to rows.1.2", "backward of rows.0.0 to rows.0.2"),
        ALL_LAYERS[:3]: ("forward of rows.0.0 to rows.0.2", "forward of rows.1.0 to rows.1.2"),
    }
    with World(ranks, compare=False) as world:
        assert world.call(part_in_rows, ((0, 1), (1, 0)), False) == [""] * ranks
        told = [world.call(part_in_rows, left_out, True) for left_out in parted]
        world.kill()
    for texts, (usual, other) in zip(told, parted.values(), strict=True):
        lines = "; ".join(f"rank {rank}: {other if rank == ranks - 1 else usual}" for rank in range(ranks))
        assert all(f"through the model. {lines}. ZeRO-3" in text for text in texts), texts


def part_and_go_on() -> list[str]:
    """After the ranks have parted in the middle of a step nothing hangs: whatever is tried says why."""
    stage = built()
    first = part(lambda stage: train(stage, 0, 2, 1, 3, 4), stage, after=2)
    said = []
    for attempt in (train, evaluate, lambda stage: stage.full_state_dict()):
        with pytest.raises(RankDivergence) as again:
            attempt(stage)
        said.append(str(again.value))
    if NEAR == "shared":  # objects go another way than data, and no more calls are compared
        assert stage.group.all_gather_object(stage.group.rank) == [0, 1]
    return [first, *said]


def test_nothing_hangs_after_ranks_have_parted() -> None:
    for said in run(part_and_go_on, ranks=2):
        assert len(set(said)) == 1


class Pool(nn.Module):
    """As in Qwen-VL's pool of a picture: with a real one the positions' gradient comes first, with a blank one last."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.positions, self.inner = nn.Parameter(torch.randn(8, 8)), nn.Linear(8, 8)

    def forward(self, x: Tensor, real: bool) -> Tensor:
        y: Tensor = self.inner(x) @ self.positions if real else self.inner(x @ self.positions)
        return y


def pooled(stage_class: type[Stage], config: ZeroConfig, real: bool) -> list[Tensor]:
    model, group = nn.Sequential(Pool()), Group(dist.new_group())
    group.patience.stall = group.patience.again = 0.05
    stage = stage_class(model, torch.optim.AdamW(model.parameters(), lr=1e-3), group, config)
    for _ in range(2):
        loss = model[0](torch.ones(2, 8), real).square().mean()
        stage.backward(loss)
        stage.step()
    with GatheredParameters(list(model.parameters())):
        return [p.detach().clone() for p in model.parameters()]


def gradients_in_another_order() -> tuple[str, bool]:
    """What is said where ranks' gradients come in different orders; whether a leaf then has ZeRO-2's bits."""
    real = dist.get_rank() == 0
    with pytest.raises(RankDivergence) as told:
        pooled(Zero3, ZeroConfig(), real)
    leaf = pooled(Zero3, ZeroConfig(leaf_modules=(Pool,)), real)
    return str(told.value), all(map(torch.equal, leaf, pooled(Zero2, ZeroConfig(), real)))


def test_a_leaf_takes_gradients_that_come_in_another_order() -> None:
    for said, same in worlds.run(gradients_in_another_order, ranks=2):
        assert "rank 0: backward of 0; rank 1: backward of 0.inner" in said
        assert "gradients of a module come in another order, have the module around these gathered whole" in said
        assert same


def part_uncaught(after: int) -> None:
    stage = Zero3(Chain(EQUAL, False), group=Group.world())
    for step in range(3):
        evaluate(stage)
        if step == after and stage.group.rank == 1:
            with torch.no_grad():
                stage.model(torch.ones(2, 8), (1,))


@pytest.mark.parametrize(("after", "alive"), [(-1, True), (0, False)])
def test_a_world_whose_ranks_are_out_of_step_ends(after: int, alive: bool) -> None:
    """Where some have begun what others never will, the next call would meet the rest of it."""
    with World(2, compare=False) as world:
        if after < 0:
            world.call(part_uncaught, after)
        else:
            with pytest.raises(RankError, match=r"rank 0: .*; rank 1: forward of layers\.1"):
                world.call(part_uncaught, after)
        assert world.alive is alive


def part_caught() -> bool:
    config = ZeroConfig(prefetch_bucket_size=10**6, leaf_modules=(nn.Sequential,))
    stage = Zero3(Chain(DIFFERENT, False), group=Group(dist.group.WORLD, transport="gloo"), config=config)
    for step in range(3):
        with pytest.raises(RankDivergence) if step == 2 else nullcontext():
            train(stage, *(0, 2, 3, 4) if step == 2 and stage.group.rank == 1 else USUAL, step=False)
    return stage.group.patience.lost is not None


def test_processes_that_have_parted_end_by_themselves() -> None:
    """Gloo's destructor waits for what was begun: under torchrun a script that caught the error never ended."""
    with World(4, compare=False) as world:
        assert world.call(part_caught) == [True] * 4
    assert [process.exitcode for process in world.processes] == [0] * 4


# Ranks that do not.


def calls_made(do: Callable[[Zero3], None], times: int, is_checkpointed: bool = False) -> list[int]:
    stage = built(is_checkpointed=is_checkpointed)
    counts = []
    for _ in range(times):
        do(stage)
        assert stage.path.roll_call is not None
        counts.append(stage.path.roll_call.round)
    return [after - before for before, after in zip([0, *counts], counts, strict=False)]


def accumulate(stage: Zero3) -> None:
    train(stage, step=False)
    train(stage, step=False)
    train(stage)


def evaluate_and_train(stage: Zero3) -> None:
    evaluate(stage)
    train(stage)


def two_views(stage: Zero3) -> None:
    views = [stage.model(torch.full((2, 8), value), USUAL) for value in (1.0, 2.0)]
    stage.backward(views[0] + views[1])
    stage.step()


@pytest.mark.parametrize("is_checkpointed", [False, True])
@pytest.mark.parametrize("do", [train, accumulate, evaluate, evaluate_and_train])
def test_nothing_is_said_once_a_path_is_known(do: Callable[[Zero3], None], is_checkpointed: bool) -> None:
    for calls in run(calls_made, do, 5, is_checkpointed, ranks=2):
        assert calls[0] > 0
        assert calls[2:] == [0, 0, 0]


def test_two_forwards_before_a_backward_say_one_thing_a_step() -> None:
    """The first stops where a backward was seen to follow."""
    assert run(calls_made, two_views, 5, ranks=2)[0][2:] == [1, 1, 1]


def changes_on_all_ranks(stage: Zero3) -> None:
    for plan in (USUAL, (0, 2, 4), (4, 3, 2), USUAL):
        train(stage, *plan)


def test_a_path_that_changes_on_all_ranks_is_fine() -> None:
    for calls in run(calls_made, changes_on_all_ranks, 2, ranks=3):
        assert all(calls)


def slow(times: int) -> tuple[int, int]:
    """The last rank computes until the others have wondered several times what keeps it."""
    stage, store = built(), dist.distributed_c10d._get_default_store()
    assert stage.path.roll_call is not None
    stage.group.patience.ask.append(lambda _: store.add("wondered", 1) and None)
    for _ in range(2):
        train(stage)
    rounds = stage.path.roll_call.round
    for step in range(1, times + 1):
        while stage.group.rank == stage.group.size - 1 and store.add("wondered", 0) < 5 * step:
            pass
        train(stage)
    return rounds, stage.path.roll_call.round


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_slow_rank_is_waited_for(ranks: int) -> None:
    for before, after in run(slow, 3, ranks=ranks):
        assert before == after


def slow_in_a_call() -> list[int]:
    """As `slow`, where the others have called the roll and this rank comes later."""
    stage, store = built(), dist.distributed_c10d._get_default_store()
    train(stage)
    if stage.group.rank == 0:
        store.set("is there", "")
    else:
        store.wait(["is there"])
    evaluate(stage)
    assert stage.path.roll_call is not None
    return [stage.path.roll_call.round]


def test_ranks_come_to_a_call_in_any_order() -> None:
    rounds = run(slow_in_a_call, ranks=3)
    assert rounds[0] == rounds[1] == rounds[2]


def leaves() -> str:
    stage = built()
    train(stage)
    train(stage)
    if stage.group.rank == 0:
        stage.path.remove()  # as when the process ends
        return ""
    with pytest.raises(RankLost) as lost:
        evaluate(stage)
    return str(lost.value)


def test_a_rank_that_leaves_is_named() -> None:
    assert "rank 0 has left" in run(leaves, ranks=2)[1]


class Closed:
    """A store of which the rank that kept it is no longer there."""

    def set(self, key: str, value: str) -> None:
        raise dist.DistNetworkError("Connection reset by peer")


def is_killed() -> list[str]:
    stage, here = built(), Register.of_job()
    assert here
    assert stage.path.roll_call
    if stage.group.rank == 0:
        here.leave()  # as its process's end is seen: it left no word
        return []
    said = []
    for store in (stage.path.roll_call.store, Closed()):
        stage.path.roll_call.store = store
        with pytest.raises(RankLost) as lost:
            evaluate(stage)
        said.append(str(lost.value))
    return said


def test_a_rank_that_is_killed_is_named() -> None:
    for said in run(is_killed, ranks=2)[1]:
        assert said.startswith("rank 1 waits in vain to hear what the others do: rank 0 left")


def unchecked() -> bool:
    return built(check_order=False).path.roll_call is None


def test_it_can_be_left_out() -> None:
    assert all(run(unchecked, ranks=2))
