"""One step of ZeRO-3 as a picture, from a ledger: which block computes, and which gathers and reductions travel.

    watch(stage.model.blocks, ledger)      # once: marks where each block's forward and backward begin and end
    bars = bars_of(ledger.events)          # after a step
    draw({"no prefetch": bars, ...})

The axis counts events: the order is what the algorithm decides, seconds depend on the machine.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn

from refimpl.measure.ledger import Event, Ledger
from refimpl.notebook import show

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LANES = {"parameters": "gather", "gradients": "reduce"}  # by the tag of a collective
COLOURS = {"forward": "#55a868", "backward": "#dd8452", "gather": "#4c72b0", "reduce": "#c44e52"}


class Bar(NamedTuple):
    """`lane` is a key of COLOURS, `label` the block that computes; `first`, `last` are numbers of events."""

    lane: str
    label: str
    first: int
    last: int


def watch(blocks: nn.ModuleList, ledger: Ledger) -> None:
    """Mark in the ledger when each block's forward begins and ends, and when its backward begins."""
    for name, block in blocks.named_children():

        def begin(module: nn.Module, args: Any, name: str = name) -> None:
            ledger.mark(f"begin forward {name}")

        def end(module: nn.Module, args: Any, output: Any, name: str = name) -> None:
            ledger.mark(f"end forward {name}")
            output.register_hook(lambda grad: ledger.mark(f"begin backward {name}"))

        block.register_forward_pre_hook(begin)
        block.register_forward_hook(end)


def bars_of(events: Sequence[Event]) -> list[Bar]:
    """Backward of a block ends when its last gradient arrives, which a stage marks as "grad blocks.0.<name>"."""
    last = {e.op.split(".")[1]: e for e in events if e.op.startswith("grad blocks.")}
    kept = [e for e in events if e.tag in LANES or e.op.startswith(("begin", "end")) or e in last.values()]
    bars: list[Bar] = []
    began: dict[str | int, int] = {}
    for at, e in enumerate(kept):
        what: str | int = e.call
        if e.phase == "mark":
            what = "backward " + e.op.split(".")[1] if e.op.startswith("grad") else e.op.partition(" ")[2]
        if e.phase == "start" or e.op.startswith("begin"):
            began[what] = at
        else:
            lane, label = what.split() if isinstance(what, str) else (LANES[e.tag], "")
            bars.append(Bar(lane, label, began[what], at))
    return bars


def hidden(bars: Sequence[Bar]) -> int:
    """How many gathers were on their way while a block computed."""
    computing = [bar for bar in bars if bar.lane in ("forward", "backward")]
    gathers = [bar for bar in bars if bar.lane == "gather"]
    return sum(any(g.first < c.last and c.first < g.last for c in computing) for g in gathers)


def draw(timelines: Mapping[str, Sequence[Bar]]) -> "Figure":
    """One timeline below the other."""
    from matplotlib.patches import Patch

    figure, axes = show.figure(4.6, rows=len(timelines), height_ratios=(3, 5))
    for axis, (name, bars) in zip(axes, timelines.items(), strict=True):
        _draw_one(axis, bars)
        axis.set_title(name, pad=14)  # above the blocks' numbers
        axis.set_xticks([])
    axes[-1].set_xlabel("events of one step, in order")
    figure.legend(
        handles=[Patch(color=colour) for colour in COLOURS.values()],
        labels=["forward of a block", "backward", "gather", "reduction"],
        loc="outside lower center",
        ncols=2,
        frameon=False,
    )
    return figure


def _draw_one(axis: "Axes", bars: Sequence[Bar]) -> None:
    free_from: dict[int, int] = {}  # of each row of gathers: the event after which it is free
    for lane, label, first, last in bars:
        y = {"forward": 0, "backward": 0, "reduce": 1}.get(lane)
        if y is None:
            y = next(row for row in range(2, 99) if free_from.get(row, -1) <= first)
            free_from[y] = last
        axis.barh(y, last - first, left=first, height=0.75, color=COLOURS[lane], edgecolor="white")
        axis.text((first + last) / 2, y - 0.4, label, ha="center", va="bottom", fontsize=9)  # above: bars are narrow
    rows = max(free_from, default=1) + 1
    axis.set_yticks(range(rows), ["compute", "reduce", "gather", *[""] * rows][:rows])
    axis.invert_yaxis()
    axis.spines["bottom"].set_visible(False)
