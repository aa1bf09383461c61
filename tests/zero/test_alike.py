"""Ranks that bring different models are told at once, all of them: what is padded could travel as long as another."""

import copy
import os
import pickle
import re
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pairs import pairwise
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint
from training import STAGES
from worlds import run

from refimpl.comm.group import Group
from refimpl.comm.mesh import Mesh
from refimpl.compress.compression import Compression
from refimpl.compress.topk import TopK
from refimpl.launch import RankError
from refimpl.zero.config import ZeroConfig
from refimpl.zero.stage import Stage

DIFFERENT = {
    "shape": r"rank 0: 0\.weight \[7, 5\] .*; rank 1: 0\.weight \[8, 5\]",
    "order": r"rank 0: first\.weight \[5, 5\] .*; rank 1: second\.weight \[5, 5\]",
    "more": r"rank 0: nothing; rank 1: 3\.weight \[3, 3\] torch.float32 in the optimizer's group 0",
    "dtype": r"rank 0: 0\.weight \[7, 5\] torch.float32 .*; rank 1: 0\.weight \[7, 5\] torch.float64",
    "frozen": r"rank 0: 0\.weight .* in the optimizer's group 0; rank 1: 0\.weight .* not trained",
    "groups": r"rank 0: 2\.weight .* in the optimizer's group 0; rank 1: 2\.weight .* in the optimizer's group 1",
    "rate": r"rank 0: AdamW, group 0: lr 0\.001; rank 1: AdamW, group 0: lr 0\.002",
    "betas": r"rank 0: AdamW, group 0: betas \(0\.9, 0\.999\); rank 1: AdamW, group 0: betas \(0\.8, 0\.999\)",
    "class": r"rank 0: the stage: class \w+; rank 1: the stage: class \w+",
    "clipping": r"rank 0: ZeroConfig: gradient_clipping 0\.0; rank 1: ZeroConfig: gradient_clipping 0\.1",
}


def model_of(how: str, other: bool) -> nn.Module:
    model = nn.Sequential(nn.Linear(5, 8 if how == "shape" and other else 7), nn.Tanh(), nn.Linear(7, 3))
    if how == "order":
        layers = {"first": nn.Linear(5, 5), "second": nn.Linear(5, 5)}
        return nn.ModuleDict({name: layers[name] for name in sorted(layers, reverse=other)})
    if how == "more" and other:
        model.append(nn.Linear(3, 3))
    model[0].requires_grad_(not (how == "frozen" and other))
    return model.double() if how == "dtype" and other else model


def different(stage: str, how: str) -> str:
    group = Group.world()
    other = group.rank == 1
    model = model_of(how, other)
    groups = [list(model.parameters())]
    if how == "groups" and other:
        groups = [groups[0][:2], groups[0][2:]]
    optimizer = torch.optim.AdamW(
        [{"params": group} for group in groups],
        lr=torch.tensor(0.002) if how == "rate" and other else 0.001,
        betas=(0.8 if how == "betas" and other else 0.9, 0.999),
    )
    stages = list(STAGES)
    kind = stages[(stages.index(stage) + 1) % len(stages)] if how == "class" and other else stage
    with pytest.raises(ValueError, match="different models") as told:
        STAGES[kind](model, optimizer, group, ZeroConfig(gradient_clipping=0.1 if how == "clipping" and other else 0.0))
    return str(told.value)


@pytest.mark.parametrize(("stage", "how", "ranks"), pairwise(list(STAGES), list(DIFFERENT), [2, 3]))
def test_different_models_are_refused_on_every_rank(stage: str, how: str, ranks: int) -> None:
    texts = run(different, stage, how, ranks=ranks)
    assert len(set(texts)) == 1
    assert re.search(DIFFERENT[how], texts[0]), texts[0]


class Own(TopK):
    """An operator of the user's, of which each rank says something else: by default where it lies in memory."""

    def __repr__(self) -> str:
        return f"<Own of {os.getpid()}>"


def of_a_ranks_own(stage: str) -> None:
    group = Group.world()
    model = nn.Linear(5, 7)
    optimizer = torch.optim.AdamW(model.parameters())
    config = ZeroConfig(compression=Compression(Own(0.5)), sub_group_size=16 * (1 + group.rank))
    STAGES[stage](model, optimizer, group, config)


@pytest.mark.parametrize("stage", ["ddp", "zero1"])
def test_what_is_a_ranks_own_affair_may_differ(stage: str) -> None:
    run(of_a_ranks_own, stage)


