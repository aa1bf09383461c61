"""`refimpl demo`: one small GPT trained by every strategy, compared with one process that trains alone.

`run` trains, judges, prints and writes. The ranks are new processes, or under torchrun the ones that it started.
"""

import os
import platform
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from refimpl import launch
from refimpl.bench.publish import cores
from refimpl.bench.written import write_json, writing
from refimpl.cli import page, report
from refimpl.cli.options import Plan
from refimpl.cli.report import Row
from refimpl.cli.train import Compared, Trained, oracle
from refimpl.comm.group import Group
from refimpl.model.gpt import native_low_precision
from refimpl.plan.formulas import Strategy
from refimpl.ranks.environment import find

TIMEOUT = 300  # seconds that one step may take

Job = tuple[Callable[..., list[Trained]], tuple[Any, ...], int]  # function of a rank, its arguments, ranks
Results = list[list[Trained]]  # of one job: rank -> strategy
Curves = dict[tuple[str, str], list[float]]  # (strategy, dtype) -> loss of each step


def run(plan: Plan) -> int:
    """Train, print the tables, write the report. Exit status: 0, or 1 when a strategy missed the oracle."""
    jobs: list[Job] = [(oracle, (plan.task, plan.ranks), 1)]
    jobs += [(plan.train, (plan.task, plan.strategies, dtype), plan.ranks) for dtype in plan.dtypes]
    if launch.under_torchrun():
        results = on_torchrun_ranks(jobs, plan.device)
        if int(os.environ["RANK"]):
            return 0
    else:
        results = on_new_ranks(jobs, plan.task.steps * (1 + len(plan.dtypes) * len(plan.strategies)), plan.device)
    rows, curves = judge(plan, results)
    publish(plan, rows, curves, environment(plan, results))
    return 1 if any(row.equal_to_oracle is False for row in rows) else 0


