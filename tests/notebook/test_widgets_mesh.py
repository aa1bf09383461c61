"""The mesh's knobs: groups are those that a real mesh makes, bytes those of the plan."""

import pytest
from worlds import run

from refimpl.comm.group import Group
from refimpl.comm.mesh import Mesh
from refimpl.notebook.widgets import png
from refimpl.notebook.widgets_mesh import NAMES, axes_of, mesh_knobs, picture, rows, table
from refimpl.plan import mesh as plan
from refimpl.plan.shape import Shape
from refimpl.plan.traffic import busiest

SHAPE = Shape(4, 1024, 16, 1024, 4096, hidden=4096, kv_heads=8)
LAYOUTS = ["dp2 pp2 cp2 tp2", "tp2 cp2 pp2 dp2", "dp2 tp8"]


def groups(axes: dict[str, int]) -> dict[str, list[int]]:
    mesh = Mesh(axes)
    return {name: mesh.group(name).all_gather_object(Group.world().rank) for name in axes}


def test_groups_are_those_of_a_mesh() -> None:
    axes = axes_of("pp2 tp2")
    for rank, found in enumerate(run(groups, axes, ranks=4)):
        assert {row["axis"]: row["group"] for row in rows(SHAPE, axes, rank, 2, 16)} == found


def test_which_axis_is_inside_a_node_and_its_bytes() -> None:
    inner, outer = (rows(SHAPE, axes_of(layout), 5, 8, 16) for layout in LAYOUTS[:2])
    assert {row["axis"]: row["nodes"] for row in inner} == {"tp": 1, "cp": 1, "pp": 1, "dp": 2}
    assert {row["axis"]: row["nodes"] for row in outer} == {"tp": 2, "cp": 1, "pp": 1, "dp": 1}
    assert {NAMES[row["axis"]]: row["sent"] for row in inner} == busiest(SHAPE, plan.Mesh(2, 2, 2, 16, cp=2))


def test_text_and_picture_for_every_layout() -> None:
    frame = table(SHAPE, LAYOUTS, [5], 8, 16)
    assert len(frame) == sum(len(layout.split()) for layout in LAYOUTS)
    assert list(frame[frame.axis == "tp 8"]["its group"]) == ["0 1 2 3 4 5 ..."]
    for layout in LAYOUTS:
        assert png(picture(SHAPE, layout, 5, 8, 16)).startswith(b"\x89PNG")
    shown = mesh_knobs(SHAPE, LAYOUTS, [5, 0])._repr_mimebundle_()
    assert "dp2 pp2 cp2 tp2" in shown["text/markdown"]


def test_a_word_that_is_no_axis_is_named() -> None:
    with pytest.raises(ValueError, match="'ep4' is no axis and size"):
        axes_of("dp2 ep4")