CHANGED: dict[str, tuple[Any, str]] = {
    "lr": (5e-4, r"0\.0005"),
    "betas": ((0.8, 0.999), r"\(0\.8, 0\.999\)"),
    "weight_decay": (float("nan"), "nan"),
    "eps": (torch.tensor(0.5), r"0\.5"),
}


def kept(stage: Stage) -> list[Tensor]:
    return [*stage.update.masters.values(), *stage.update.state()]


def with_a_setting_of_its_own(stage: str, key: str) -> str:
    """As ReduceLROnPlateau does it to the rate with a loss of this rank's own. Set alike it trains on."""
    group, model = Group.world(), model_of("", False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
    built = STAGES[stage](model, optimizer, group)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1)
    for own in (0, float("nan")):
        optimizer.param_groups[0]["a number of the script's own"] = own
        model(torch.ones(2, 5)).sum().backward()
        optimizer.step()
        schedule.step()
    usual, before = optimizer.param_groups[0][key], [t.clone() for t in kept(built)]
    model(torch.ones(2, 5)).sum().backward()
    optimizer.param_groups[0][key] = CHANGED[key][0] if group.rank == group.size - 1 else usual
    with pytest.raises(ValueError, match=r"step 3: AdamW, group 0: ") as told:
        optimizer.step()
    assert all(map(torch.equal, kept(built), before)), "something was updated"
    optimizer.param_groups[0][key] = usual
    optimizer.step()
    assert optimizer.state_dict()["state"][0]["step"] == 3
    return str(told.value)


@pytest.mark.parametrize(("stage", "key", "ranks"), pairwise(list(STAGES), list(CHANGED), [2, 3]))
def test_a_setting_that_changes_on_one_rank_is_told_on_all_before_the_weights_part(
    stage: str, key: str, ranks: int
) -> None:
    texts = run(with_a_setting_of_its_own, stage, key, ranks=ranks)
    assert len(set(texts)) == 1
    here, there = ("0" if ranks == 2 else "0, 1"), ranks - 1
    assert re.search(rf"group 0: {key} is not .* \(rank {here}: .*; rank {there}: {CHANGED[key][1]}\)", texts[0]), texts


