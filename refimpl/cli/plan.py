"""`refimpl plan`: layouts of a model on many GPUs. `refimpl plan activations`: what to compute again in a budget."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from refimpl.cli.refuse import refuse, refusing

if TYPE_CHECKING:
    from refimpl.activation.budget import Block, Plan

app = typer.Typer(
    help="Decide before a run: what fits, and what it costs.", invoke_without_command=True, add_completion=False
)


def finite(number: float) -> float:
    """What `min` and `max` let through is neither infinity nor NaN."""
    if not math.isfinite(number):
        raise typer.BadParameter(f"{number} is no finite number")
    return number


@app.callback()
def plan(
    context: typer.Context,
    params: str | None = typer.Option(None, help="Size of the model: 7B, 1T."),
    model: Annotated[Path | None, typer.Option(help="A transformers config.json instead.")] = None,
    config: Annotated[
        Path | None, typer.Option(help="A DeepSpeed JSON: the layout that it asks for, and no other.")
    ] = None,
    gpus: int = typer.Option(8, min=1, help="GPUs."),
    gpu_memory: str = typer.Option("80GB", help="Memory of one."),
    batch: int | None = typer.Option(None, min=1, help="Sequences of a step. Default: one a GPU, or more."),
    tokens: int | None = typer.Option(None, "--context", min=1, help="Tokens in a sequence."),
    peak: float = typer.Option(312e12, callback=finite, min=1, help="Operations a second that one could do (16 bit)."),
    efficiency: float = typer.Option(0.62, callback=finite, min=0.01, max=1, help="Share that large products reach."),
    node: int = typer.Option(8, min=1, help="GPUs in a node."),
    node_bandwidth: str = typer.Option("240GB", help="Bytes a second between them, one way."),
    network: str = typer.Option("22GB", help="Bytes a second of a GPU to another node."),
    memory_bandwidth: str = typer.Option("2000GB", help="Bytes a second of a GPU's own memory."),
    top: int = typer.Option(10, min=1, help="Layouts to show."),
) -> None:
    """Decide before a run: `refimpl plan --params 1T --gpus 3072`: which layouts fit, how fast, limited by what."""
    if context.invoked_subcommand is not None:
        return
    from rich.console import Console

    from refimpl.cli.layouts import asked, shape_of, show
    from refimpl.plan.judge import Machine
    from refimpl.plan.search import search

    with refusing("refimpl plan", ValueError):
        shape = shape_of(params, model, tokens)
        sizes = [bytes_of(text, key) for text, key in (
            (gpu_memory, "--gpu-memory"), (node_bandwidth, "--node-bandwidth"), (network, "--network"),
            (memory_bandwidth, "--memory-bandwidth"),
        )]  # fmt: skip
        if min(sizes) < 10**6:
            raise ValueError("--gpu-memory, --node-bandwidth, --network, --memory-bandwidth: 1MB or more: 80GB, not 80")
        machine = Machine(sizes[0], peak, efficiency, node, *sizes[1:])
        with Console(stderr=True).status(f"{gpus} GPUs ..."):  # of a hundred thousand: seconds
            if config:
                found = asked(config, shape, gpus, machine, batch)
            else:
                found = search(shape, gpus, batch or gpus, machine)
    show(shape, found, machine, gpus, top)


def bytes_of(text: str, key: str = "--budget") -> int:
    """As `size_of`, whose ValueError names the option."""
    from refimpl.checkpoint.export import size_of

    try:
        return size_of(text, least=0)
    except ValueError:
        raise ValueError(f"{key} {text}: a number of bytes, such as 2GB, 500MB or 1.5GiB") from None


def words(plan: "Plan") -> str:
    """A plan in one line: `0-2 · again(3 · 4)` keeps blocks 0 to 2, and runs 3 and 4 once more."""
    from refimpl.activation.budget import Again

    parts: list[str] = []
    first = last = -1
    for part in (*plan, None):
        if isinstance(part, int) and part == last + 1 and first >= 0:
            last = part
            continue
        if first >= 0:
            parts.append(str(first) if first == last else f"{first}-{last}")
            first = -1
        if isinstance(part, Again):
            parts.append(f"again({words(part.inside)})")
        elif part is not None:
            first = last = part
    return " · ".join(parts)


@app.command()
def activations(
    budget: str = typer.Option(..., help="Bytes for activations on a rank: 2GB, 500MB, 1.5GiB."),
    layers: int = typer.Option(12, min=1, max=200, help="Transformer blocks."),
    width: int = typer.Option(768, min=1, help="Width of the model."),
    heads: int = typer.Option(12, min=1, help="Attention heads."),
    context: int = typer.Option(256, min=1, help="Tokens in a sequence."),
    batch: int = typer.Option(4, min=1, help="Sequences in a micro-batch."),
    check: bool = typer.Option(
        False, "--count", help="Also build all blocks, run each plan once, and count its bytes."
    ),
) -> None:
    """Keep all, every block, sqrt(L), or the best choice within the budget: bytes at the peak, and a step's time."""
    import torch

    from refimpl.activation import budget as plans
    from refimpl.activation.chain import count, measure
    from refimpl.model.gpt import Block, GPTConfig

    try:
        room = bytes_of(budget)
        config = GPTConfig(context=context, width=width, layers=layers, heads=heads)
        modules = [Block(config) for _ in range(layers if check else 1)]
        x = torch.randn(batch, context, width)
        blocks = measure(modules[:1], x) * layers
        chosen = {
            "keep all": plans.keep(layers),
            "every block": plans.every(1, layers),
            "sqrt(L)": plans.sqrt(layers),
            f"best within {room / 1e6:.1f} MB": plans.best(blocks, room),
        }
    except ValueError as reason:
        refuse("refimpl plan activations", reason)
    except RuntimeError as reason:
        if "allocate" not in str(reason):
            raise
        refuse("refimpl plan activations", "a block does not fit into memory: lower --width, --context or --batch")
    show_block(blocks[0], layers)
    print(f"{'plan':28}{'predicted MB':>14}{'counted MB':>14}{'step time':>12}")
    for name, plan in chosen.items():
        predicted, step = plans.peak(plan, blocks), plans.slowdown(plan, blocks)
        counted = f"{count(plan, modules, x) / 1e6:.3f}" if check else ""
        print(f"{name:28}{predicted / 1e6:14.3f}{counted:>14}{step:11.2f}x")
    print(f"\nthe best: {words(plan)}")
    print("numbers are blocks whose activations are kept; again(...) runs once more in backward, by the plan inside")


def show_block(block: "Block", layers: int) -> None:
    """What was measured."""
    print(
        f"{layers} blocks like one measured here: input {block.input / 1e6:.3f} MB, kept beside it "
        f"{block.saved / 1e6:.3f} MB, forward {block.forward * 1e3:.1f} ms, backward {block.backward * 1e3:.1f} ms\n"
    )
