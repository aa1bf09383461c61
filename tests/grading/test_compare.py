"""What a comparison says: the mistake by its name, the place, both values."""

from typing import Any

import pytest
import torch
from torch import nn, optim

from refimpl.grading.compare import Wrong, as_made, by_users, close, equal, first_divergence, rounded_once
from refimpl.grading.traffic import side_by_side

RIGHT = torch.tensor([1.0, 2.0, 3.0, 4.0])


@pytest.mark.parametrize(
    ("found", "name"),
    [
        (RIGHT * 4, "exactly 4x the expected: summed over the ranks, not averaged"),
        (RIGHT / 4, "exactly 1/4 of the expected"),
        (RIGHT * 0, "all zeros"),
        (-RIGHT, "every sign is wrong"),
        (RIGHT / 0, "NaN or Inf"),
        (RIGHT.flip(0), "the order is reversed"),
        (RIGHT + 1, "y: wrong values: each is 1 too large"),
        (RIGHT * 1.5, "y: wrong values: each is 1.5x the expected"),
        (RIGHT[[1, 0, 2, 3]], "y: wrong values: the right numbers in another order"),
        (torch.tensor([1.0, 2.0, 5.0, 7.0]), "y: wrong values: elements 2 to 3 of 4, and no others"),
        (torch.tensor([2.0, 2.0, 5.0, 4.0]), "y: wrong values: 2 of 4, from element 0 on"),
        (None, "y is None: is there a `return`?"),
        ([1.0], "y is a list: a tensor is expected"),
        (RIGHT[:3], r"y has shape (3,), expected (4,)"),
        (RIGHT.double(), "y has dtype torch.float64, expected torch.float32"),
    ],
)
def test_a_known_mistake_is_named(found: Any, name: str) -> None:
    with pytest.raises(Wrong) as wrong:
        equal(found, RIGHT, "y", ranks=4, known={"the order is reversed": RIGHT.flip(0)})
    assert name in wrong.value.headline


def test_what_differs_by_rounding_is_equal() -> None:
    equal(RIGHT * (1 + 1e-7), RIGHT, "y")
    equal(torch.tensor([float("nan")]), torch.tensor([float("nan")]), "y")
    with pytest.raises(Wrong, match="y: wrong values"):  # no fault of the NaN, which is expected
        equal(torch.tensor([float("nan"), 1.0]), torch.tensor([float("nan"), 2.0]), "y")


def test_what_no_known_mistake_explains_is_described() -> None:
    with pytest.raises(Wrong, match="y: wrong values: 3, expected 2"):
        equal(torch.tensor([3.0]), torch.tensor([2.0]), "y")
    exact = torch.tensor([1.0, 1.001, 1 / 3])
    with pytest.raises(Wrong, match="none has more than the 8 bits of bfloat16: are they rounded on the way"):
        equal(exact.bfloat16().float(), exact, "y")
    with pytest.raises(Wrong, match="y: wrong values: all 3 of them"):  # small whole numbers are no sign of bf16
        equal(torch.tensor([4, 7, 9]), torch.tensor([300, 257, 301]), "y")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_one_rounding_is_told_from_two(dtype: torch.dtype) -> None:
    """Whichever way numbers near the middle of two go."""
    exact = torch.linspace(-3, 3, 4001, dtype=torch.float64)
    rounded_once((exact * (1 + 1e-6)).to(dtype), exact, "y", "round at the end")
    with pytest.raises(
        Wrong, match=r"y is rounded more than once, [12]\.\d times half of the last place: round at the"
    ):
        rounded_once((exact.to(dtype) * 3 / 3).to(dtype), exact, "y", "round at the end")
    rounded_once(torch.tensor([torch.inf], dtype=dtype), torch.tensor([torch.inf], dtype=torch.float64), "y", "")
    last_place = torch.finfo(dtype).eps
    with pytest.raises(Wrong, match=r"more than once, 1\.[23] times half"):
        rounded_once(torch.ones(1, dtype=dtype), torch.tensor([1 + 0.625 * last_place], dtype=torch.float64), "y", "")


def test_an_optimizer_is_the_one_that_was_asked_for() -> None:
    def make(own: list[nn.Parameter], kind: type[optim.Adam] = optim.Adam, **more: float) -> optim.Adam:
        return kind(own, lr=0.1, **more)  # type: ignore[arg-type]

    own = [nn.Parameter(torch.zeros(1))]
    as_made(make(own), make)
    for other, says in (
        (None, "is None, and make_optimizer makes a Adam: keep"),
        (make(own, optim.AdamW), "is a AdamW, and make_optimizer makes a Adam"),  # AdamW is an Adam, too
        (make(own, weight_decay=0.5), "has weight_decay 0.5, and make_optimizer gives it 0"),
    ):
        with pytest.raises(Wrong, match=says):
            as_made(other, make)


def test_what_has_another_shape_is_not_close() -> None:
    assert close(RIGHT, RIGHT.clone())
    assert not close(RIGHT[None], RIGHT), "though torch would lay one over the other"


def test_integers_are_compared_exactly() -> None:
    with pytest.raises(Wrong):
        equal(torch.tensor([100_000_001]), torch.tensor([100_000_000]), "y")


def test_values_are_shown_around_the_first_difference() -> None:
    found = torch.arange(100.0)
    found[57] = -1
    with pytest.raises(Wrong) as wrong:
        equal(found, torch.arange(100.0), "y")
    assert wrong.value.details == (
        "first difference at element 57 of 100, 1 differ",
        "  expected [... 56, 57, 58, 59, 60, 61 ...]",
        "  found    [... 56, -1, 58, 59, 60, 61 ...]",
    )


def test_at_the_end_the_last_six_values_are_shown() -> None:
    found, expected = torch.arange(10.0), torch.arange(10.0)
    found[9] = -1
    found[0] = expected[0] = torch.nan  # as expected: no difference
    with pytest.raises(Wrong) as wrong:
        equal(found, expected, "y")
    assert wrong.value.details == (
        "first difference at element 9 of 10, 1 differ",
        "  expected [... 4, 5, 6, 7, 8, 9]",
        "  found    [... 4, 5, 6, 7, 8, -1]",
    )


def test_the_first_divergence_is_the_earliest_step() -> None:
    right = [{"a": RIGHT, "b": RIGHT}] * 3
    found = [right[0], {"a": RIGHT, "b": RIGHT * 2}, {"a": RIGHT * 9, "b": RIGHT}]
    with pytest.raises(Wrong, match="step 1, the gradient of b: exactly 2x the expected"):
        first_divergence(found, right, "the gradient", ranks=2)
    with pytest.raises(Wrong, match="step 0: the gradient of b is missing"):
        first_divergence([{"a": RIGHT}], [right[0]], "the gradient")
    with pytest.raises(Wrong, match="3 steps were made, expected 2"):
        first_divergence(right, right[:2], "the gradient")


def test_transcripts_stand_side_by_side() -> None:
    lines = side_by_side(["all_reduce, 8 bytes"], ["all_reduce, 8 bytes", "send to 1, 4 bytes"])
    assert lines[2:] == [
        "  1  all_reduce, 8 bytes               all_reduce, 8 bytes",
        "  2  -                                 send to 1, 4 bytes   <- first difference",
    ]


def test_a_factor_is_named_by_what_it_is_the_number_of() -> None:
    whole = torch.tensor([12.0, 24.0])
    for found, words in (
        (whole / 3, "1/3 of the expected: divided by the number of ranks"),
        (whole / 4, "1/4 of the expected: divided by the number of micro-batches"),
        (whole * 4, "4x the expected: reduced anew with each of 4 micro-batches"),
    ):
        with pytest.raises(Wrong, match=words):
            equal(found, whole, "y", ranks=3, parts=4)


def test_a_mean_over_the_users_of_a_layer_is_named() -> None:
    truth = {"spare.weight": torch.ones(2), "head.weight": torch.ones(2)}
    known = by_users(truth, 3, {"spare": 2})
    assert list(known) == ["spare.weight"]
    with pytest.raises(Wrong, match="divided by the 2 ranks that used this layer, not by all 3"):
        first_divergence([truth | {"spare.weight": torch.full((2,), 1.5)}], [truth], "the gradient", known=known)
