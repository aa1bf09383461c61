"""The knobs of chapter 13: a mesh on nodes, who is in whose group along each axis, and the bytes on it.

The numbering is that of `refimpl.comm.mesh.Mesh`, the bytes those of `refimpl.plan.traffic`. Nothing is sent.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from refimpl.notebook import show
from refimpl.notebook.widgets import Knobs
from refimpl.parallel.pipeline.topology import ProcessTopology
from refimpl.plan.mesh import Mesh
from refimpl.plan.shape import Shape
from refimpl.plan.traffic import busiest

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

Axes = Mapping[str, int]  # name -> size, outermost first
NAMES = {"dp": "data", "pp": "pipeline", "cp": "context", "tp": "tensor"}
COLOURS = {"dp": "#4c72b0", "pp": "#55a868", "cp": "#e0a458", "tp": "#c1666b"}


def axes_of(text: str) -> dict[str, int]:
    """ "dp2 pp4 tp2" -> {"dp": 2, "pp": 4, "tp": 2}, outermost first. ValueError for another word."""
    found = {}
    for word in text.split():
        if word[:2] not in NAMES or not word[2:].isdigit():
            raise ValueError(f"{word!r} is no axis and size: write, outermost first, such as 'dp2 pp2 cp2 tp2'")
        found[word[:2]] = int(word[2:])
    return found


def rows(shape: Shape, axes: Axes, rank: int, node: int, batch: int) -> list[dict[str, Any]]:
    """Of each axis, innermost first: its size, the group of `rank`, the nodes that lie in it, bytes sent a step."""
    grid = ProcessTopology(list(axes), list(axes.values()))
    size = {name: axes.get(name, 1) for name in NAMES}
    mesh = Mesh(size["dp"], size["pp"], size["tp"], batch, cp=size["cp"])
    mesh.check(shape)
    sent = busiest(shape, mesh)
    found = []
    for name in reversed(list(axes)):
        (group,) = (ranks for ranks in grid.get_axis_comm_lists(name) if rank in ranks)
        found.append({"axis": name, "size": axes[name], "group": group, "nodes": len({r // node for r in group}),
                      "sent": sent[NAMES[name]]})  # fmt: skip
    return found


def table(
    shape: Shape, layouts: Sequence[str], ranks: Sequence[int], node: int, batch: int, most: int = 6
) -> "pd.DataFrame":
    """The same as text: a row for each axis of each layout and each of the ranks."""
    import pandas as pd

    return pd.DataFrame(
        {
            "layout": layout,
            "rank": rank,
            "axis": f"{row['axis']} {row['size']}",
            "its group": " ".join(map(str, row["group"][:most])) + " ..." * (len(row["group"]) > most),
            "inside a node": "yes" if row["nodes"] == 1 else f"no, {row['nodes']} nodes",
            "GB sent a step": f"{row['sent'] / 1e9:.2f}",
        }
        for layout in layouts
        for rank in ranks
        for row in rows(shape, axes_of(layout), rank, node, batch)
    )


def picture(shape: Shape, layout: str, rank: int, node: int, batch: int) -> "Figure":
    """A panel for each axis: all ranks, a row a node, with this rank's group filled."""
    axes = axes_of(layout)
    found = rows(shape, axes, rank, node, batch)
    gpus = len(ProcessTopology(list(axes), list(axes.values())).mapping)
    nodes = -(-gpus // node)
    figure, panels = show.figure(len(found) * (0.55 + 0.3 * nodes), rows=len(found), squeeze=False)
    for panel, row in zip(panels[:, 0], found, strict=True):
        for r in range(gpus):
            inside = r in row["group"]
            panel.text(
                r % node, r // node, str(r), ha="center", va="center", fontsize=9,
                color="white" if inside else "#555555", weight="bold" if r == rank else "normal",
                bbox={"boxstyle": "round,pad=0.25", "fc": COLOURS[row["axis"]] if inside else "#eeeeee", "ec": "none"},
            )  # fmt: skip
        where = "inside a node" if row["nodes"] == 1 else f"over {row['nodes']} nodes"
        panel.set_title(f"{NAMES[row['axis']]} {row['size']}: {where}, {row['sent'] / 1e9:.2f} GB a step", fontsize=9)
        panel.set(xlim=(-0.6, node - 0.4), ylim=(nodes - 0.4, -0.6), xticks=[])
        panel.set_yticks(range(nodes), [f"node {n}" for n in range(nodes)])
        panel.tick_params(length=0)
        panel.spines[:].set_visible(False)
    return figure


def mesh_knobs(shape: Shape, layouts: Sequence[str], ranks: Sequence[int], node: int = 8, batch: int = 16) -> Knobs:
    """Panels for a layout and a rank; the first of each is the start. Layouts are written outermost first."""
    draw = partial(picture, shape, node=node, batch=batch)
    return Knobs(draw, table(shape, layouts, ranks[:1], node, batch), layout=layouts, rank=ranks)
