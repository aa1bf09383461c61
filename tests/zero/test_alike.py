"""Ranks that bring different models are told at once, all of them: what is padded could travel as long as another."""

import copy
import pickle
import re
from collections.abc import Callable

import pytest
import torch
from pairs import pairwise
from torch import Tensor, nn
from training import STAGES
from worlds import run

from refimpl.comm.group import Group
from refimpl.launch import RankError
from refimpl.zero import alike

DIFFERENT = {
    "shape": r"rank 0: 0\.weight \[7, 5\] .*; rank 1: 0\.weight \[8, 5\]",
    "order": r"rank 0: first\.weight \[5, 5\] .*; rank 1: second\.weight \[5, 5\]",
    "more": r"rank 0: nothing; rank 1: 3\.weight \[3, 3\] torch.float32 in the optimizer's group 0",
    "dtype": r"rank 0: 0\.weight \[7, 5\] torch.float32 .*; rank 1: 0\.weight \[7, 5\] torch.float64",
    "frozen": r"rank 0: 0\.weight .* in the optimizer's group 0; rank 1: 0\.weight .* not trained",
    "groups": r"rank 0: 2\.weight .* in the optimizer's group 0; rank 1: 2\.weight .* in the optimizer's group 1",
    "rate": r"rank 0: AdamW, group 0: lr 0\.001; rank 1: AdamW, group 0: lr 0\.002",
    "betas": r"rank 0: AdamW, group 0: betas \(0\.9, 0\.999\); rank 1: AdamW, group 0: betas \(0\.8, 0\.999\)",
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
    with pytest.raises(ValueError, match="different models") as told:
        STAGES[stage](model, optimizer, group)
    return str(told.value)


@pytest.mark.parametrize(("stage", "how", "ranks"), pairwise(list(STAGES), list(DIFFERENT), [2, 3]))
def test_different_models_are_refused_on_every_rank(stage: str, how: str, ranks: int) -> None:
    texts = run(different, stage, how, ranks=ranks)
    assert len(set(texts)) == 1
    assert re.search(DIFFERENT[how], texts[0]), texts[0]


def with_a_rate_of_its_own(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """As ReduceLROnPlateau does it with a loss of this rank's own."""
    optimizer.param_groups[0]["lr"] = 0.0005


def with_betas_of_its_own(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    optimizer.param_groups[0]["betas"] = (0.5, 0.5)


def with_weights_of_its_own(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """As `if rank == 0: model.load_state_dict(...)` behind the stage does it."""
    model.load_state_dict({name: w + 1 for name, w in model.state_dict().items()})


def changed_on_one_rank(stage: str, change: Callable[[torch.optim.Optimizer, nn.Module], None]) -> None:
    group, model = Group.world(), model_of("", False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
    STAGES[stage](model, optimizer, group)
    for step in range(5):
        if step == 3 and group.rank == group.size - 1:
            change(optimizer, model)
        model(torch.ones(2, 5)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


RATE = with_a_rate_of_its_own, r".*lr 0\.0005, betas"
BETAS = with_betas_of_its_own, r".*lr 0\.001, betas \(0\.5, 0\.5\), "
WEIGHTS = with_weights_of_its_own, r"weights of checksum -?\d+, "
APART = [
    *((*pair, *RATE) for pair in pairwise(list(STAGES), [2, 3])),
    *(("ddp", 2, *BETAS), ("zero3", 3, *BETAS)),
    *(("ddp", 3, *WEIGHTS), ("zero1", 2, *WEIGHTS), ("zero2", 3, *WEIGHTS)),  # of ZeRO-3 a rank has a part alone
]


@pytest.mark.parametrize(("stage", "ranks", "change", "told"), APART)
def test_what_changes_on_one_rank_is_told_before_the_weights_part(
    stage: str, ranks: int, change: Callable[[torch.optim.Optimizer, nn.Module], None], told: str
) -> None:
    with pytest.raises(RankError, match=rf"rank \d: all_reduce \(sum\) of .* in a step with {told}.*'norm'"):
        run(changed_on_one_rank, stage, change, ranks=ranks)


def test_many_groups_are_told_apart_in_few_words() -> None:
    params = [nn.Parameter(torch.ones(1)) for _ in range(40)]
    texts = []
    for last in (0.5, 0.25):
        groups = [{"params": [p], "lr": 0.1**i} for i, p in enumerate(params)]
        groups[-1]["lr"] = last
        texts.append(alike.words(torch.optim.SGD(groups), [], step=3))
    assert texts[0] != texts[1]
    assert max(map(len, texts)) < 300


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
