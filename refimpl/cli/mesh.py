"""`refimpl demo --mesh dp=2,pp=2,tp=2`: one GPT over all axes at once, beside one process that trains it alone.

Both run the engine on the same JSON but for the axes. The losses agree up to the order of additions in fp32: a matrix
cut by rows is summed in parts (`parallel/tensor.py`), and AdamW divides a gradient near zero by its own size, rounding
and all. BOUND is what the curves may differ by; bytes are counted on every rank and equal `refimpl.plan` exactly.
"""

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from refimpl import launch
from refimpl.bench.written import write_json, writing
from refimpl.cli.options import RANK_BYTES, TRAIN_BYTES, check_memory, check_writable, task_of
from refimpl.cli.train import Task
from refimpl.engine.initialize import initialize
from refimpl.measure.memory import MemoryMeter
from refimpl.model.data import Batches
from refimpl.model.gpt import GPT
from refimpl.plan import formulas
from refimpl.plan.mesh import Mesh
from refimpl.plan.shape import of_gpt
from refimpl.plan.stages import parameters_of
from refimpl.plan.traffic import by_axis, traffic

BOUND = 1e-4  # relative, of every step's loss
MICRO, SEQUENCES = 4, 2  # micro-batches of a replica in a step, sequences in one
ALONE = Mesh(1, 1, 1, 1, zero="zero1", recompute=False, itemsize=4, sequence=False)
TRAVELS = {
    "tensor": "activations, summed twice a layer forward and backward",
    "pipeline": "activations to the next stage, gradients back",
    "context": "keys, values and their gradients, round the ring",
    "data": "gradients, and updated parameters",
}


@dataclass(frozen=True)
class Seen:
    """What one rank brings home; bytes of the last step. `expected`: by the formulas."""

    losses: list[float]
    place: dict[str, int]  # its coordinates
    sent: dict[str, int]  # by axis
    expected: dict[str, int]
    kept: dict[str, int]  # by class, between steps
    formula: dict[str, int]
    step_ms: float


def asked(
    mesh: str,
    ranks: int | None,
    steps: int,
    text: Path | None,
    layers: int,
    width: int,
    context: int,
    seed: int,
    out: Path,
) -> tuple[Mesh, Task, Path]:
    """The layout and the task. ValueError says in one line what cannot be."""
    sizes: dict[str, int] = {}
    for part in mesh.replace(" ", "").split(","):
        axis, _, size = part.partition("=")
        if axis not in ("dp", "pp", "cp", "tp") or not size.isdecimal() or int(size) < 1 or axis in sizes:
            raise ValueError(f"--mesh {mesh}: {part!r} is not one of dp=N, pp=N, cp=N, tp=N, each once")
        sizes[axis] = int(size)
    dp, pp, tp, cp = (sizes.get(axis, 1) for axis in ("dp", "pp", "tp", "cp"))
    found = Mesh(
        dp, pp, tp, dp * MICRO * SEQUENCES, SEQUENCES, "zero1", recompute=False, itemsize=4, cp=cp, sequence=False
    )
    if ranks not in (None, found.gpus):
        raise ValueError(f"--ranks {ranks}: --mesh {mesh} has {found.gpus}; leave --ranks out")
    task = task_of(steps, text, layers, width, context, seed, SEQUENCES)
    model = task.model
    if model.heads % tp or model.vocab % tp:
        raise ValueError(
            f"--mesh {mesh}: tp must divide the {model.heads} heads and the vocabulary of {model.vocab}, so that every "
            "rank's bytes are the formulas'"
        )
    try:
        found.check(of_gpt(model))
    except ValueError as reason:
        raise ValueError(f"--mesh {mesh}: {reason}") from None
    check_memory(RANK_BYTES + TRAIN_BYTES * model.parameters, found.gpus)
    out = Path("out/mesh") if out == Path("out/demo") else out
    check_writable("out", out)
    return found, task, out


