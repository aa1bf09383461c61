"""The knobs of chapter 15: routes and places are counted, whatever the knobs say."""

import pytest

from refimpl.model.routes import capacity_of
from refimpl.notebook.widgets import png
from refimpl.notebook.widgets_moe import TOKENS, bars, gate_knobs, routed, shares


@pytest.mark.parametrize(("experts", "k"), [(4, 1), (8, 2), (16, 4)])
@pytest.mark.parametrize(("factor", "skew"), [(1.0, 0.0), (1.25, 3.0), (64.0, 3.0)])
def test_every_route_is_kept_or_dropped_and_every_place_taken_or_empty(
    experts: int, k: int, factor: float, skew: float
) -> None:
    found = routed(experts, k, factor, skew)
    assert int((found["kept"] + found["dropped"]).sum()) == k * TOKENS
    assert (found["kept"] + found["empty"]).tolist() == [capacity_of(TOKENS, experts, factor * k, 4)] * experts
    assert not (found["dropped"] * found["empty"]).any()


def test_skew_drops_more_and_capacity_less() -> None:
    even, skewed, roomy = (shares(routed(8, 2, *how)) for how in ((1.25, 0.0), (1.25, 3.0), (4.0, 3.0)))
    assert even[0] < skewed[0] > roomy[0]
    assert skewed[1] < roomy[1]


def test_knobs_have_a_picture_and_its_numbers_as_text() -> None:
    knobs = gate_knobs(experts=(4, 8), k=(1,), factor=(1.0, 2.0), skew=(0.0, 3.0))
    assert list(knobs.table["capacity factor"]) == [1.0, 2.0, 1.0, 2.0]
    assert png(bars(4, 1, 1.0, 3.0)).startswith(b"\x89PNG")
