"""The tables of README.md and docs/benchmarks.md, from a report of `refimpl bench zero` or `compression`, `--json`.

The first has a line a heat, with times of plain memory pages; the second a line a method.
"""

from collections.abc import Sequence
from typing import Any

from refimpl.bench.peers import ALONE
from refimpl.bench.zero import HEAT

COLUMNS = (
    *("stage", "ranks", "model", "dtype", "compute alone", "ours", "torch", "DeepSpeed"),
    *("ours / best peer", "huge pages", "best of both"),
)
STAGES = ("DDP", "Zero1", "Zero2", "Zero3")

Row = dict[str, Any]  # a `Row` of refimpl.bench.zero, as JSON has it


def markdown(rows: Sequence[Row]) -> str:
    """The table of either kind of rows. KeyError or ValueError for rows of another kind."""
    return compression(rows) if rows and "method" in rows[0] else zero(rows)


def compression(rows: Sequence[Row]) -> str:
    """For each link a step's time / DDP's, the loss after equal time, and whether that is less than DDP's."""
    links = list(dict.fromkeys(row["link"] for row in rows))
    found = {(row["method"], row["link"]): row for row in rows}
    lines = [["method", "MB sent a step", *links], ["---"] * (2 + len(links))]
    for method in dict.fromkeys(row["method"] for row in rows):
        cells = [found[method, link] for link in links]
        said = {"yes": " **pays**", "no": " no", "even": " even", "-": ""}
        lines.append(
            [method, f"{cells[0]['sent_mb']:.2f}"]
            + [f"{row['times_ddp']:.2f}, {row['loss']:.2f}{said[row['pays']]}" for row in cells]
        )
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def zero(rows: Sequence[Row]) -> str:
    """A table whose last three columns are ratios."""
    heats: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        heats.setdefault(tuple(row[name] for name in HEAT), []).append(row)
    lines = [COLUMNS, ["---"] * len(COLUMNS), *(line(heat) for heat in heats.values())]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def line(heat: Sequence[Row]) -> list[str]:
    """The cells of one heat."""
    ms = {(row["implementation"].split()[0], row["pages"]): row["step_ms"] for row in heat}
    alone = ALONE.split()[0]
    plain = [
        f"{ms[who, 'plain']:.0f}" if (who, "plain") in ms else "" for who in (alone, "refimpl", "torch", "DeepSpeed")
    ]
    ours = {row["pages"]: row for row in heat if row["implementation"].startswith("refimpl")}
    best = min(row["ratio_any_pages"] for row in ours.values())
    ratios = [ours["plain"]["ratio_same_pages"], ours["huge"]["ratio_same_pages"], best]
    first = heat[0]
    what = [STAGES[first["stage"]], str(first["ranks"]), f"{first['parameters'] / 1e6:.1f}M", first["dtype"]]
    return what + plain + [f"{ratio:.2f}" for ratio in ratios]
