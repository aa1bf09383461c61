"""Layouts against pictures, options against what DeepSpeed refuses, random ones against their counts."""

import random
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from refimpl.model.patterns.base import SparsityConfig, density
from refimpl.model.patterns.fixed import FixedSparsityConfig
from refimpl.model.patterns.named import PATTERNS, pattern_named
from refimpl.model.patterns.plain import (
    DenseSparsityConfig,
    GlobalSparsityConfig,
    RandomSparsityConfig,
    StridedSparsityConfig,
)
from refimpl.model.patterns.sliding import (
    BigBirdSparsityConfig,
    BSLongformerSparsityConfig,
    LocalSlidingWindowSparsityConfig,
)
from refimpl.model.patterns.variable import VariableSparsityConfig

# Drawn by hand from the pages of the papers and of DeepSpeed's tutorial: a row a line.
PICTURES: dict[str, tuple[SparsityConfig, str]] = {
    "dense": (DenseSparsityConfig(1, 4), "### ### ###"),
    "fixed": (
        FixedSparsityConfig(1, 4, num_local_blocks=3),
        "###..## ###..## ###..## ..##### ..##### ..##### ..#..##",
    ),
    "fixed, causal": (
        FixedSparsityConfig(1, 4, num_local_blocks=3, attention="unidirectional"),
        "#..... ##.... ###... ..##.. ..###. ..####",
    ),
    "fixed, both ways": (
        FixedSparsityConfig(1, 4, num_local_blocks=2, horizontal_global_attention=True),
        "##.# #### .### ####",
    ),
    "variable": (
        VariableSparsityConfig(1, 4, local_window_blocks=[1, 2], global_block_indices=[3, 9]),
        "#..#. .###. .###. ...## ...##",
    ),
    "variable, ranges": (
        VariableSparsityConfig(
            1,
            4,
            local_window_blocks=[1],
            global_block_indices=[1],
            global_block_end_indices=[3],
            attention="unidirectional",
        ),
        "#.... .##.. .##.. .###. .##.#",
    ),
    "longformer": (BSLongformerSparsityConfig(1, 4, global_block_indices=[2]), "###.. ###.. ##### ..### ..###"),
    "longformer, causal": (
        BSLongformerSparsityConfig(1, 4, global_block_indices=[1], attention="unidirectional"),
        "#... ##.. .##. .###",
    ),
    "bigbird": (BigBirdSparsityConfig(1, 4, num_random_blocks=0), "##### ###.. ####. #.### #..##"),
    "bigbird, causal": (
        BigBirdSparsityConfig(1, 4, num_random_blocks=0, attention="unidirectional"),
        "#.... ##... ###.. #.##. #..##",
    ),
    "local": (LocalSlidingWindowSparsityConfig(1, 4, num_sliding_window_blocks=5), "#.... ##... ###.. .###. ..###"),
    "local, both ways": (
        LocalSlidingWindowSparsityConfig(1, 4, num_sliding_window_blocks=3, attention="bidirectional"),
        "##.. ###. .### ..##",
    ),
    "strided": (
        StridedSparsityConfig(1, 4, stride=3, attention="unidirectional"),
        "#..... ##.... ###... ####.. .####. ..####",
    ),
    "global": (GlobalSparsityConfig(1, 4), "#### ##.. #.#. #..#"),
}


def drawing(layout: torch.Tensor) -> list[str]:
    return ["".join(".#"[int(read)] for read in row) for row in layout]


@pytest.mark.parametrize("name", PICTURES)
def test_a_layout_is_its_picture(name: str) -> None:
    pattern, picture = PICTURES[name]
    rows = picture.split()
    layout = pattern.make_layout(4 * len(rows))
    assert layout.dtype == torch.int64
    assert drawing(layout[0]) == rows


def test_heads_share_a_layout_unless_each_has_its_own() -> None:
    shared = BigBirdSparsityConfig(4, 4, seed=1).make_layout(64)
    own = BigBirdSparsityConfig(4, 4, different_layout_per_head=True, seed=1).make_layout(64)
    assert shared.shape == own.shape == (4, 16, 16)
    assert all(torch.equal(head, shared[0]) for head in shared)
    assert not all(torch.equal(head, own[0]) for head in own)
    turns = FixedSparsityConfig(4, 4, True, num_local_blocks=4, num_different_global_patterns=4).make_layout(64)
    assert [int(head[0].nonzero()[-1]) for head in turns] == [15, 14, 13, 12]
    near, far = StridedSparsityConfig(2, 4, True, stride=4).make_layout(64)
    assert int(near[15].sum()) == 4
    assert far[15].nonzero().flatten().tolist() == [3, 7, 11, 15]


