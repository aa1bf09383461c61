"""Cuts of a chain against brute force, and against what DeepSpeed's own tests ask of its partitions."""

from itertools import combinations, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from refimpl.parallel.pipeline import partition
from refimpl.parallel.pipeline.partition import balanced, matching, parameters, seconds, uniform


def sums(weights: list[float], bounds: list[int]) -> list[float]:
    return [sum(weights[a:b]) for a, b in pairwise(bounds)]


def all_cuts(layers: int, stages: int) -> list[list[int]]:
    return [[0, *inner, layers] for inner in combinations(range(1, layers), stages - 1)]


@given(st.lists(st.integers(0, 9), min_size=1, max_size=9), st.integers(1, 5))
def test_balanced_is_the_best_of_all_cuts(weights: list[int], stages: int) -> None:
    bounds = balanced(weights, stages)
    assert bounds[0] == 0
    assert bounds[-1] == len(weights)
    if len(weights) >= stages:
        cuts = all_cuts(len(weights), stages)
        found = sums([*map(float, weights)], bounds)
        least = min(max(sums(weights, cut)) for cut in cuts)
        assert max(found) == least
        assert min(found) == max(min(sums(weights, c)) for c in cuts if max(sums(weights, c)) == least)
        assert all(a < b for a, b in pairwise(bounds))


@given(st.integers(0, 30), st.integers(1, 8))
def test_uniform_differs_by_one_at_most(layers: int, stages: int) -> None:
    sizes = [b - a for a, b in pairwise(uniform(layers, stages))]
    assert sum(sizes) == layers
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


BERT = [52559872.0, *[12596224.0] * 24, 0.0, 52559872.0]  # parameters of each layer


@pytest.mark.parametrize(
    ("weights", "stages", "bounds"),
    [
        ([0.0, 1, 2, 3, 3, 3], 4, [0, 3, 4, 5, 6]),
        ([0.0, 1.1, 1.9, 3.0, 3.0, 3.0], 4, [0, 3, 4, 5, 6]),
        ([0.0, 1.1, 1.9, 3.0, 30.0], 2, [0, 4, 5]),
        ([0.0, 1.1, 30, 3.0], 3, [0, 2, 3, 4]),
        ([1.0] * 8, 4, [0, 2, 4, 6, 8]),
        ([1.0] * 2, 4, [0, 1, 2, 2, 2]),
        ([1.0, 2, 1], 4, [0, 1, 2, 3, 3]),
        ([1.0, 2, 1, 1], 3, [0, 1, 2, 4]),
        ([3.0, 0, 3, 0, 0, 3], 3, [0, 2, 5, 6]),  # not DeepSpeed's: a layer without weight stays with the one before
    ],
)
def test_the_cuts_of_deepspeeds_tests(weights: list[float], stages: int, bounds: list[int]) -> None:
    assert balanced(weights, stages) == bounds


@pytest.mark.parametrize(("weights", "spread"), [([1.0] * 5, 1), ([1.0, 1, 1, 1, 0, 1], 1), ([1.0] * 4, 0)])
def test_the_spread_of_deepspeeds_tests(weights: list[float], spread: float) -> None:
    found = sums(weights, balanced(weights, 4))
    assert max(found) - min(found) == spread


def test_berts_largest_stage_is_one_embedding() -> None:
    assert max(sums(BERT, balanced(BERT, 8))) == max(BERT)


def test_a_long_chain_takes_no_more_than_the_square_of_its_layers() -> None:
    """What is too large for a stage is not looked at: a plan of 100T parameters cuts 2002 layers 31 times."""
    looks = 0

    class Sum(float):
        def __add__(self, other: float) -> "Sum":
            return Sum(float(self) + other)

        def __sub__(self, other: float) -> float:  # what a stage would have
            nonlocal looks
            looks += 1
            return float(self) - other

    assert balanced([Sum(7), *[Sum(10)] * 98, Sum(7)], 25) == [*range(0, 101, 4)]
    assert looks < 100**2


@pytest.mark.parametrize("weights", [[1.0, -1.0, 2.0], [1.0, float("nan"), 1.0]])
def test_weights_that_are_none(weights: list[float]) -> None:
    with pytest.raises(ValueError, match="no weight below 0"):
        balanced(weights, 2)


def test_types_match_in_any_case_and_part() -> None:
    names = ["Embedding", "Block", "block_norm", "<lambda>"]
    assert matching(names, "BLOCK") == [0, 1, 1, 0]
    with pytest.raises(ValueError, match=r"'type:Conv': no layer's type matches: Embedding, Block"):
        matching(names, "Conv")


def test_parameters_are_those_that_train() -> None:
    layer = nn.Linear(3, 4)
    layer.bias.requires_grad_(False)
    assert parameters(layer) == 12
    assert parameters(torch.tanh) == 0


def test_of_several_runs_the_fastest_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 5.0, 10.0, 11.0, 20.0, 23.0])
    monkeypatch.setattr(partition, "now", lambda device: next(clock))
    assert seconds([nn.ReLU()], torch.ones(1)) == [1.0]


def test_seconds_go_through_every_layer_in_order() -> None:
    """Integers in, several tensors between, no gradient: each layer is run and what it gives is handed on."""
    seen: list[object] = []

    def split(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append((x.shape, x.requires_grad))
        return x, x.detach()

    layers = [nn.Embedding(5, 4), split, lambda pair: pair[0] @ pair[1].mT, nn.ReLU()]
    found = seconds(layers, torch.tensor([[1, 2, 3]]), repeat=2)
    assert len(found) == 4
    assert min(found) > 0
    assert seen == [((1, 3, 4), True)] * 2
    assert all(p.grad is None for p in layers[0].parameters())  # type: ignore[union-attr]
