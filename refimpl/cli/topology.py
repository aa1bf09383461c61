"""`refimpl doctor --topology`: latency and bandwidth between every two ranks, who is near, and what that is good for.

Each number is also a colour, from green (the best link here) over yellow to red (the slowest), by its logarithm.
"""

import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from refimpl import launch
from refimpl.bench.written import writing
from refimpl.cli.options import check_picture
from refimpl.comm.alpha_beta import AlphaBeta
from refimpl.comm.group import Group
from refimpl.comm.level_model import Choice, choose, predict
from refimpl.comm.nodes import RANKS_PER_NODE, ranks_per_node
from refimpl.comm.topology import Topology, floor, itself, measure

SIZES = (10_000, 1_000_000, 100_000_000)  # bytes of the all-reduces that are predicted
COLOURS = ((46, 125, 50), (249, 205, 70), (198, 40, 40))  # green, yellow, red

Reading = Callable[[AlphaBeta], float]


def latency(link: AlphaBeta) -> float:
    """Microseconds of an empty message."""
    return link.alpha * 1e6


def bandwidth(link: AlphaBeta) -> float:
    """Gbit/s; infinite where more bytes took no longer."""
    return 8e-9 / link.beta if link.beta else math.inf


READINGS: dict[str, tuple[Reading, bool]] = {  # title -> what is read, and whether more is better
    "latency, microseconds": (latency, False),
    "bandwidth, Gbit/s": (bandwidth, True),
}


def on_rank() -> tuple[Topology, str]:
    """Measure what the collectives of this world go through: shared memory where the ranks have it; and `floor`."""
    group = Group.world()
    group.share_messages()
    return measure(group), floor(group.link, itself(group))


def run(ranks: int | None, picture: Path | None) -> None:
    """Measure, print on rank 0, and draw into `picture`. ValueError for `ranks` beside a launcher's, or below 2."""
    if picture is not None:
        check_picture("picture", picture)
    if launch.under_torchrun():
        launch.join(device="cpu")
        group = Group.world()
        if ranks not in (None, group.size):
            raise ValueError(f"--ranks {ranks}: {group.size} ranks were started; leave --ranks out")
        found, note = on_rank()
        if group.rank:
            return
    elif ranks is not None and ranks < 2:
        raise ValueError(f"--ranks {ranks}: at least 2 are needed, to send each other something")
    else:
        found, note = launch.run(on_rank, ranks=ranks or 4, device="cpu", timeout=600)[0]
    show(found, Console())
    if note:
        print(note)
    if picture is not None:
        with writing(picture):
            draw(found, picture)
        print(f"written: {picture}")


def show(found: Topology, console: Console) -> None:
    """The matrices, the nodes, and predicted all-reduces."""
    for title, (read, more_is_better) in READINGS.items():
        console.print(matrix(found, title, read, more_is_better))
    nodes = found.nodes
    if len(nodes) == 1:
        console.print(f"near: all {found.ranks} ranks, one node")
    else:
        console.print("near: " + " | ".join(" ".join(map(str, node)) for node in nodes), highlight=False)
    if advice := disagreement(nodes, found.ranks):
        console.print(advice, highlight=False)
    if found.levels is not None:
        console.print(predictions(found))


def matrix(found: Topology, title: str, read: Reading, more_is_better: bool) -> Table:
    """From rank (row) to rank (column)."""
    table = Table("rank", title=title, title_justify="left", caption=None)
    place = places([read(link) for link in found.pairs.values()], more_is_better)
    for rank in range(found.ranks):
        table.add_column(str(rank), justify="right")
    for a in range(found.ranks):
        row = [Text("-") if a == b else cell(read(found.of(a, b)), place) for b in range(found.ranks)]
        table.add_row(str(a), *row)
    return table


def cell(value: float, place: Callable[[float], float]) -> Text:
    red, green, blue = colour(place(value))
    return Text(f" {short(value)} ", style=f"rgb(0,0,0) on rgb({red},{green},{blue})")


def short(value: float) -> str:
    return f"{value:.0f}" if 100 <= value < math.inf else f"{value:.3g}"


def places(values: Sequence[float], more_is_better: bool) -> Callable[[float], float]:
    """From 0, the best of these values, to 1, by their logarithms."""
    logs = [math.log(value) for value in values if 0 < value < math.inf] or [0.0]
    low, high = min(logs), max(logs)

    def place(value: float) -> float:
        log = min(max(math.log(value) if value > 0 else low, low), high)
        part = (log - low) / (high - low) if high > low else 0.0
        return 1 - part if more_is_better and high > low else part

    return place


def colour(part: float) -> tuple[int, int, int]:
    """0 is green, 1/2 yellow, 1 red."""
    (a, b), rest = (COLOURS[:2], 2 * part) if part < 0.5 else (COLOURS[1:], 2 * part - 1)
    red, green, blue = (round(x + (y - x) * rest) for x, y in zip(a, b, strict=True))
    return red, green, blue


def disagreement(nodes: Sequence[Sequence[int]], ranks: int) -> str:
    """What to set where the nodes that are measured are not those that this environment names."""
    each = len(nodes[0])
    if len(nodes) == ranks or any(len(node) != each for node in nodes):
        return ""
    said = ranks_per_node(ranks, {**os.environ})
    return "" if said == each else f"nodes of {said} are what this environment says: set {RANKS_PER_NODE}={each}"


def predictions(found: Topology) -> Table:
    """The fastest way of an all-reduce beside the flat ring."""
    levels = found.levels
    assert levels is not None
    table = Table("all-reduce of", "fastest", "ms", "flat ring, ms", title="predicted", title_justify="left")
    for size in SIZES:
        ways, best = predict("all_reduce", size, levels), choose("all_reduce", size, levels)
        ring = ways[Choice(two_level=False, algorithm="ring")]
        table.add_row(f"{size:,} B", str(best), f"{ways[best] * 1e3:.3g}", f"{ring * 1e3:.3g}")
    return table


def draw(found: Topology, file: Path) -> None:
    """Both matrices as heat maps. The suffix says the format."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.6, 4.4), layout="constrained")
    for axes, (title, (read, more_is_better)) in zip(figure.subplots(1, 2), READINGS.items(), strict=True):
        place = places([read(link) for link in found.pairs.values()], more_is_better)
        ranks = range(found.ranks)
        shades = [[(255,) * 3 if a == b else colour(place(read(found.of(a, b)))) for b in ranks] for a in ranks]
        axes.imshow(shades)
        axes.set(title=title, xlabel="to rank", ylabel="from rank", xticks=list(ranks), yticks=list(ranks))
        for a, b in found.pairs:
            for x, y in ((a, b), (b, a)):
                axes.text(x, y, short(read(found.of(a, b))), ha="center", va="center")
    figure.savefig(file)