@pytest.mark.parametrize("attention", ["unidirectional", "bidirectional"])
@pytest.mark.parametrize("count", [0, 1, 3])
def test_random_blocks_are_as_many_as_asked_and_none_in_the_future(attention: str, count: int) -> None:
    layout = RandomSparsityConfig(1, 4, num_random_blocks=count, attention=attention, seed=5).make_layout(64)[0]
    others = layout.sum(1) - 1
    assert bool((others <= count).all())
    assert bool((others[4:] >= count - 1).all())  # one's own block may be drawn
    assert attention == "bidirectional" or bool((layout == layout.tril()).all())
    BigBirdSparsityConfig(1, 4, num_random_blocks=count, attention=attention).make_layout(64)  # more than row 0 has


def test_chance_is_pythons_or_the_seeds() -> None:
    def draw(seed: int | None) -> torch.Tensor:
        return VariableSparsityConfig(1, 4, num_random_blocks=2, seed=seed).make_layout(128)

    random.seed(3)
    first, second = draw(None), draw(None)
    random.seed(3)
    assert torch.equal(draw(None), first)
    assert not torch.equal(first, second)
    assert torch.equal(draw(8), draw(8))


REFUSED: list[tuple[type[SparsityConfig], Mapping[str, Any], type[Exception], str]] = [
    (FixedSparsityConfig, {"num_local_blocks": 4, "num_global_blocks": 3}, ValueError, "divide num_local_blocks"),
    (FixedSparsityConfig, {"attention": "both"}, NotImplementedError, "unidirectional, bidirectional"),
    (FixedSparsityConfig, {"attention": "unidirectional", "horizontal_global_attention": True}, ValueError, "future"),
    (FixedSparsityConfig, {"num_different_global_patterns": 2}, ValueError, "different_layout_per_head"),
    (
        FixedSparsityConfig,
        {"num_local_blocks": 2, "num_different_global_patterns": 3, "different_layout_per_head": True},
        ValueError,
        "only 2 places",
    ),
    (
        VariableSparsityConfig,
        {"global_block_indices": [0, 3], "global_block_end_indices": [2]},
        ValueError,
        "an end for each",
    ),
    (VariableSparsityConfig, {"global_block_indices": [3], "global_block_end_indices": [3]}, ValueError, "exclusive"),
    (
        BSLongformerSparsityConfig,
        {"global_block_indices": [3], "global_block_end_indices": [1]},
        ValueError,
        "exclusive",
    ),
    (VariableSparsityConfig, {"local_window_blocks": []}, ValueError, "empty"),
    (BigBirdSparsityConfig, {"block": 0}, ValueError, "block is 0"),
    (LocalSlidingWindowSparsityConfig, {"num_heads": -1}, ValueError, "num_heads is -1"),
]


@pytest.mark.parametrize(("kind", "options", "error", "says"), REFUSED)
def test_what_does_not_fit_is_refused(kind: Any, options: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        kind(**{"num_heads": 4, **options})


def test_a_sequence_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="pad it to 64"):
        DenseSparsityConfig(1, 16).make_layout(50)
    for kind in (BigBirdSparsityConfig, VariableSparsityConfig, RandomSparsityConfig):
        with pytest.raises(ValueError, match="num_random_blocks is 5, but a row has only 4"):
            kind(1, 16, num_random_blocks=5).make_layout(64)
    with pytest.raises(NotImplementedError, match="make_layout"):
        SparsityConfig(1).make_layout(64)


@pytest.mark.parametrize("mode", PATTERNS)
def test_a_pattern_by_name_reads_its_own_options(mode: str) -> None:
    options = {
        "block": 8,
        "num_sliding_window_blocks": 3,
        "num_local_blocks": 2,
        "attention": "unidirectional",
        "seed": 0,
    }
    pattern = pattern_named(mode, 2, options)
    assert pattern.make_layout(64).shape == (2, 8, 8)
    assert getattr(pattern, "attention", "unidirectional") == "unidirectional"
    with pytest.raises(NotImplementedError, match="choose from dense"):
        pattern_named(mode + "x", 2, options)


def test_density_counts_what_may_be_read() -> None:
    layout = torch.tensor([[1, 1], [0, 1]])
    assert density(layout) == 0.75
    assert density(layout, causal=True) == pytest.approx(2 / 3)
    assert density(torch.zeros(0, 0)) == 0