def with_weights_of_its_own(stage: str, replicas: bool) -> str:
    """Before the fourth step, where nothing counts what is written."""
    group, model = Group.world(), model_of("", False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
    config = ZeroConfig(reduce_bucket_size=10, param_persistence_threshold=5)
    mesh = Mesh({"across": group.size if replicas else 1, "shard": 1 if replicas else group.size})
    built = STAGES[stage](model, optimizer, mesh.group("shard"), config)
    if replicas:
        built.replicate(mesh.group("across"))
    for step in range(4):
        if step == 3 and group.rank == group.size - 1:
            built.local_parameter("0.weight").add_(1)
        model(torch.ones(2, 5)).sum().backward()
        with pytest.raises(ValueError, match="step 4") if step == 3 else nullcontext() as told:
            optimizer.step()
        optimizer.zero_grad()
    return str(told.value)


@pytest.mark.parametrize(
    ("stage", "replicas", "ranks"), [("ddp", False, 2), ("ddp", False, 3), ("ddp", True, 3), ("zero3", True, 2)]
)
def test_weights_that_change_on_one_rank_are_told(stage: str, replicas: bool, ranks: int) -> None:
    texts = run(with_weights_of_its_own, stage, replicas, ranks=ranks)
    assert len(set(texts)) == 1
    assert re.search(rf"the weights' checksum is not .* \(rank 0.*: -?\d+; rank {ranks - 1}: -?\d+\)", texts[0]), texts


def with_gradients_of_its_own(how: str) -> str:
    """At the third step, when no checksum of the weights is due. What all have done, or comes to the same, is right."""
    group, model, optimizer, _ = standing("ddp")
    for step in range(3):
        model(torch.ones(2, 5)).sum().backward()
        for p in model.parameters() if step == 1 else ():
            p.grad.mul_(2)
        if step < 2 and group.rank == 0:
            model[0].bias.grad = model[0].bias.grad.clone()
        if step == 2 and group.rank == group.size - 1 and how == "set":
            model[2].weight.grad = torch.zeros(3, 7)
        elif step == 2 and group.rank == group.size - 1:
            model[2].weight.grad.mul_(2)
        with pytest.raises(ValueError, match="step 3") if step == 2 else nullcontext() as told:
            optimizer.step()
    return str(told.value)


@pytest.mark.parametrize(("how", "ranks"), [("set", 2), ("in place", 3)])
def test_a_gradient_that_one_rank_alone_writes_is_told_on_all(how: str, ranks: int) -> None:
    texts = run(with_gradients_of_its_own, how, ranks=ranks)
    assert len(set(texts)) == 1
    assert "gradients were written on some ranks alone, in 2.weight; nothing is updated" in texts[0]


def standing(stage: str) -> tuple[Group, nn.Module, torch.optim.Optimizer, Stage]:
    """The same on all ranks."""
    group, model = Group.world(), model_of("", False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
    return group, model, optimizer, STAGES[stage](model, optimizer, group, ZeroConfig(param_persistence_threshold=100))


def with_frozen_layers_of_its_own(stage: str) -> str:
    """In the second step. What a rank does not use, or all have frozen, is as good as ever, and what all thaw again."""
    group, model, optimizer, built = standing(stage)
    last = group.rank == group.size - 1

    def backward(used: bool = True) -> None:
        (model(torch.ones(2, 5)) if used else model[2](torch.ones(2, 7))).sum().backward()

    model[0].requires_grad_(False)
    backward()
    model[0].requires_grad_(True)
    backward(used=not last or stage == "zero3")  # which wants the same path on all
    optimizer.step()
    before = [t.clone() for t in kept(built)]
    model[0].requires_grad_(not last)
    model[2].bias.requires_grad_(False)
    backward()
    model.requires_grad_(True)
    with pytest.raises(ValueError, match="step 2: frozen") as told:
        optimizer.step()
    assert all(map(torch.equal, kept(built), before)), "something was updated"
    optimizer.zero_grad()
    backward()
    optimizer.step()
    return str(told.value)


@pytest.mark.parametrize(("stage", "ranks"), pairwise(list(STAGES), [2, 3]))
def test_what_one_rank_alone_has_frozen_is_told_on_all(stage: str, ranks: int) -> None:
    texts = run(with_frozen_layers_of_its_own, stage, ranks=ranks)
    assert len(set(texts)) == 1
    assert f"gradient: rank {ranks - 1}: 0.weight, 0.bias." in texts[0]


def with_a_layer_frozen_between(stage: str, thaws: bool) -> str:
    """Before the second of three backwards, or before the first alone. All ranks may, also one that does not use it."""
    group, model, optimizer, built = standing(stage)
    last = group.rank == group.size - 1

    def accumulate(freezes: bool, unused: bool = False) -> None:
        for i in range(3):
            model[0].requires_grad_(not (freezes and (i == 0 if thaws else i == 1)))
            (model[2](torch.ones(2, 7)) if unused else model(torch.ones(2, 5))).sum().backward()
        model[0].requires_grad_(True)

    accumulate(freezes=True)
    optimizer.step()
    accumulate(freezes=not last, unused=last)
    optimizer.step()
    before = [t.clone() for t in kept(built)]
    accumulate(freezes=last)
    with pytest.raises(ValueError, match="step 3: frozen") as told:
        optimizer.step()
    assert all(map(torch.equal, kept(built), before)), "something was updated"
    optimizer.zero_grad()
    accumulate(freezes=False)
    optimizer.step()
    return str(told.value)


@pytest.mark.parametrize(("stage", "thaws", "ranks"), pairwise(["ddp", "zero1", "zero2"], [False, True], [2, 3]))
def test_a_layer_that_one_rank_freezes_between_two_backwards_is_told_on_all(
    stage: str, thaws: bool, ranks: int
) -> None:
    texts = run(with_a_layer_frozen_between, stage, thaws, ranks=ranks)
    assert len(set(texts)) == 1
    assert f"gradient: rank {ranks - 1}: 0.weight, 0.bias." in texts[0]


def with_a_hook_that_raises(stage: str, when: str) -> str:
    """On all ranks in the first step, as in torch; on the last alone in the second. The script catches it."""
    group, model, optimizer, built = standing(stage)
    raises, saved = [True], copy.deepcopy(built.state_dict())

    def hook(*_: Any) -> None:
        if raises[0]:
            raise KeyError("of the script's own")

    (optimizer.register_step_pre_hook if when == "before" else optimizer.register_step_post_hook)(hook)
    for step in range(3):
        raises = [step == 0 or (step == 1 and group.rank == group.size - 1)]
        before = [t.clone() for t in kept(built)]
        model(torch.ones(2, 5)).sum().backward()
        error = KeyError if raises[0] else ValueError
        with pytest.raises(error) if raises[0] or step == 2 else nullcontext() as told:
            optimizer.step()
    assert all(map(torch.equal, kept(built), before)), "something was updated"
    built.load_state_dict(saved)
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    return str(told.value)


@pytest.mark.parametrize(("stage", "when", "ranks"), pairwise(list(STAGES), ["before", "after"], [2, 3]))
def test_a_step_hook_that_raises_on_one_rank_alone_is_told_on_all(stage: str, when: str, ranks: int) -> None:
    texts = run(with_a_hook_that_raises, stage, when, ranks=ranks)
    assert len(set(texts)) == 1
    assert f"step 3: the optimizer's step raised on some ranks alone (rank {ranks - 1}, step 2: KeyError: " in texts[0]


REPLACED: dict[str, Any] = {
    "new": lambda params, model: list(model.parameters()),
    "less": lambda params, model: params[1:],
    "the same": lambda params, model: list(params),
}


def with_other_parameters_in_a_group(stage: str, how: str, everywhere: bool) -> str:
    group, model, optimizer, built = standing(stage)
    usual = optimizer.param_groups[0]["params"]
    for step in range(2):
        if step and (everywhere or group.rank == 0):
            optimizer.param_groups[0]["params"] = REPLACED[how](usual, model)
        before = [t.clone() for t in kept(built)]
        model(torch.ones(2, 5)).sum().backward()
        refused = step and how != "the same"
        with pytest.raises(ValueError, match="param_groups were replaced") if refused else nullcontext() as told:
            optimizer.step()
    assert all(map(torch.equal, kept(built), before)) == (how != "the same")
    optimizer.param_groups[0]["params"] = usual
    optimizer.step()
    return str(told.value) if told else ""


@pytest.mark.parametrize(("stage", "how", "everywhere"), pairwise(list(STAGES), list(REPLACED), [False, True]))
def test_other_parameters_in_a_group_are_told_on_all_ranks(stage: str, how: str, everywhere: bool) -> None:
    texts = run(with_other_parameters_in_a_group, stage, how, everywhere, ranks=2)
    assert len(set(texts)) == 1
    assert (how == "the same" and not texts[0]) or f"({'every rank' if everywhere else 'rank 0'}: [0])" in texts[0]


def with_other_parameters_later(stage: str, how: str) -> str:
    """Each rank trains another one from now on; as they are padded, they travel as long as each other."""
    group = Group.world()
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 7).requires_grad_(False), nn.Linear(7, 3))
    named = dict(model.named_parameters())
    name = "1.weight" if group.rank else "1.bias"
    first = [p for n, p in named.items() if how == "thawed" or not n.startswith("1")]
    optimizer = torch.optim.AdamW(first, lr=0.1)
    built = STAGES[stage](model, optimizer, group, ZeroConfig(param_persistence_threshold=0))  # type: ignore[call-arg]
    named[name].requires_grad_()
    if how == "group":
        optimizer.add_param_group({"params": [named[name]]})
    before = [t.clone() for t in kept(built)]
    model(torch.ones(2, 5)).sum().backward()
    with pytest.raises(ValueError, match="nothing is updated") as told:
        optimizer.step()
    assert all(map(torch.equal, kept(built), before))
    return str(told.value)


