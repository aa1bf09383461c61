"""A phone shows a figure 358 px wide: its type must still be readable there."""

import base64
import io
import re
from pathlib import Path

import matplotlib.pyplot as plt
import nbformat
import pytest

from refimpl.notebook import show

COURSE = Path(__file__).parents[2] / "course"
PHONE = 358  # px that a page leaves for a figure at a width of 390
SMALLEST = 8  # px of type


def readable(inches: float, points: float) -> bool:
    """Whether type of this size is high enough on a phone, in a figure as wide as that."""
    return points / 72 * PHONE / inches >= SMALLEST


def pictures(notebook: Path) -> list[bytes]:
    outputs = [o for cell in nbformat.read(notebook, 4).cells for o in cell.get("outputs", [])]
    return [base64.b64decode(o["data"]["image/png"]) for o in outputs if "image/png" in o.get("data", {})]


@pytest.mark.parametrize("notebook", sorted(COURSE.glob("*.ipynb")), ids=lambda path: path.stem)
def test_figures_of_a_chapter_are_readable_on_a_phone(notebook: Path) -> None:
    sizes = [float(size) for size in re.findall(r"fontsize=([\d.]+)", notebook.with_suffix(".py").read_text())]
    for png in pictures(notebook):
        image = plt.imread(io.BytesIO(png))
        inches = image.shape[1] / 120  # the dots an inch of `show.figure`
        assert readable(inches, min([9, *sizes])), f"{inches:.1f} inches wide: make it by show.figure"


def test_small_type_in_a_wide_figure_is_not_readable() -> None:
    assert not readable(inches=10, points=8)


def test_a_figure_is_as_wide_as_a_phone_shows() -> None:
    figure, axes = show.figure(3, rows=2)
    plt.close(figure)
    assert tuple(figure.get_size_inches()) == (show.INCHES, 3)
    assert len(axes) == 2
    assert readable(show.INCHES, 9)