def on_new_ranks(jobs: Sequence[Job], steps: int, device: str) -> list[Results]:
    """Each job on a fresh world, all their steps on one progress bar."""
    bar = Progress(
        TextColumn("{task.description:12}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
        console=Console(stderr=True), transient=True,
    )  # fmt: skip
    with bar:
        line = bar.add_task("starting", total=steps)

        def advance(rank: int, label: str) -> None:
            bar.update(line, description=label, advance=1)

        return [
            launch.run(fn, *arguments, ranks=ranks, device=device, timeout=TIMEOUT, on_report=advance)
            for fn, arguments, ranks in jobs
        ]


def on_torchrun_ranks(jobs: Sequence[Job], device: str) -> list[Results]:
    """Each job on the ranks that torchrun started; the oracle on rank 0, while the others wait."""
    launch.join(device)
    group = Group.world()
    results = []
    for fn, arguments, ranks in jobs:
        if group.rank == 0:
            print(f"refimpl demo: {fn.__name__} {arguments[-1]}", file=sys.stderr, flush=True)
        mine = fn(*arguments) if group.rank < ranks else []
        results.append(group.all_gather_object(mine)[:ranks])
    return results


def judge(plan: Plan, results: Sequence[Results]) -> tuple[list[Row], Curves]:
    """Rows of the report and loss curves from what the oracle (first) and the strategies brought home."""
    truth = results[0][0][0]
    curves: Curves = {("oracle", "fp32"): truth.losses}
    rows: list[Row] = []
    for strategy, dtype, ranks in by_strategy(plan, results):
        first = ranks[0]
        curves[strategy, dtype] = [sum(parts) / plan.ranks for parts in zip(*(r.losses for r in ranks), strict=True)]
        ddp = next((row.step_ms for row in rows if (row.strategy, row.dtype) == ("ddp", dtype)), None)
        rows.append(
            Row(
                strategy=strategy,
                dtype=dtype,
                ranks=plan.ranks,
                final_loss=curves[strategy, dtype][-1],
                equal_to_oracle=same(first.weights, truth.weights) if dtype == "fp32" else None,
                bytes_per_parameter=per_parameter(first.memory, plan.task.model.parameters),
                sent_bytes_per_step=asdict(first.sent),
                step_ms=first.step_ms,
                ratio_to_ddp=1.0 if strategy == "ddp" else first.step_ms / ddp if ddp else None,
            )
        )
    return rows, curves


def by_strategy(plan: Plan, results: Sequence[Results]) -> Iterator[tuple[Strategy, str, list[Trained]]]:
    """(strategy, dtype, what each rank brought home), in the order of the table."""
    for dtype, ranks in zip(plan.dtypes, results[1:], strict=True):
        for i, strategy in enumerate(plan.strategies):
            yield strategy, dtype, [rank[i] for rank in ranks]


def same(weights: dict[str, torch.Tensor] | None, truth: dict[str, torch.Tensor] | None) -> bool:
    """Whether both hold the same tensors, bit for bit."""
    if weights is None or truth is None or weights.keys() != truth.keys():
        return False
    return all(torch.equal(weights[name].cpu(), truth[name]) for name in truth)


def per_parameter(memory: Compared, parameters: int) -> dict[str, dict[str, float]]:
    """Bytes by class -> bytes per parameter of the model."""
    return {side: {name: size / parameters for name, size in sizes.items()} for side, sizes in asdict(memory).items()}


def environment(plan: Plan, results: Sequence[Results]) -> dict[str, Any]:
    """Where the numbers come from, and what the rows leave out."""
    model = plan.task.model
    transit = {f"{s} {d}": ranks[0].transit / model.parameters for s, d, ranks in by_strategy(plan, results)}
    device, place = torch.device(plan.device), find()
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cores": cores(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "device": torch.cuda.get_device_name() if plan.device == "cuda" else "cpu",
        "bf16": "native" if native_low_precision(device) else "emulated",
        "started_by": place.launcher if place else "refimpl.launch",
        "parameters": model.parameters,
        "model": {"layers": model.layers, "width": model.width, "context": model.context, "vocab": model.vocab},
        "steps": plan.task.steps,
        "micro_batch": plan.task.batch,
        "seed": plan.task.seed,
        "oracle_final_loss": results[0][0][0].losses[-1],
        "buffers_in_transit_bytes_per_parameter": transit,
    }


def in_transit(buffers: Mapping[str, float]) -> Iterator[str]:
    """What is to be said of them, if there are any."""
    if most := max(buffers.values()):
        yield (
            "On top, in no formula: buffers in which gradients and parameters travel, a few buckets or modules "
            f"whatever the size of the model; for this small one up to {most:.1f} bytes a parameter."
        )


def publish(plan: Plan, rows: list[Row], curves: Curves, facts: dict[str, Any]) -> None:
    """Print the tables; write report.json, the picture and the page, and say where they are."""
    console = Console(width=None if sys.stdout.isatty() else 110)
    model, truth = plan.task.model, curves["oracle", "fp32"]
    console.print(
        f"A GPT of {model.parameters:,} parameters, {plan.task.steps} steps on {plan.ranks} ranks ({plan.device}). "
        f"The oracle, one process: loss {truth[0]:.4f} -> {truth[-1]:.4f}",
        highlight=False,
    )
    for table in report.rich_tables(rows):
        console.print(table)
    for note in (*plan.notes, *in_transit(facts["buffers_in_transit_bytes_per_parameter"])):
        console.print(note, highlight=False)
    plan.out.mkdir(parents=True, exist_ok=True)
    files = {name: plan.out / name for name in ("report.json", "demo.png", "demo.html")}
    write_json(files["report.json"], {"environment": facts, "rows": [asdict(row) for row in rows]})
    with writing(files["demo.png"]):
        page.draw(files["demo.png"], rows, curves)
    with writing(files["demo.html"]):
        page.write(files["demo.html"], facts, rows, curves)
    for file in files.values():
        console.print(str(file), highlight=False, soft_wrap=True)
