"""`refimpl bench overlap` as a picture: the step's time by the size of a bucket, and timelines of three."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from refimpl.bench.overlap import Lap, Row
from refimpl.measure.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = {"forward": "#55a868", "backward": "#dd8452", "update": "#8172b3", "exposed": "#c44e52", "bucket": "#4c72b0"}
AT = {"computing": 0.0, "exposed": -1.0, "travelling": -2.0}  # rows, downwards; further collectives below


def draw(heat: Sequence[Row], laps: Sequence[Lap], file: Path) -> None:
    """Write the picture: rank 0's last step with the smallest, the best and the largest buckets."""
    from matplotlib.figure import Figure

    ordered = sorted(heat, key=lambda row: row.bucket_size)
    fastest = min(ordered, key=lambda row: row.step_ms)
    shown = list(dict.fromkeys((ordered[0].bucket_size, fastest.bucket_size, ordered[-1].bucket_size)))
    figure = Figure(figsize=(7, 3 + 1.7 * len(shown)), layout="constrained")
    axes: Any = figure.subplots(1 + len(shown), 1, height_ratios=[2, *[1] * len(shown)], squeeze=False)[:, 0]
    curve(axes[0], ordered)
    longest = max(laps[0].steps[size][-1].step.ms for size in shown)
    for axis, size in zip(axes[1:], shown, strict=True):
        timeline = laps[0].steps[size][-1]
        steps(axis, timeline)
        axis.set(xlim=(0, longest), title=f"buckets of {size:,} elements: {timeline.exposed_ms:.0f} ms exposed")
    axes[-1].set_xlabel("ms")
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=150)


def curve(axis: "Axes", ordered: Sequence[Row]) -> None:
    """Measured and predicted, over the size."""
    sizes = [row.bucket_size for row in ordered]
    axis.plot(sizes, [row.step_ms for row in ordered], "o-", color=COLOURS["bucket"], label="step, measured")
    axis.plot(
        sizes, [row.predicted_ms for row in ordered], "o--", color=COLOURS["bucket"], alpha=0.5, label="predicted"
    )
    axis.plot(sizes, [row.exposed_ms for row in ordered], "s-", color=COLOURS["exposed"], label="exposed, measured")
    axis.plot(
        sizes, [row.predicted_exposed_ms for row in ordered], "s--", color=COLOURS["exposed"], alpha=0.5,
        label="predicted",
    )  # fmt: skip
    first = ordered[0]
    axis.set(
        xscale="log", xlabel="elements in a bucket", ylabel="ms", ylim=(0, None),
        title=f"DDP, {first.parameters:,} parameters, {first.ranks} ranks, {first.link}",
    )  # fmt: skip
    axis.legend(ncols=2, frameon=False)


def steps(axis: "Axes", timeline: Timeline) -> None:
    """Phases, what is exposed, what travels, in milliseconds of the step."""
    begin = timeline.step.begin

    def bar(at: float, span: Any, colour: str) -> None:
        axis.barh(at, span.ms, left=(span.begin - begin) / 1e6, height=0.8, color=colour, edgecolor="white", lw=0.3)

    for span in timeline.phases:
        bar(AT["computing"], span, COLOURS.get(span.name, "grey"))
    for span in timeline.held:
        bar(AT["exposed"], span, COLOURS["exposed"])
    lanes = timeline.lanes()
    for lane, flights in enumerate(lanes):
        for flight in flights:
            bar(AT["travelling"] - lane, flight.span, COLOURS["bucket"])
    axis.set_yticks([*AT.values()], [*AT])
    axis.set_ylim(AT["travelling"] - max(1, len(lanes)) + 0.4, 0.6)
