"""`refimpl checkpoint show | verify | export | prune | import`: what needs a checkpoint and no ranks."""

from pathlib import Path
from typing import Annotated

import typer

from refimpl.cli.refuse import refuse, refusing

app = typer.Typer(
    help="Checkpoints without ranks.", no_args_is_help=True, pretty_exceptions_enable=False, add_completion=False
)
Source = Annotated[Path, typer.Argument(help="A checkpoint, or a folder with a file `latest`.", metavar="FOLDER")]


@app.command()
def show(folder: Source) -> None:
    """What is there: a line a checkpoint, and of one alone what it holds."""
    from rich.console import Console
    from rich.table import Table

    from refimpl.checkpoint import manifest, prune
    from refimpl.checkpoint.errors import CheckpointError, naming
    from refimpl.checkpoint.find import of_deepspeed
    from refimpl.checkpoint.folder import Folder

    with refusing("refimpl checkpoint show", CheckpointError):
        with naming(folder):
            one = manifest.is_in(folder)
        found = [prune.found(folder)] if one else prune.in_order(folder)
        sizes = [sum(place.numel for place in Folder(f.path, f.about).places.values()) for f in found]
        latest = prune.latest_of(folder.parent if one else folder)
    if not found:
        refuse("refimpl checkpoint show", f"{folder}: no complete checkpoint{of_deepspeed(folder)}")
    table = Table()
    for column in ("tag", "step", "stage", "ranks", "dtype", "optimizer", "parameters", "MB"):
        table.add_column(column, justify="left" if column in ("tag", "dtype", "optimizer") else "right", no_wrap=True)
    for f, size in zip(found, sizes, strict=True):
        tag = f"{f.tag} (latest)" if f.tag == latest else f.tag
        words = [f.about[key] for key in ("stage", "world_size", "dtype", "optimizer")]
        table.add_row(tag, str(f.step), *map(str, words), f"{size:,}", f"{f.bytes / 1e6:,.1f}")
    Console(width=1000).print(table)  # as wide as it is: no number is cut short
    if one:
        about = found[0].about
        kinds = {"tied names": "tied", "buffers": "buffers", "names left out": "left_out"}
        counts = ", ".join(f"{len(about[key])} {words}" for words, key in kinds.items())
        print(f"schedule: {about['scheduler']}; parameter groups: {about['parameter_groups']}; {counts}")


@app.command()
def verify(folder: Source) -> None:
    """Read every file and compare it with its checksum. Status 2 if one is damaged or missing."""
    from refimpl.checkpoint.errors import CheckpointError
    from refimpl.checkpoint.find import given
    from refimpl.checkpoint.folder import Folder

    with refusing("refimpl checkpoint verify", CheckpointError), Folder(*given(folder)) as opened:
        opened.check()
    total = sum(file["bytes"] for file in opened.about["files"].values())
    print(f"{opened.path}: {len(opened.about['files'])} files, {total / 1e6:,.1f} MB, all as they were written")


@app.command()
def export(
    folder: Source,
    out: Annotated[Path, typer.Argument(help="Folder for the weights.")],
    dtype: Annotated[str, typer.Option(help="fp32, bf16, fp16, or model: as they were trained.")] = "fp32",
    max_shard_size: Annotated[str, typer.Option(help="Bytes a file, such as 5GB.")] = "5GB",
    exclude_frozen: Annotated[bool, typer.Option("--exclude-frozen", help="Trained weights alone.")] = False,
) -> None:
    """Whole weights as safetensors, with an index if they are several files; torch and Hugging Face load them."""
    import torch

    from refimpl.checkpoint import export as exports
    from refimpl.checkpoint.errors import CheckpointError
    from refimpl.checkpoint.find import given
    from refimpl.checkpoint.folder import Folder

    kinds = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "model": None}
    if dtype not in kinds:
        refuse("refimpl checkpoint export", f"--dtype {dtype}: choose from {', '.join(kinds)}")
    with refusing("refimpl checkpoint export", CheckpointError, ValueError):
        most = exports.size_of(max_shard_size)
        with Folder(*given(folder)) as opened:
            opened.check()
            files = exports.export(opened, out, kinds[dtype], most, exclude_frozen)
    for file in [*files, *out.glob("*.index.json")]:  # the index says which file has which weight
        print(f"{file}: {file.stat().st_size / 1e6:,.1f} MB")


@app.command("import")
def import_(
    folder: Annotated[Path, typer.Argument(help="What DeepSpeed wrote: a checkpoint, or a folder with `latest`.")],
    out: Annotated[Path, typer.Argument(help="Folder of checkpoints to write to.")],
) -> None:
    """Read a ZeRO checkpoint of DeepSpeed, stages 1 to 3, and write it anew. Nothing that it asks for is run."""
    from refimpl.checkpoint.errors import CheckpointError
    from refimpl.checkpoint.from_deepspeed import import_folder

    with refusing("refimpl checkpoint import", CheckpointError):
        print(f"{import_folder(folder, out)}: written; load_checkpoint({str(out)!r}) goes on from it")


@app.command()
def prune(
    folder: Annotated[Path, typer.Argument(help="A folder of checkpoints.")],
    keep: Annotated[int, typer.Option(min=1, help="How many of the last to keep.")],
    every: Annotated[int | None, typer.Option(min=1, help="Keep also those at a multiple of so many steps.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be deleted.")] = False,
) -> None:
    """Delete checkpoints: all but the last K, every n-th step, and the one that `latest` names."""
    from refimpl.checkpoint import prune as pruning
    from refimpl.checkpoint.errors import CheckpointError

    with refusing("refimpl checkpoint prune", CheckpointError):
        doomed = pruning.prune(folder, keep, every, dry_run)
    for found in doomed:
        print(f"{'would delete' if dry_run else 'deleted'} {found.path}: {found.bytes / 1e6:,.1f} MB")
    if not doomed:
        print(f"{folder}: nothing to delete")
