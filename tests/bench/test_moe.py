"""The contestants of `refimpl bench moe` do the same work, and its rows are consistent."""

import pytest
import worlds
from torch import Tensor
from typer.testing import CliRunner

from refimpl.bench.cli import app
from refimpl.bench.moe import DENSE, HEAT, LOOP, OURS, Size, contestants, rank_rows
from refimpl.comm.group import Group

SIZE = Size(tokens=11, width=6, hidden=5, experts=4, k=2)


def losses() -> list[Tensor]:
    return [layer() for layer in contestants(SIZE, Group.world()).values()]


@pytest.mark.parametrize("ranks", [1, 2])
def test_same_work(ranks: int) -> None:
    """Their gradients are compared before a race; the losses agree too."""
    for ours, *others in worlds.run(losses, ranks=ranks):
        assert len(others) == 2
        assert all(abs(loss - ours) <= 1e-5 * ours for loss in others)


def test_rows() -> None:
    rows = rank_rows({"plain": {OURS: 2.0, DENSE: 8.0, LOOP: 4.0}, "huge": {OURS: 3.0, DENSE: 9.0, LOOP: 2.0}}, 2, SIZE)
    assert {tuple(getattr(row, name) for name in HEAT) for row in rows} == {(2, 11, 6, 5, 4, 2)}
    ratios = {(row.implementation, row.pages): (row.ratio_same_pages, row.ratio_any_pages) for row in rows}
    assert ratios[OURS, "plain"] == (0.5, 1.0)
    assert ratios[OURS, "huge"] == (1.5, 1.5)


def test_refused() -> None:
    for arguments, said in [(["--size", "4,4,4"], "TOKENS,WIDTH"), (["--ranks", "3"], "cannot be dealt out")]:
        result = CliRunner().invoke(app, ["moe", *arguments])
        assert result.exit_code == 2
        assert said in result.output
