"""The README's table from a report of `refimpl bench zero --json`: one line a heat, times of plain memory pages."""

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
    """A table whose last three columns are ratios. KeyError or ValueError for rows of another kind."""
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
