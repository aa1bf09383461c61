"""The knobs of the pipeline's chapter: a schedule's picture under any number of ranks, micro-batches and chunks.

Theory only: the clock plays the table, at every size, also where no formula for the bubble is known.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from refimpl.notebook import show
from refimpl.notebook.widgets import Knobs
from refimpl.parallel.pipeline.clock import alive, share
from refimpl.parallel.pipeline.picture import fill
from refimpl.parallel.pipeline.schedules.named import NAMES, schedule
from refimpl.parallel.pipeline.schedules.table import Table

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


def table_of(name: str, ranks: int, micro_batches: int, chunks: int) -> Table:
    """`chunks` is for interleaved alone; an odd number of ranks is made even for DualPipe."""
    ranks += ranks % 2 if name == "dualpipe" else 0
    return schedule(name, ranks, micro_batches, chunks if name == "interleaved" else None)


def words(table: Table) -> str:
    """What a rank idles at most and keeps at most, the latter in micro-batches of a whole rank's layers."""
    chunks = len(table.holds(0)) // len(table.paths)
    return f"{table.name}: idle {share(table):.0%}, alive {max(alive(table)) / chunks:g}"


def picture(schedule: str, ranks: int, micro_batches: int, chunks: int) -> "Figure":
    """The schedule, played, with F, I and W of equal length."""
    table = table_of(schedule, ranks, micro_batches, chunks)
    figure, axis = show.figure(0.9 + 0.28 * table.ranks)
    fill(axis, table)
    axis.set_title(words(table), fontsize=9)
    return figure


def summary(ranks: int, micro_batches: int, chunks: int) -> "pd.DataFrame":
    """The same numbers as text: a row for each schedule."""
    import pandas as pd

    rows = []
    for name in NAMES:
        table = table_of(name, ranks, micro_batches, chunks)
        held = len(table.holds(0)) // len(table.paths)
        rows.append(
            {
                "schedule": name,
                "ranks": table.ranks,
                "micro-batches": micro_batches,
                "chunks": held,
                "idle": f"{share(table):.1%}",
                "alive at most": f"{max(alive(table)) / held:g}",
            }
        )
    return pd.DataFrame(rows)


def schedule_knobs(
    ranks: Sequence[int] = (4, 2, 3, 6, 8),
    micro_batches: Sequence[int] = (8, 1, 2, 3, 4, 6, 12, 16),
    chunks: Sequence[int] = (2, 1, 3, 4),
) -> Knobs:
    """Choose a schedule and turn its sizes. The first value of each is the start, and that of the text form."""
    text = summary(ranks[0], micro_batches[0], chunks[0])
    names = ["1f1b", *(name for name in NAMES if name != "1f1b")]
    return Knobs(picture, text, schedule=names, ranks=ranks, micro_batches=micro_batches, chunks=chunks)
