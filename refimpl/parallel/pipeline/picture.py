"""Any schedule as a picture: text for a terminal or a docstring, matplotlib for a page. Both play it by the clock.

    rank 0  F0 F1 .. B0 B0 B1 B1      a column is a tick; a letter and the micro-batch; an operation of two ticks
    rank 1  .. F0 B0 B0 F1 B1 B1      takes two columns; dots are the bubble

With several stages a rank a small letter follows: a is the rank's first stage, b its second.
"""

from typing import TYPE_CHECKING

from refimpl.parallel.pipeline.clock import play
from refimpl.parallel.pipeline.schedules.table import UNIT, Cost, Op, Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {"F": "#4c72b0", "B": "#55a868", "I": "#8fcfa0", "W": "#dd8452"}
MEANING = {"F": "forward", "B": "backward", "I": "its input half", "W": "its weight half"}
POINTS = 8.0  # of type: still readable where a phone shows the picture
SHADES = (1.0, 0.62, 0.4)  # of a rank's first stage, second, and those after


def text(table: Table, cost: Cost = UNIT) -> str:
    """One line a rank, one column a tick. ValueError if the costs are no whole numbers."""
    if any(value != int(value) for value in cost):
        raise ValueError(f"a column is a tick: costs must be whole numbers, not {cost}")
    spans = play(table, cost)
    labels = {op: label(table, op) for op in spans}
    width = max(map(len, labels.values()), default=1)
    ticks = int(max((span.end for span in spans.values()), default=0))
    lines = []
    for rank, order in enumerate(table.orders):
        cells = ["." * width] * ticks
        for op in order:
            for tick in range(int(spans[op].begin), int(spans[op].end)):
                cells[tick] = labels[op].ljust(width)
        lines.append(f"rank {rank}  {' '.join(cells)}".rstrip())
    return "\n".join(lines)


def label(table: Table, op: Op) -> str:
    """F0, or F0a where its rank has several stages."""
    stages = table.holds(table.rank_of(op.stage, op.micro))
    return f"{op.kind}{op.micro}" + ("abcdefghijklmnopqrstuvwxyz"[stages.index(op.stage)] if len(stages) > 1 else "")


def draw(table: Table, cost: Cost = UNIT, inches: float = 4.8) -> "Figure":
    """The same as a figure: a row a rank, a box an operation, as long as it takes, numbered by micro-batch.

    Paler boxes are of a rank's later stages. `inches`: the width. Nothing is shown or saved.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(inches, 0.9 + 0.28 * table.ranks), dpi=120, layout="constrained")
    fill(figure.subplots(), table, cost, inches)
    return figure


def fill(axis: "Axes", table: Table, cost: Cost = UNIT, inches: float = 4.8) -> None:
    """Draw into axes that are there. Numbers stand in the boxes that are wide enough, the colours below the picture."""
    from matplotlib.patches import Patch

    spans = play(table, cost)
    end = max(span.end for span in spans.values())
    for op, span in spans.items():
        rank = table.rank_of(op.stage, op.micro)
        shade = SHADES[min(table.holds(rank).index(op.stage), len(SHADES) - 1)]
        axis.barh(rank, span.end - span.begin, 0.9, span.begin, color=COLOURS[op.kind], alpha=shade, edgecolor="white")
        if inches * (span.end - span.begin) / end > 0.1 * len(str(op.micro)):
            middle = (span.begin + span.end) / 2
            axis.text(middle, rank, str(op.micro), ha="center", va="center", fontsize=POINTS)
    kinds = [kind for kind in COLOURS if any(op.kind == kind for op in spans)]
    handles = [Patch(color=COLOURS[kind], label=MEANING[kind]) for kind in kinds]
    axis.legend(
        handles=handles,
        fontsize=POINTS,
        loc="upper center",
        bbox_to_anchor=(0.5, 0),
        ncols=len(handles),
        frameon=False,
        handlelength=1,
        columnspacing=1,
    )
    axis.set(xlim=(0, end), xticks=[], yticks=range(table.ranks), yticklabels=[f"rank {r}" for r in range(table.ranks)])
    axis.invert_yaxis()
    axis.tick_params(labelsize=POINTS, length=0)
    axis.spines[:].set_visible(False)