def train(mesh: Mesh, task: Task, feeds: int) -> Seen:
    """Runs on every rank. `feeds`: batches of a step, whatever the layout."""
    torch.set_num_threads(1)
    torch.manual_seed(task.seed)
    config = {
        "train_micro_batch_size_per_gpu": task.batch,
        "gradient_accumulation_steps": feeds // mesh.dp,
        "optimizer": {"type": "AdamW", "params": {"lr": task.lr}},
        "zero_optimization": {"stage": 1},
        "tensor_parallel": {"autotp_size": mesh.tp},
        "sequence_parallel_size": mesh.cp,
        "pipeline": {"stages": mesh.pp},
    }
    engine, *_ = initialize(model=GPT(task.model), config=config)
    batches, axes = Batches(task.text, task.model.context, task.batch, task.seed), engine.axes
    losses, seconds = [], []
    for step in range(task.steps):
        axes.world.ledger.reset()
        mine = [batches.batch(step, micro) for micro in range(axes.feed, feeds, mesh.dp)]
        begun = time.perf_counter()
        losses.append(engine.train_batch(iter(mine)).item())
        seconds.append(time.perf_counter() - begun)
        if axes.world.rank == 0:
            launch.report("")
    shape, layout, stage = of_gpt(task.model), formulas.layout_of(engine.stage), axes.pipeline.rank
    laid_out = formulas.Layout(parameters_of(shape, mesh, stage), layout.padding, layout.buckets)
    formula = formulas.memory_bytes(mesh.zero, mesh.dp * mesh.cp, 4, laid_out)
    now = MemoryMeter(engine.stage.tensors).now()
    kinds = ("parameters", "optimizer")
    place = {"pp": stage, "dp": axes.feed, "cp": axes.context.rank, "tp": axes.tensor.rank}
    sent = by_axis(axes.world.ledger.sent_bytes("tag"))
    expected = traffic(shape, mesh, stage, layout.padding)
    kept, wanted = ({kind: sizes[kind] for kind in kinds} for sizes in (now, formula))
    return Seen(losses, place, sent, expected, kept, wanted, median(seconds[1:]) * 1e3)


def run(mesh: Mesh, task: Task, out: Path) -> int:
    """Train both, compare, print, write. Exit status: 1 if the curves or the bytes differ by more than they may."""
    out.mkdir(parents=True, exist_ok=True)
    console = Console()
    (alone,), ranks = (
        trained(console, *way, mesh.dp * MICRO, task) for way in (("one process", ALONE), ("mesh", mesh))
    )
    worst = max(abs(a - b) / b for a, b in zip(ranks[0].losses, alone.losses, strict=True))
    exact = all({**r.sent, "control": 0} == {**r.expected, "control": 0} and r.kept == r.formula for r in ranks)
    console.print(curves(alone, ranks[0]))
    console.print(axes_table(mesh, ranks))
    console.print(ranks_table(ranks))
    console.print(
        f"{mesh.gpus} processes on this machine's cores; losses differ by at most {worst:.1e} of their value (bound "
        f"{BOUND:.0e}); bytes {'equal the formulas on every rank' if exact else 'DIFFER from the formulas'}.",
        highlight=False,
    )
    said: dict[str, Any] = {"mesh": asdict(mesh), "largest_deviation": worst, "bound": BOUND, "bytes_exact": exact}
    said |= {"one_process": alone.losses, "ranks": [asdict(r) for r in ranks]}
    write_json(out / "report.json", said)
    with writing(out / "mesh.png"):
        draw(out / "mesh.png", mesh, alone, ranks)
    console.print(f"{out / 'report.json'}\n{out / 'mesh.png'}")
    return 0 if worst <= BOUND and exact else 1


def trained(console: Console, words: str, mesh: Mesh, feeds: int, task: Task) -> list[Seen]:
    """What every rank brings home."""
    with console.status(words) as status:
        steps = iter(range(1, task.steps + 1))

        def advance(rank: int, _: str) -> None:
            status.update(f"{words}: step {next(steps)} of {task.steps}")

        return launch.run(train, mesh, task, feeds, ranks=mesh.gpus, device="cpu", timeout=300, on_report=advance)


