"""A bench's rows as tables in the terminal and as a JSON report, with what the times depend on."""

import os
import platform
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from refimpl.bench.written import write_json


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def environment() -> dict[str, Any]:
    """What the times depend on."""
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "cores": cores(),
        "threads_per_rank": 1,
        "gpus": gpus,
    }


def publish(title: str, common: Sequence[str], heats: Iterable[Sequence[Any]], file: Path | None) -> None:
    """Show a table for each heat as soon as it is over, then write the report.

    A heat is rows of one dataclass that agree in the fields `common`, which stand above the table.
    """
    from rich.console import Console
    from rich.table import Table

    rows: list[Any] = []
    for heat in heats:
        lines = [{name: None if value != value else value for name, value in asdict(line).items()} for line in heat]
        table = Table(title=f"{title}: {', '.join(f'{name} {shown(lines[0][name])}' for name in common)}")
        columns = [name for name in lines[0] if name not in common]
        for name in columns:
            # Words of a heading stand below each other, so that 80 columns are enough; where not, names are cut.
            text, width = isinstance(lines[0][name], str), max(len(shown(line[name])) for line in lines)
            table.add_column(
                name.replace("_", "\n"),
                justify="left" if text else "right",
                no_wrap=True,
                min_width=None if text else width,
            )
        for line in lines:
            table.add_row(*(shown(line[name]) for name in columns))
        Console().print(table)
        rows += heat
    if file:
        write_rows(file, rows)


def write_rows(file: Path, rows: Sequence[Any]) -> None:
    """The report of rows, each a dataclass. SystemExit where it cannot be written, see `written`."""
    write_json(file, {"environment": environment(), "rows": [asdict(row) for row in rows]})


def shown(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float) and 0 < abs(value) < 0.1:
        return f"{value:.1g}"
    return f"{value:,.2f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)
