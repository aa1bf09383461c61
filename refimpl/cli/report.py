"""What the demo found: one row a strategy, as JSON and as tables for the terminal."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table
from rich.text import Text

Bytes = dict[str, float]  # class -> bytes per parameter
Sent = dict[str, int]  # collective -> bytes per step and rank


@dataclass(frozen=True)
class Row:
    """One strategy in one dtype. Memory and traffic are those of rank 0."""

    strategy: str
    dtype: str
    ranks: int
    final_loss: float  # mean over ranks, nats a byte
    equal_to_oracle: bool | None  # every weight, bit for bit; None where there is no oracle
    bytes_per_parameter: dict[str, Bytes]  # "counted" and "formula"
    sent_bytes_per_step: dict[str, Sent]  # "counted" and "formula"
    step_ms: float
    ratio_to_ddp: float | None  # of step_ms, in the same dtype; None without DDP


def verdict(row: Row) -> str:
    """The answer to "equal to the oracle?"."""
    return {True: "yes", False: "NO", None: "-"}[row.equal_to_oracle]


def keys(tables: Sequence[dict[str, dict[str, Any]]]) -> list[str]:
    """The classes or collectives that are not zero everywhere, in order of appearance."""
    return list({k: None for table in tables for side in table.values() for k, v in side.items() if v})


def pair(sides: dict[str, dict[str, Any]], key: str, shown: Callable[[Any], str]) -> str:
    """ "counted = formula", or "counted ≠ formula"; empty where both are zero."""
    counted, formula = (side.get(key, 0) for side in sides.values())
    if not counted and not formula:
        return ""
    return f"{shown(counted)} {'=' if counted == formula else '≠'} {shown(formula)}"


def megabytes(number: int) -> str:
    """13_031_424 -> 13.031; what would read as nothing is in bytes."""
    return f"{number / 1e6:.3f}" if number >= 10_000 else f"{number} B"


def results(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Header and cells of the first table: loss, equality, time."""
    header = ["strategy", "dtype", "final loss", "equal to the oracle", "step ms", "x DDP"]
    cells = [
        [
            row.strategy,
            row.dtype,
            f"{row.final_loss:.4f}",
            verdict(row),
            f"{row.step_ms:.0f}",
            "-" if row.ratio_to_ddp is None else f"{row.ratio_to_ddp:.2f}",
        ]
        for row in rows
    ]
    return header, cells


def comparison(rows: Sequence[Row], field: str, shown: Callable[[Any], str]) -> tuple[list[str], list[list[str]]]:
    """Header and cells of a table "counted = formula", a column for each class or collective, and the total counted."""
    tables = [getattr(row, field) for row in rows]
    columns = keys(tables)
    cells = []
    for row, table in zip(rows, tables, strict=True):
        total = shown(sum(table["counted"].values()))
        cells.append([row.strategy, row.dtype, *(pair(table, key, shown) for key in columns), total])
    return ["strategy", "dtype", *columns, "total"], cells


def all_tables(rows: Sequence[Row]) -> dict[str, tuple[list[str], list[list[str]]]]:
    """Title -> header and cells."""
    memory = "Bytes per parameter on a rank, between backward and step: counted = formula"
    traffic = "MB sent by a rank in a step: counted = formula"
    return {
        "Result": results(rows),
        memory: comparison(rows, "bytes_per_parameter", "{:.3f}".format),
        traffic: comparison(rows, "sent_bytes_per_step", megabytes),
    }


def rich_tables(rows: Sequence[Row]) -> list[Table]:
    """The tables for the terminal; a difference is red."""
    tables = []
    for title, (header, cells) in all_tables(rows).items():
        table = Table(title=title, title_justify="left")
        for i, name in enumerate(header):
            table.add_column(name, justify="left" if i < 2 else "right")
        for line, row in zip(cells, rows, strict=True):
            table.add_row(*(Text(cell, style="bold red" if wrong(cell) else "") for cell in line))
            if row is [r for r in rows if r.dtype == row.dtype][-1]:
                table.add_section()
        tables.append(table)
    return tables


def wrong(cell: str) -> bool:
    """Whether a cell says that something that should be equal is not."""
    return cell == "NO" or "≠" in cell