def curves(alone: Seen, mesh: Seen) -> Table:
    """Some steps of both curves."""
    table = Table(title="Loss of a step")
    for column in ("step", "one process", "the mesh", "differ by"):
        table.add_column(column, justify="right")
    last = len(alone.losses) - 1
    for step in sorted({0, 1, last // 4, last // 2, last}):
        a, b = alone.losses[step], mesh.losses[step]
        table.add_row(str(step), f"{a:.6f}", f"{b:.6f}", f"{abs(a - b) / a:.1e}")
    return table


def axes_table(mesh: Mesh, ranks: list[Seen]) -> Table:
    """Every axis that is used: its size, what travels, and the most that a rank sends."""
    table = Table(title="Bytes that a rank sends in a step, on each axis (the busiest rank)")
    for column in ("axis", "ranks", "what travels", "MB counted", "MB by formula"):
        table.add_column(column, justify="left" if column in ("axis", "what travels") else "right")
    for axis, size in sizes(mesh).items():
        if size > 1:
            most = max(ranks, key=lambda r: r.sent[axis])
            mb = (f"{of[axis] / 1e6:.3f}" for of in (most.sent, most.expected))
            table.add_row(axis, str(size), TRAVELS[axis], *mb)
    control = max(r.sent["control"] for r in ranks)
    table.add_row("control", "", "norm, losses, token counts", f"{control / 1e6:.6f}", "")
    return table


def ranks_table(ranks: list[Seen]) -> Table:
    """Who is where, and keeps how much."""
    table = Table(title="Ranks, and what they keep between steps")
    for column in ("rank", "pp", "dp", "cp", "tp", "parameters MB", "optimizer MB", "step ms"):
        table.add_column(column, justify="right")
    for number, r in enumerate(ranks):
        kept = (f"{r.kept[kind] / 1e6:.3f}" for kind in ("parameters", "optimizer"))
        table.add_row(str(number), *(str(r.place[a]) for a in ("pp", "dp", "cp", "tp")), *kept, f"{r.step_ms:.0f}")
    return table


def sizes(mesh: Mesh) -> dict[str, int]:
    return {"tensor": mesh.tp, "context": mesh.cp, "data": mesh.dp * mesh.cp, "pipeline": mesh.pp}


def draw(file: Path, mesh: Mesh, alone: Seen, ranks: list[Seen]) -> None:
    """The two curves; what each rank sends on each axis; what each keeps."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 9), layout="constrained")  # one below the other: as wide as a phone shows
    top, middle, bottom = figure.subplots(3, 1)
    top.plot(alone.losses, linewidth=4, alpha=0.4, label="one process")
    top.plot(ranks[0].losses, color="black", linewidth=1, label=f"{mesh.gpus} ranks")
    top.set_xlabel("step")
    top.set_ylabel("loss, nats a byte")
    top.legend()
    used = [axis for axis in ("pp", "dp", "cp", "tp") if getattr(mesh, axis) > 1]
    names = [f"{n}: " + " ".join(f"{axis}{r.place[axis]}" for axis in used) for n, r in enumerate(ranks)]
    axes = [axis for axis, size in sizes(mesh).items() if size > 1]
    for panel, values, kinds, title in (
        (middle, [r.sent for r in ranks], axes, "MB sent a step, by axis"),
        (bottom, [r.kept for r in ranks], ["parameters", "optimizer"], "MB kept between steps"),
    ):
        start = [0.0] * len(ranks)
        for kind in kinds:
            width = [value[kind] / 1e6 for value in values]
            panel.barh(names, width, left=start, label=kind)
            start = [a + b for a, b in zip(start, width, strict=True)]
        panel.invert_yaxis()
        panel.set_title(title, fontsize=10)
        panel.legend(fontsize=9, loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=3, frameon=False)
    figure.savefig(file, dpi=150)
