"""`refimpl bench zero` and `refimpl bench comm`: a table on the screen and, with --json, a report in a file."""

import json
import os
import platform
from collections.abc import Iterable, Sequence
from dataclasses import asdict, astuple, fields
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from typer.core import TyperCommand

from refimpl.bench.race import Turns

app = typer.Typer(help="Measure side by side with peers.", no_args_is_help=True, pretty_exceptions_enable=False)

SUFFIXES = {"K": 10**3, "M": 10**6, "B": 10**9}


class Lists(TyperCommand):
    """Reads `--ranks 2 4` as `--ranks 2 --ranks 4`: a bare word that follows a value belongs to the same option."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, spread(args))


def spread(args: list[str]) -> list[str]:
    """Repeat an option before each further value of it."""
    result: list[str] = []
    option = ""
    for word in args:
        if word.startswith("-"):
            option = "" if "=" in word else word
        elif option and result[-1] != option:
            result.append(option)
        result.append(word)
    return result


def count(text: str) -> int:
    """25M -> 25_000_000; K, M and B are powers of a thousand."""
    number, scale = (text[:-1], SUFFIXES[text[-1].upper()]) if text[-1:].upper() in SUFFIXES else (text, 1)
    try:
        value = int(float(number) * scale)
    except (ValueError, OverflowError):
        raise typer.BadParameter(f"{text!r} is not a number such as 25M") from None
    if value < 1:
        raise typer.BadParameter(f"{text!r} must be at least 1")
    return value


def writable(file: Path) -> Path:
    """The report's file, opened before anything is measured, and left as it was."""
    new = not file.exists()
    try:
        file.open("a").close()
    except OSError as error:
        raise typer.BadParameter(f"--json {file}: cannot write there: {error.strerror}") from None
    if new:
        file.unlink()
    return file


Ranks = Annotated[list[int], typer.Option(min=2, help="Numbers of ranks.")]
TurnsOption = Annotated[int, typer.Option("--turns", min=1, help="Times each contestant's turn comes.")]
StepsOption = Annotated[int, typer.Option("--steps", min=1, help="Steps (or calls) in a turn.")]
RoundsOption = Annotated[int, typer.Option("--rounds", min=1, help="Fresh worlds, of each kind of memory pages.")]
JsonOption = Annotated[Path | None, typer.Option("--json", help="Write the report here.")]


@app.command(cls=Lists)
def zero(
    ranks: Ranks = [2, 4],  # noqa: B006 (typer copies it)
    params: Annotated[list[int], typer.Option(parser=count, help="Model sizes.")] = ["10M"],  # type: ignore[list-item]  # noqa: B006
    stages: Annotated[list[int], typer.Option(min=0, max=3, help="ZeRO stages; 0 is DDP.")] = [0, 1, 2, 3],  # noqa: B006
    batch: Annotated[int, typer.Option(min=1, help="Sequences a rank and step.")] = 1,
    context: Annotated[int, typer.Option(min=1, help="Tokens a sequence.")] = 64,
    turns: TurnsOption = 4,
    steps: StepsOption = 4,
    rounds: RoundsOption = 1,
    file: JsonOption = None,
) -> None:
    """Step time of DDP and ZeRO-1, 2, 3 beside torch DDP, ZeroRedundancyOptimizer, FSDP2 and DeepSpeed."""
    from refimpl.bench.zero import Row, Workload, measure

    file = writable(file) if file else None
    workloads = [Workload(p, batch, context, Turns(turns, steps)) for p in params]
    publish("Median step, slowest rank", Row, measure(ranks, workloads, stages, rounds), file)


@app.command(cls=Lists)
def comm(
    ranks: Ranks = [2, 4],  # noqa: B006
    sizes: Annotated[list[int], typer.Option(parser=count, help="Bytes in the buffer.")] = ["1M", "10M", "100M"],  # type: ignore[list-item]  # noqa: B006
    turns: TurnsOption = 4,
    steps: StepsOption = 4,
    rounds: RoundsOption = 1,
    file: JsonOption = None,
) -> None:
    """Single collectives beside torch.distributed's own."""
    from refimpl.bench.comm import Row, measure

    file = writable(file) if file else None
    publish("Median call, slowest rank", Row, measure(ranks, sizes, turns=Turns(turns, steps), rounds=rounds), file)


def environment() -> dict[str, Any]:
    """What the times depend on."""
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads_per_rank": 1,
        "gpus": gpus,
    }


def publish(title: str, row: type, heats: Iterable[Sequence[Any]], file: Path | None) -> None:
    """Show the rows of each heat as soon as it is over, then write the report. `row`: the rows' dataclass."""
    from rich.console import Console
    from rich.live import Live
    from rich.table import Table

    table = Table(title=title)
    for field in fields(row):
        text = field.type is str
        # Words of a heading stand below each other, so that 80 columns are enough.
        table.add_column(field.name.replace("_", "\n"), justify="left" if text else "right", no_wrap=True)
    rows = []
    with Live(table, console=Console(), vertical_overflow="visible"):
        for heat in heats:
            for line in heat:
                table.add_row(*(shown(value) for value in astuple(line)))
            table.add_section()
            rows += [asdict(line) for line in heat]
    if file:
        file.write_text(json.dumps({"environment": environment(), "rows": rows}, indent=1) + "\n")


def shown(value: object) -> str:
    return f"{value:,.2f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)
