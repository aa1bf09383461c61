"""`refimpl plan --params 1T --gpus 3072 --gpu-memory 80GB`: the layouts that fit, and what each is limited by."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from refimpl.engine.configuration.schema import DeepSpeedConfig
    from refimpl.engine.configuration.zero_sections import ZeroOptimization
    from refimpl.plan.judge import Machine, Verdict
    from refimpl.plan.search import Found
    from refimpl.plan.shape import Shape

COLUMNS = (
    *("dp", "pp", "cp", "tp", "micro", "m", "ZeRO", "recompute", "state GB", "activations GB", "GB", "bubble"),
    *("tp GB sent", "cp GB sent", "dp GB sent", "step s", "MFU"),
)
OF_MIXTURES = ("ep", "ep GB sent")
MOST = 1e14  # parameters
COUNTED = ("adam", "adamw", "muadam", "muadamw")  # two fp32 numbers a parameter, and a master weight
COUNTS = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


def count_of(text: str) -> float:
    """ "7B", "1.3T", "125M" or a number. ValueError for anything else."""
    unit = COUNTS.get(text[-1:].upper(), 1)
    try:
        count = float(text[:-1] if unit > 1 else text) * unit
    except ValueError:
        count = 0
    if not 1 <= count <= MOST:
        raise ValueError(f"--params {text}: a number of parameters, such as 125M, 7B or 1T, at most 100T")
    return count


def shape_of(params: str | None, model: Path | None, context: int | None) -> "Shape":
    """From a size, or from a transformers `config.json`. ValueError for neither, both, or what cannot be read."""
    from dataclasses import replace

    from refimpl.plan.public import of_config
    from refimpl.plan.shape import of_size

    if (params is None) == (model is None):
        raise ValueError("give either --params 7B or --model config.json")
    if params is not None:
        shape = of_size(count := count_of(params), context=context or 2048)
        if shape.parameters > 2 * count:
            raise ValueError(
                f"--params {params}: the smallest GPT here has {shape.parameters / 1e6:.0f}M, a position for each of "
                f"{shape.context} tokens among them"
            )
        return shape
    assert model is not None
    try:
        config = json.loads(model.read_text())
    except OSError as error:
        raise ValueError(f"--model {model}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # the second: brackets within brackets without end
        raise ValueError(f"--model {model}: a transformers configuration is JSON: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"--model {model}: a transformers configuration is a JSON object, not {type(config).__name__}")
    found = of_config(config)
    return replace(found, context=context) if context else found


def asked(config: Path, shape: "Shape", gpus: int, machine: "Machine", batch: int | None = None) -> "Found":
    """The layout of a DeepSpeed JSON, with and without recomputation, of which it says nothing.

    ValueError names what is wrong, also a `batch` that is not the JSON's.
    """
    from dataclasses import replace

    from refimpl.engine.config import load_config
    from refimpl.engine.configuration.read import raw_config
    from refimpl.engine.layout import axes_asked
    from refimpl.plan.formulas import STRATEGIES
    from refimpl.plan.gathered import Budgets
    from refimpl.plan.judge import judge
    from refimpl.plan.mesh import Mesh
    from refimpl.plan.search import found

    try:
        raw = raw_config(config)
    except OSError as error:
        raise ValueError(f"--config {config}: {error.strerror}") from None
    axes = axes_asked(raw)
    together = axes["pp"] * axes["cp"] * axes["tp"]
    if gpus % together:
        raise ValueError(
            f"--config {config}: pp {axes['pp']} x cp {axes['cp']} x tp {axes['tp']} do not divide {gpus} GPUs"
        )
    dp = gpus // together
    settings = load_config(raw, world_size=dp, rank=1)  # its warnings are rank 0's
    if batch not in (None, settings.train_batch_size):
        raise ValueError(f"--batch {batch}: --config {config} has {settings.train_batch_size}: leave one of them out")
    shared, zero = settings.expert_parallel, settings.zero_config()
    budgets = Budgets(zero.prefetch_bucket_size, zero.max_live_parameters, zero.max_reuse_distance)
    meshes = [
        Mesh(
            dp, axes["pp"], axes["tp"], settings.train_batch_size, settings.train_micro_batch_size_per_gpu,
            STRATEGIES[settings.zero_optimization.stage], recompute, settings.dtype.itemsize, axes["cp"],
            sequence=False, ep=shared.autoep_size if shared.enabled else 1, budgets=budgets,
            away=away(settings.zero_optimization),
        )
        for recompute in (False, True)
    ]  # fmt: skip
    return replace(found((judge(shape, mesh, machine) for mesh in meshes), machine), uncounted=uncounted(settings, dp))


def uncounted(settings: "DeepSpeedConfig", dp: int) -> tuple[str, ...]:
    """Keys that change what a rank keeps or sends, and no formula here. ValueError where most bytes would be wrong."""
    zero, sums = settings.zero_optimization, settings.data_types.grad_accum_dtype
    if 0 < zero.mics_shard_size < dp:
        raise ValueError(
            f"zero_optimization.mics_shard_size {zero.mics_shard_size}: the planner divides state over all data ranks; "
            f"plan for --gpus {zero.mics_shard_size} what each of MiCS's groups keeps"
        )
    optimizer = settings.optimizer.type if settings.optimizer else "AdamW"
    there = {
        f"optimizer.type {optimizer} (counted as AdamW)": optimizer.lower() not in COUNTED,
        "gradient_compression": settings.gradient_compression is not None,
        "communication_data_type": settings.communication_data_type not in (None, settings.dtype),
        "data_types.grad_accum_dtype": sums not in (None, settings.dtype),
        "torch_autocast": settings.torch_autocast.enabled,
        "zero_hpz_partition_size": zero.zero_hpz_partition_size > 1,
        "zero_quantized_weights": zero.zero_quantized_weights,
        "zero_quantized_gradients": zero.zero_quantized_gradients,
        "activation_checkpointing.partition_activations": settings.activation_checkpointing.partition_activations,
        "activation_checkpointing.cpu_checkpointing": settings.activation_checkpointing.cpu_checkpointing,
        "sparse_attention": settings.sparse_attention is not None,
    }
    return tuple(key for key, is_there in there.items() if is_there)


def away(zero: "ZeroOptimization") -> tuple[str, ...]:
    """The classes of bytes that rest at the host or on a disk: see `engine/homes.py`. ValueError for a part of one."""
    if zero.offload_optimizer.ratio < 1:
        raise ValueError("zero_optimization.offload_optimizer.ratio below 1: the planner knows all or nothing")
    at_host, params = (section.device != "none" for section in (zero.offload_optimizer, zero.offload_param))
    return (
        *(("parameters",) if params else ()),
        *(("gradients",) if at_host and zero.stage > 1 else ()),
        *(("optimizer", "master weights") if at_host or params else ()),
    )


def show(shape: "Shape", found: "Found", machine: "Machine", gpus: int, top: int) -> None:
    """Two tables: the fastest layouts that fit, and the least too large ones."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    # The table's: lines that a terminal folds can be read, cut ones cannot.
    console.width = max(console.width, 185 if shape.experts else 165)
    active = f", of which a token meets {shape.active / 1e9:,.1f}" if shape.experts else ""
    console.print(
        f"{shape.parameters / 1e9:,.1f} billion parameters{active}: {shape.layers} layers, width {shape.width}, "
        f"{shape.heads} heads, sequences of {shape.context}; {gpus} GPUs of {machine.memory / 1e9:.0f} GB, "
        f"{machine.peak / 1e12:.0f} TFLOP/s of which large products reach {machine.efficiency:.0%}, "
        f"{machine.reads / 1e12:.2g} TB/s of its memory, "
        f"{machine.node / 1e9:.0f} GB/s in a node of {machine.in_node}, {machine.network / 1e9:.0f} GB/s out of it",
        highlight=False,
    )
    for title, verdicts, by in (
        (f"{len(found.fit)} layouts fit; the fastest", found.fit, "limit"),
        (f"{len(found.over)} do not fit; the least too large", found.over if not found.fit else [], "most bytes"),
    ):
        if not verdicts:
            continue
        table = Table(title=title)
        for column in (*COLUMNS, *(OF_MIXTURES if shape.experts else ()), by):
            table.add_column(column, justify="right")
        for verdict in verdicts[:top]:
            of_mixtures = [str(verdict.mesh.ep), gigabytes(verdict.sent.get("expert", 0))] if shape.experts else []
            table.add_row(*cells(verdict), *of_mixtures, verdict.limit if found.fit else verdict.largest)
        console.print(table)
    mesh = (*found.fit, *found.over)[0].mesh
    if mesh.itemsize == 4:
        console.print("the configuration is for 32 bits: steps take longer than by --peak, which is of 16 bits")
    if mesh.away:
        console.print(f"offloaded: {', '.join(mesh.away)}; the time of what travels there and back is not counted")
    if found.uncounted:
        console.print(f"the configuration has what these figures leave out: {', '.join(found.uncounted)}")
    if not found.fit:
        console.print("nothing fits: more GPUs, more memory, a smaller model, or offload (refimpl demo --infinity)")


def gigabytes(size: int) -> str:
    return f"{size / 1e9:.1f}"


def cells(verdict: "Verdict") -> list[str]:
    """Under COLUMNS."""
    mesh, activations = verdict.mesh, verdict.bytes["activations"]
    return [
        *(str(n) for n in (mesh.dp, mesh.pp, mesh.cp, mesh.tp, mesh.micro, mesh.micro_batches)),
        mesh.zero.removeprefix("zero"),
        "yes" if mesh.recompute else "no",
        *(gigabytes(size) for size in (verdict.total - activations, activations, verdict.total)),
        f"{verdict.bubble:.0%}",
        *(gigabytes(verdict.sent[axis]) for axis in ("tensor", "context", "data")),
        f"{verdict.step:.1f}",
        f"{verdict.mfu:.0%}",
    ]
