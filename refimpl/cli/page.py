"""The demo's picture and its page: memory bars and loss curves as PNG, and one HTML file that needs no other."""

import base64
import io
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

from refimpl.cli.report import Row, all_tables, keys, wrong

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Curves = Mapping[tuple[str, str], Sequence[float]]  # (strategy, dtype) -> loss of each step

# Okabe and Ito's colours, which colour-blind readers can tell apart.
CLASS_COLOURS = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00"]
STRATEGY_COLOURS = {"ddp": "#0072B2", "zero1": "#E69F00", "zero2": "#009E73", "zero3": "#D55E00"}
STYLES = {"fp32": "-", "bf16": (0, (4, 2))}
PANELS = ("memory", "loss")
THEMES = {"light": ("#1b1f24", "#ffffff", "#d0d7de"), "dark": ("#e6edf3", "#0d1117", "#30363d")}  # ink, paper, grid


def draw(
    file: Path | io.BytesIO, rows: Sequence[Row], curves: Curves, theme: str = "light", panels: Sequence[str] = PANELS
) -> None:
    """Bytes per parameter by class, the loss curves below them, as PNG that a phone can show; or one of the two."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    ink, paper, grid = THEMES[theme]
    colours = {f"{part}.color": ink for part in ("text", "xtick", "ytick")}
    style: Any = {**colours, "axes.labelcolor": ink, "axes.edgecolor": grid, "axes.facecolor": paper, "font.size": 10}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(5, 3.7 * len(panels)), dpi=150, facecolor=paper, layout="constrained")
        FigureCanvasAgg(figure)
        for axes, panel in zip(figure.subplots(len(panels), 1, squeeze=False)[:, 0], panels, strict=True):
            if panel == "memory":
                draw_memory(axes, rows, ink)
            else:
                draw_loss(axes, curves, ink)
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(axis="y", color=grid, linewidth=0.6)
            axes.set_axisbelow(True)
        figure.savefig(file, format="png")


def draw_memory(axes: "Axes", rows: Sequence[Row], ink: str) -> None:
    """A stacked bar for each row: what was counted. A tick across it: the formula's total."""
    gaps = [sum(rows[j].dtype != rows[j - 1].dtype for j in range(1, i + 1)) for i in range(len(rows))]
    places = [i + 0.6 * gap for i, gap in enumerate(gaps)]
    heights = [0.0] * len(rows)
    for name, colour in zip(keys([row.bytes_per_parameter for row in rows]), CLASS_COLOURS, strict=False):
        sizes = [row.bytes_per_parameter["counted"].get(name, 0) for row in rows]
        axes.bar(places, sizes, 0.72, bottom=heights, color=colour, label=name)
        heights = [a + b for a, b in zip(heights, sizes, strict=True)]
    formula = [sum(row.bytes_per_parameter["formula"].values()) for row in rows]
    axes.hlines(formula, [x - 0.44 for x in places], [x + 0.44 for x in places], color=ink, lw=1.5, label="formula")
    for x, height in zip(places, heights, strict=True):
        above: Any = {"xytext": (0, 4), "textcoords": "offset points", "ha": "center", "fontsize": 9}
        axes.annotate(f"{height:.1f}", (x, height), **above)
    axes.set_xticks(places, [f"{row.strategy}\n{row.dtype}" for row in rows])
    axes.set_ylim(0, max(heights) * 1.32)
    axes.set_ylabel("bytes per parameter on a rank")
    axes.set_title(f"Memory between backward and step, {rows[0].ranks} ranks", loc="left", fontsize=11)
    axes.legend(ncols=3, fontsize=9, frameon=False, loc="upper left")


def draw_loss(axes: "Axes", curves: Curves, ink: str) -> None:
    """The oracle's curve broad and pale; equal curves lie on it, thinner each."""
    from matplotlib.ticker import MaxNLocator

    width = 6.0
    for (strategy, dtype), losses in curves.items():
        steps = range(1, len(losses) + 1)
        if strategy == "oracle":
            axes.plot(steps, losses, color=ink, alpha=0.18, linewidth=11, label="oracle, one process fp32")
        else:
            colour = STRATEGY_COLOURS[strategy]
            axes.plot(
                steps, losses, color=colour, linestyle=STYLES[dtype], linewidth=width, label=f"{strategy} {dtype}"
            )
            width = max(1.2, width - 1.6)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("step")
    axes.set_ylabel("loss, nats a byte")
    axes.set_title("Training loss (equal curves lie on each other)", loc="left", fontsize=11)
    axes.legend(fontsize=9, frameon=False, ncols=2)


def picture(panel: str, rows: Sequence[Row], curves: Curves, description: str) -> str:
    """One panel as an HTML picture with its data inside, light or dark as the reader's system asks."""
    uris = []
    for theme in ("dark", "light"):
        buffer = io.BytesIO()
        draw(buffer, rows, curves, theme, [panel])
        uris.append("data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode())
    dark, light = uris
    return (
        f'<picture><source media="(prefers-color-scheme: dark)" srcset="{dark}">'
        f'<img src="{light}" alt="{escape(description)}"></picture>'
    )


def write(file: Path, environment: Mapping[str, Any], rows: Sequence[Row], curves: Curves) -> None:
    """The page: pictures and tables in one file, light or dark, readable on a phone."""
    template = Template((Path(__file__).parent / "page.html").read_text(encoding="utf-8"))
    memory = picture("memory", rows, curves, "Bytes per parameter on a rank by class, a bar for each strategy")
    loss = picture("loss", rows, curves, "Training loss by step, a curve for each strategy")
    parts = {
        "summary": summary(rows),
        "pictures": memory + "\n" + loss,
        "tables": "\n".join(table(title, *content) for title, content in all_tables(rows).items()),
        "environment": table("Where", ["", ""], facts(environment)),
    }
    file.write_text(template.substitute(parts), encoding="utf-8")


def facts(environment: Mapping[str, Any], within: str = "") -> list[list[str]]:
    """Name and value, a line each; what is nested is named "outer: inner"."""
    lines: list[list[str]] = []
    for name, value in environment.items():
        label = f"{within}{name.replace('_', ' ')}"
        if isinstance(value, Mapping):
            lines += facts(value, within=f"{label}: ")
        else:
            lines.append([label, f"{value:.4f}" if isinstance(value, float) else str(value)])
    return lines


def summary(rows: Sequence[Row]) -> str:
    """One sentence on the fp32 rows."""
    judged = [row for row in rows if row.equal_to_oracle is not None]
    equal = sum(row.equal_to_oracle is True for row in judged)
    return (
        f"{equal} of {len(judged)} fp32 strategies ended with exactly the weights of one process "
        f"that trained alone, bit for bit, on {rows[0].ranks} ranks."
    )


def table(title: str, header: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    """An HTML table that scrolls sideways on a narrow screen."""
    head = "".join(f"<th>{escape(name)}</th>" for name in header)
    lines = []
    for line in cells:
        marks = (' class="wrong"' if wrong(cell) else "" for cell in line)
        lines.append("<tr>" + "".join(f"<td{m}>{escape(c)}</td>" for m, c in zip(marks, line, strict=True)) + "</tr>")
    return (
        f'<h2>{escape(title)}</h2><div class="scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )
