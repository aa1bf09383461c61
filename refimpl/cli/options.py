"""What `refimpl demo` is asked to do, checked before anything starts.

Every refusal is one line that names the option, what is wrong with it, and what would do.
"""

import tempfile
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from refimpl.cli.doctor import GB, MB
from refimpl.cli.train import DTYPES, STAGES, Task, Trained, train
from refimpl.model.data import corpus, load_text
from refimpl.model.gpt import GPTConfig
from refimpl.plan.formulas import Strategy
from refimpl.ranks import environment
from refimpl.ranks.meet import wished
from refimpl.zero.flat import ALIGN, round_up

# What a rank takes beyond its tensors, most of it torch's workspaces: 30 MB of its own (unique set size), measured with
# torch 2.13 on Linux. The libraries themselves are shared with the server that ranks are forked from.
RANK_BYTES = 30 * MB
TRAIN_BYTES = 24  # a parameter: 4 weights, 4 gradients, 8 optimizer, 8 buffers that travel
ACTIVATIONS = 20  # floats a token, layer and unit of width that backward needs
CONTROL = (
    "The small all_reduce: the gradients' norm, which also tells every rank of an Inf, 16 B for whether the "
    "optimizers' settings are the same, and 8 B a parameter tensor for whether any rank used it."
)


@dataclass(frozen=True)
class Plan:
    """A demo that can be run."""

    task: Task
    strategies: Collection[Strategy]
    ranks: int
    device: str
    out: Path
    train: Callable[..., list[Trained]] = train  # of a rank; is given the task, the strategies and a dtype
    dtypes: Sequence[str] = tuple(DTYPES)
    notes: Sequence[str] = (CONTROL, "bf16 rows have no oracle in bf16.")


def plan(
    ranks: int | None,
    strategies: Sequence[str] | None,
    steps: int,
    text: Path | None,
    layers: int,
    width: int,
    context: int,
    seed: int,
    device: str,
    out: Path,
) -> Plan:
    """Check the options of `refimpl demo`. ValueError says in one line what cannot be done, and why."""
    ranks = ranks_asked(ranks)
    task = task_of(steps, text, layers, width, context, seed)
    unknown = [s for s in strategies or [] if s not in STAGES]
    if unknown:
        raise ValueError(f"--strategy {unknown[0]}: there is no such strategy; choose from {', '.join(STAGES)}")
    device = _device(device, ranks)
    chosen = [s for s in STAGES if s in (strategies or STAGES)]
    check_memory(rank_bytes(task, len(chosen)), ranks)
    check_writable("out", out)
    return Plan(task, chosen, ranks, device, out)


def task_of(steps: int, text: Path | None, layers: int, width: int, context: int, seed: int, batch: int = 4) -> Task:
    """What is to be learned. ValueError names the option that cannot be so."""
    if steps < 2:
        raise ValueError(
            f"--steps {steps}: at least 2 are needed, before its first the optimizer has no state to count"
        )
    for name, value in {"layers": layers, "width": width, "context": context}.items():
        if value < 1:
            raise ValueError(f"--{name} {value}: it must be at least 1")
    if not 0 <= seed < 2**63:  # one that both torch and numpy take
        raise ValueError(f"--seed {seed}: it must {'not be negative' if seed < 0 else 'be below 2**63'}")
    if width % ALIGN:
        raise ValueError(
            f"--width {width}: it must be a multiple of {ALIGN}, because torch's fused AdamW gives the same bits on "
            f"a shard only where pieces are multiples of {ALIGN} elements; try {round_up(width, ALIGN)}"
        )
    model = GPTConfig(context=context, width=width, layers=layers, heads=width // 64)
    return Task(model, load_text(text, context) if text else corpus(), steps, seed, batch)


def ranks_asked(asked: int | None) -> int:
    if place := environment.find():
        if asked not in (None, place.size):
            raise ValueError(f"--ranks {asked}: {place.launcher} started {place.size} ranks; leave --ranks out")
        return place.size
    if asked is not None and asked < 1:
        raise ValueError(f"--ranks {asked}: at least 1 rank is needed")
    return asked or 2


def _device(asked: str, ranks: int) -> str:
    """ "cuda" or "cpu". The same for the oracle as for the ranks, or the bits would differ."""
    if asked not in ("auto", "cpu", "cuda"):
        raise ValueError(f"--device {asked}: choose from auto, cpu, cuda")
    gpus = torch.cuda.device_count()
    if asked == "cuda" and not gpus:
        raise ValueError("--device cuda: torch finds no GPU on this machine; leave --device out")
    asked = wished(asked)
    return "cuda" if asked == "cuda" or (asked == "auto" and gpus >= _local(ranks)) else "cpu"


def rank_bytes(task: Task, strategies: int) -> int:
    """Estimate of the memory that one rank takes at most, in bytes. Strategies take turns, and all stay in memory."""
    model = task.model
    tokens = task.batch * model.context
    floats = tokens * (ACTIVATIONS * model.layers * model.width + 4 * model.vocab)
    return RANK_BYTES + strategies * TRAIN_BYTES * model.parameters + 4 * floats


def check_memory(each: int, ranks: int) -> None:
    local = _local(ranks)
    free = psutil.virtual_memory().available
    if local * each > free:
        raise ValueError(
            f"--ranks {ranks}: {local} on this machine need about {local * each / GB:.1f} GB ({each / GB:.2f} each), "
            f"and {free / GB:.1f} GB are free: "
            + (f"enough for {free // each}" if free >= each else "try a smaller --width, --layers or --context")
        )


def _local(ranks: int) -> int:
    """How many of the ranks are on this machine; all of them, if their launcher does not say."""
    place = environment.find()
    return place.local_size or place.size if place else ranks


def check_picture(option: str, file: Path) -> None:
    """A file that can be drawn into, before anything is measured; it is left as it was. ValueError."""
    from matplotlib.backend_bases import FigureCanvasBase

    from refimpl.bench.options import open_once

    known = FigureCanvasBase.get_supported_filetypes()
    if file.suffix[1:].lower() not in known:
        raise ValueError(f"--{option} {file}: the suffix says the format, one of {', '.join(sorted(known))}")
    place = environment.find()
    if place and place.rank:
        return  # rank 0 draws
    try:
        open_once(file)
    except OSError as error:
        raise ValueError(f"--{option} {file}: cannot write there: {error.strerror}; choose another file") from None


def check_writable(option: str, folder: Path) -> None:
    """Make the folder and write into it before anything is trained. Rank 0 alone will write there."""
    place = environment.find()
    if place and place.rank:
        return
    try:
        if folder.exists() and not folder.is_dir():
            raise ValueError(f"--{option} {folder}: it is a file, and a folder is needed")
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ValueError(f"--{option} {folder}: cannot write there: {error.strerror}; choose another folder") from None