@pytest.mark.parametrize(("stage", "how", "ranks"), pairwise(list(STAGES), ["thawed", "group"], [2, 3]))
def test_other_parameters_trained_later_are_told_on_all_ranks(stage: str, how: str, ranks: int) -> None:
    texts = run(with_other_parameters_later, stage, how, ranks=ranks)
    number = 0 if how == "thawed" else 1
    others = ", ".join(map(str, range(1, ranks)))
    assert f"(rank 0: 1.bias of group {number}; rank {others}: 1.weight of group {number})" in texts[0]
    assert len(set(texts)) == 1


ALONE = "on some ranks alone: rank 0: 0.weight, 0.bias, 2.bias;"
WRITTEN = {"": ALONE, "data": ALONE, "values": "with other values on different ranks: 0.weight, 0.bias, 2.bias;"}


class Routed(nn.Module):
    """Both layers, and one of them once more under a checkpoint whose backward runs inside the other."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(2))

    def forward(self, x: Tensor, once_more: int) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return checkpoint(self.layers[once_more], x, use_reentrant=True).square().mean()  # type: ignore[no-any-return]


def with_a_layer_twice_of_its_own(stage: str, alike: bool) -> str:
    model, group = Routed(), Group.world()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    built = STAGES[stage](model, optimizer, group, ZeroConfig(reduce_bucket_size=16))
    built.backward(model(torch.ones(2, 4, requires_grad=True), 0 if alike else group.rank))
    try:
        built.step()
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("stage", ["ddp", "zero1", "zero2"])
def test_buckets_that_some_ranks_reduce_twice_are_told_on_all(stage: str) -> None:
    """Of one length, the second sums of two layers were added to each other, and nobody was told."""
    assert run(with_a_layer_twice_of_its_own, stage, True) == ["", ""]
    for said in run(with_a_layer_twice_of_its_own, stage, False):
        assert re.search(r"twice.* \(rank 0: layers\.0\.weight; rank 1: layers\.1\.weight\); nothing is updated", said)


def with_writes_of_its_own(stage: str, how: str) -> str:
    """Before the third step, when no checksum of DDP's weights is due. Who sends what he has written may."""
    group, model, optimizer, built = standing(stage)

    def write(value: int) -> None:
        for p in (model[0].weight, model[0].bias, model[2].bias) if how else ():
            p.data.fill_(value)
        if not how:
            model[0].load_state_dict({name: torch.full_like(w, value) for name, w in model[0].state_dict().items()})
            torch.nn.init.constant_(model[2].bias, value)

    for step in range(3):
        if step and (group.rank == 0 or how == "values"):
            write(group.rank)
        for p in model.parameters() if step == 1 else ():
            group.broadcast(p.data)
        model(torch.ones(2, 5)).sum().backward()
        before = [t.clone() for t in kept(built)]
        with pytest.raises(ValueError, match="step 3") if step == 2 else nullcontext() as told:
            optimizer.step()
    assert all(map(torch.equal, kept(built), before)), "something was updated"
    if group.rank:
        write(0)
    optimizer.step()
    return str(told.value)


