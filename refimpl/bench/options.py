"""What the benches' options have in common: lists of values, sizes such as 25M, a file that can be written."""

import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

if TYPE_CHECKING:
    from refimpl.model.gpt import GPTConfig

SUFFIXES = {"K": 10**3, "M": 10**6, "B": 10**9}
MOST = 10**15  # of anything that can be counted here
AXES = ["tensor", "pipeline", "context"]
LINKS = ["0.1Gbit/s 100us", "1Gbit/s 100us", "10Gbit/s 100us"]


class Bench(TyperCommand):
    """A `--json` that cannot be written is refused before anything is measured, what no memory holds on a rank too."""

    def invoke(self, ctx: Any) -> Any:
        if ctx.params["file"]:
            writable(Path(ctx.params["file"]))  # up to typer 0.28 it is still text
        try:
            return super().invoke(ctx)
        except RuntimeError as error:
            if not (asked := re.search(r"tried to allocate (\d+) bytes", str(error))):
                raise
            size = f"{int(asked[1]) / 1e9:,.1f} GB"
            raise typer.BadParameter(f"{size} at once are more than this machine's memory: ask for less") from None


class Lists(Bench):
    """Reads `--ranks 2 4` as `--ranks 2 --ranks 4`: a bare word that follows a value belongs to the same option."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, spread(args))


@contextmanager
def in_one_line(*errors: type[Exception]) -> Iterator[None]:
    """Each of these errors that the block raises is a word about the options."""
    try:
        yield
    except errors as error:
        raise typer.BadParameter(str(error)) from None


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
    if not 1 <= value <= MOST:
        raise typer.BadParameter(f"{text!r} must be at least 1, and at most {MOST:.0e}")
    return value


def precision(text: str) -> str:
    """fp32 or bf16."""
    if text not in ("fp32", "bf16"):
        raise typer.BadParameter(f"{text!r}: choose from fp32, bf16")
    return text


def axis(text: str) -> str:
    """tensor, pipeline or context."""
    if text not in AXES:
        raise typer.BadParameter(f"{text!r}: choose from {', '.join(AXES)}")
    return text


def mixture(text: str) -> str:
    """TOKENS,WIDTH,HIDDEN,EXPERTS,K."""
    numbers = [int(number) for number in text.split(",") if number.isdigit()]
    if len(numbers) != 5 or min(numbers) < 1 or numbers[4] > numbers[3]:
        raise typer.BadParameter(f"{text!r} is not TOKENS,WIDTH,HIDDEN,EXPERTS,K, such as 1024,256,512,16,2")
    return ",".join(map(str, numbers))


def gpt(context: int, width: int, layers: int) -> "GPTConfig":
    """A model over bytes, of 4 heads, or one line about a width that these cannot share."""
    from refimpl.model.gpt import GPTConfig

    try:
        return GPTConfig(vocab=256, context=context, width=width, layers=layers, heads=4)
    except ValueError as error:
        raise typer.BadParameter(f"--width: {error}") from None


def writable(file: Path, option: str = "--json") -> Path:
    """A file to be written at the end, opened before anything is measured, and left as it was."""
    try:
        open_once(file)
    except OSError as error:
        raise typer.BadParameter(f"{option} {file}: cannot write there: {error.strerror}") from None
    return file


def open_once(file: Path) -> None:
    """OSError if it cannot be written; it is left as it was."""
    new = not file.exists()
    file.open("a").close()
    if new:
        file.unlink()


def drawable(file: Path, option: str) -> Path:
    """`writable`, and named as what it will be."""
    if file.suffix.lower() != ".png":
        raise typer.BadParameter(f"{option} {file}: it is drawn as PNG: name it {file.with_suffix('.png')}")
    return writable(file, option)


def on_disk(folder: Path) -> Path:
    """A folder that is there and can be written, on the disk to measure."""
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise typer.BadParameter(
            f"--folder {folder}: cannot write there: {error.strerror}; name a folder on the disk to measure"
        ) from None
    return folder


Ranks = Annotated[list[int], typer.Option(min=2, max=512, help="Numbers of ranks.")]
AnyRanks = Annotated[list[int], typer.Option(min=1, max=512, help="Numbers of ranks.")]
ExpertRanks = Annotated[list[int], typer.Option(min=1, max=512, help="Numbers of ranks, which share the experts.")]
Mixtures = Annotated[list[str], typer.Option("--size", parser=mixture, help="TOKENS,WIDTH,HIDDEN,EXPERTS,K.")]
ModelSizes = Annotated[list[int], typer.Option(parser=count, help="Model sizes.")]
BufferSizes = Annotated[list[int], typer.Option(parser=count, help="Bytes in the buffer.")]
Layers = Annotated[int, typer.Option(min=1, help="Of the model.")]
Batch = Annotated[int, typer.Option(min=1, help="Sequences a rank and step.")]
Context = Annotated[int, typer.Option(min=1, help="Tokens a sequence.")]
Stages = Annotated[list[int], typer.Option(min=0, max=3, help="ZeRO stages; 0 is DDP.")]
Turns = Annotated[int, typer.Option("--turns", min=1, help="Times each contestant's turn comes.")]
Steps = Annotated[int, typer.Option("--steps", min=1, help="Steps (or calls) in a turn.")]
Rounds = Annotated[int, typer.Option("--rounds", min=1, help="Fresh worlds, of each kind of memory pages.")]
Folder = Annotated[Path | None, typer.Option(help="On the disk to measure. Default: a temporary one.")]
Json = Annotated[Path | None, typer.Option("--json", help="Write the report here.")]