@pytest.mark.parametrize(("stage", "how", "ranks"), pairwise(list(STAGES), list(WRITTEN), [2, 3]))
def test_weights_that_are_not_written_alike_are_told_on_all(stage: str, how: str, ranks: int) -> None:
    texts = run(with_writes_of_its_own, stage, how, ranks=ranks)
    assert len(set(texts)) == 1
    assert f"written in place (by load_state_dict, copy_, init) {WRITTEN[how]}" in texts[0]


@pytest.fixture
def pretended() -> Iterator[Group]:
    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=8)
    yield Group.world()
    dist.destroy_process_group()


@pytest.mark.parametrize("stage", list(STAGES))
def test_ranks_that_are_pretended_step(stage: str, pretended: Group) -> None:
    model = model_of("", False)
    optimizer = torch.optim.AdamW(model.parameters())
    built = STAGES[stage](model, optimizer, pretended, ZeroConfig(check_order=False))  # whose words need a store
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    assert built.update.steps == 1


class Neighbours(nn.Module):
    """Sums over a sparse adjacency matrix, which autograd keeps: it has no memory of its own to be asked for."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.nodes, self.mix = nn.Parameter(torch.randn(6, 4)), nn.Linear(4, 4)

    def forward(self, adjacency: Tensor) -> Tensor:
        return torch.sparse.mm(adjacency, self.mix(self.nodes)).square().mean()


def on_a_graph(stage: str | None, ranks: list[int]) -> list[Tensor]:
    model = Neighbours()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    if stage:
        STAGES[stage](model, optimizer)
        ranks = [Group.world().rank]
    for step in range(3):
        for rank in ranks:
            dense = torch.rand(6, 6, generator=torch.Generator().manual_seed(10 * step + rank)).round()
            (model(dense.to_sparse()) / len(ranks)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return list(model.state_dict().values())


@pytest.mark.parametrize("stage", list(STAGES))
def test_a_sparse_input_is_as_good_as_any(stage: str) -> None:
    expected = on_a_graph(None, [0, 1])
    for found in run(on_a_graph, stage, [], ranks=2):
        torch.testing.assert_close(found, expected)


def without_memory(stage: str) -> None:
    with torch.device("meta"):
        model = nn.Linear(3, 3)
    STAGES[stage](model, torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize("stage", list(STAGES))
def test_a_model_without_memory_is_refused(stage: str) -> None:
    with pytest.raises(RankError, match="parameter weight is on the meta device"):
        run(without_memory, stage, ranks=2)


def copied(stage: str, how: str) -> None:
    model = nn.Linear(3, 3)
    built = STAGES[stage](model, torch.optim.SGD(model.parameters(), lr=0.1))
    copy.deepcopy(built) if how == "copy" else pickle.dumps(built)


@pytest.mark.parametrize(("stage", "how"), pairwise(list(STAGES), ["copy", "pickle"]))
def test_a_stage_says_what_to_copy_in_its_place(stage: str, how: str) -> None:
    with pytest.raises(RankError, match=r"cannot be copied or pickled: copy\.deepcopy\(model\)"):
        run(copied, stage, how, ranks=2)
