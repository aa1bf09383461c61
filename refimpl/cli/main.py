"""The `refimpl` command: what it accepts, and how it refuses.

Bad input is one line on stderr and exit status 2. Commands import what they need when they run, so that `--help` and
`--version` do not wait for torch.
"""

import sys
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, NoReturn, cast

import typer

from refimpl import __version__
from refimpl.cli.refuse import finding_room, keeping_progress, refuse, refusing

app = typer.Typer(
    name="refimpl",
    help="ZeRO from Scratch: train, measure and compare the strategies of DeepSpeed on real processes.",
    invoke_without_command=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
# An unknown option, a missing value, a word that is no number: the parser's own complaint. Its class has no public name
# in typer, only its subclass has.
UsageError = cast(type[typer.BadParameter], typer.BadParameter.__mro__[1])
# All words behind these commands are another parser's.
PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def show_version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


@app.callback()
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", callback=show_version, is_eager=True, help="Show it.")] = False,
) -> None:
    """Without a command: the help."""
    if context.invoked_subcommand is None:
        print(context.get_help())


@app.command()
def demo(
    typed: typer.Context,
    ranks: Annotated[int | None, typer.Option(help="Processes. Default: 2, or those that torchrun started.")] = None,
    strategy: Annotated[
        list[str] | None, typer.Option(help="ddp, zero1, zero2 or zero3; repeat for several. Default: all.")
    ] = None,
    steps: Annotated[int, typer.Option(help="Optimizer steps of each run.")] = 40,
    text: Annotated[Path | None, typer.Option(help="Learn this UTF-8 file instead of the built-in text.")] = None,
    layers: Annotated[int, typer.Option(help="Transformer blocks.")] = 4,
    width: Annotated[int, typer.Option(help="Width of the model, a multiple of 64.")] = 256,
    context: Annotated[int, typer.Option(help="Bytes that the model sees at once.")] = 128,
    seed: Annotated[int, typer.Option(help="Seed of the initial weights and of the batches.")] = 0,
    device: Annotated[str, typer.Option(help="auto (a GPU a rank if there are enough), cpu or cuda.")] = "auto",
    out: Annotated[Path, typer.Option(help="Folder of the report.")] = Path("out/demo"),
    infinity: Annotated[bool, typer.Option("--infinity", help="Train what does not fit, from a disk.")] = False,
    mesh: Annotated[
        str | None, typer.Option(help="dp=2,pp=2,tp=2 (and cp): one model over all axes, beside one process.")
    ] = None,
    folder: Annotated[Path, typer.Option(help="With --infinity: a folder on that disk.")] = Path("out/disk"),
    yours: Annotated[
        bool, typer.Option("--yours", help="Train by the classes that you wrote in chapters 02, 04, 05 and 06.")
    ] = False,
) -> None:
    """Train one small GPT by every strategy: same weights, different bytes. Writes a report, a picture and a page."""
    from refimpl.cli import demo, options
    from refimpl.launch import RankError

    given = [name for name in typed.params if str(typed.get_parameter_source(name)).endswith("COMMANDLINE")]
    if "folder" in given and not infinity:
        refuse("refimpl demo", f"--folder {folder}: only --infinity uses a disk; add it, or leave --folder out")
    if yours and (others := {"infinity", "mesh", "device"}.intersection(given)):
        refuse("refimpl demo", f"--{min(others)}: --yours trains by your own classes, on the CPU; leave it out")
    if infinity:
        from refimpl.cli import infinity as infinities

        if sys.platform != "linux":
            refuse(
                "refimpl demo", f"--infinity needs Linux, whose limit on a process's memory holds, not {sys.platform}"
            )
        with refusing("refimpl demo", ValueError, RuntimeError):
            asked = infinities.asked(ranks, folder, out, given)
            status = infinities.run(asked[0], 3, *asked[1:])
        raise typer.Exit(status)
    if mesh is not None:
        from refimpl.cli import mesh as meshes

        if others := {"strategy", "device"}.intersection(given):
            refuse("refimpl demo", f"--{min(others)}: --mesh trains by ZeRO-1, on the CPU; leave it out")
        with refusing("refimpl demo", ValueError):
            shape, task, mesh_out = meshes.asked(mesh, ranks, steps, text, layers, width, context, seed, out)
        raise typer.Exit(meshes.run(shape, task, mesh_out))
    if yours and "out" not in given:
        out = Path("out/yours")
    with refusing("refimpl demo", ValueError):
        plan = options.plan(ranks, strategy, steps, text, layers, width, context, seed, device, out)
        if yours:
            from refimpl.cli import yours as answers

            plan = answers.asked(plan)
    with refusing("refimpl demo", RankError, status=1):
        raise typer.Exit(demo.run(plan))


@app.command()
def doctor(
    topology: Annotated[
        bool, typer.Option("--topology", help="Measure latency and bandwidth between every two ranks instead.")
    ] = False,
    ranks: Annotated[
        int | None, typer.Option(help="With --topology: processes. Default: 4, or those that torchrun started.")
    ] = None,
    picture: Annotated[Path | None, typer.Option(help="With --topology: draw the heat maps into this file.")] = None,
) -> None:
    """What this machine can run, and what to do about what is missing. --topology: which ranks are near."""
    from refimpl.cli.doctor import examine, show

    if not topology:
        if ranks is not None or picture is not None:
            refuse("refimpl doctor", "--ranks and --picture belong to --topology")
        show(examine())
        return
    from refimpl.cli import topology as measured

    with refusing("refimpl doctor", ValueError):
        measured.run(ranks, picture)


def pass_on(other: typer.Typer, context: typer.Context) -> NoReturn:
    """Another app's words, and its exit status: it returns that of Ctrl-C, 130, as if it were a result."""
    raise typer.Exit(other(context.args, prog_name=context.command_path, standalone_mode=False) or 0)


@app.command(context_settings=PASSED_ON)
def bench(context: typer.Context) -> None:
    """Measure side by side with peers: `refimpl bench zero`, `parallel`, `comm`, `checkpoint`; `table`: a report."""
    from refimpl.bench.cli import app as bench_app
    from refimpl.launch import RankError

    with refusing("refimpl bench", RankError, status=1):
        pass_on(bench_app, context)


@app.command(context_settings=PASSED_ON)
def checkpoint(context: typer.Context) -> None:
    """Checkpoints without ranks: `refimpl checkpoint show`, `verify`, `export`, `prune`, `import`."""
    from refimpl.cli.checkpoint import app as checkpoint_app

    pass_on(checkpoint_app, context)


@app.command(context_settings=PASSED_ON)
def plan(context: typer.Context) -> None:
    """Decide before a run: `refimpl plan --params 1T --gpus 3072` says which layouts fit."""
    from refimpl.cli.plan import app as plan_app

    pass_on(plan_app, context)


@app.command(context_settings=PASSED_ON)
def deepspeed(context: typer.Context) -> None:
    """DeepSpeed's launcher: `refimpl deepspeed --num_gpus 2 train.py --its arguments` runs such a script unchanged."""
    from refimpl.ranks import launcher

    if (asked := launcher.parser().parse_args(context.args)).autotuning:
        from refimpl.cli import autotune

        with refusing("refimpl deepspeed", ValueError):
            autotune.run(asked, context.args)
    launcher.main(context.args)


@app.command()
def elastic(
    config: Annotated[Path, typer.Option("--config", "-c", help="DeepSpeed JSON with a section `elasticity`.")],
    world_size: Annotated[int, typer.Option("--world-size", "-w", help="Data-parallel ranks. Default: any.")] = 0,
) -> None:
    """DeepSpeed's ds_elastic: the batch that a JSON's `elasticity` chooses, and the numbers of ranks that share it."""
    from refimpl.cli import elastic

    with refusing("refimpl elastic", ValueError):
        elastic.run(config, world_size)


@app.command()
def quiz(
    topic: Annotated[str | None, typer.Option(help="One topic, such as zero or communication. Default: all.")] = None,
    level: Annotated[str | None, typer.Option(help="junior, mid, senior or staff. Default: all.")] = None,
    form: Annotated[str | None, typer.Option(help="open, choice, numeric, bug, order or code. Default: all.")] = None,
    n: Annotated[int, typer.Option("--n", help="Questions to ask.")] = 10,
    seed: Annotated[int | None, typer.Option(help="The same questions again. Default: by chance.")] = None,
) -> None:
    """Interview questions, the due ones first; what you answered is remembered."""
    from refimpl.cli import quiz

    with refusing("refimpl quiz", ValueError):
        cards = quiz.select(topic, level, form, n)
    with keeping_progress("refimpl quiz"):
        quiz.run(cards, n, seed)


@app.command()
def review(
    chapter: Annotated[str | None, typer.Argument(help="02_ddp, 02, or 2. Default: all.")] = None,
    n: Annotated[int, typer.Option("--n", min=1, help="Answers to show.")] = 5,
    seed: Annotated[int | None, typer.Option(help="The same answers again. Default: by chance.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Also of tasks that you have not passed.")] = False,
) -> None:
    """Wrong answers to tasks that you have passed: find the fault by reading, then see the grader find it."""
    from refimpl.cli import review

    with refusing("refimpl review", ValueError, FileNotFoundError):
        mutants = review.select(chapter, everything)
    with keeping_progress("refimpl review"):
        review.run(mutants, n, seed)


@app.command()
def hint(
    chapter: Annotated[str, typer.Argument(help="02_ddp, 02, or 2.")],
    task: Annotated[
        str | None, typer.Argument(help="The function or class; without it, those of the chapter.", metavar="EXERCISE")
    ] = None,
    give_up: Annotated[bool, typer.Option("--give-up", help="Show the solution.")] = False,
) -> None:
    """One hint more each time; the solution once you have passed. Without an exercise: those of the chapter."""
    from refimpl.cli import hint

    with refusing("refimpl hint", ValueError, FileNotFoundError):
        hint.run(chapter, task, give_up)


@app.command()
def progress() -> None:
    """How far you are in the exercises."""
    from refimpl.cli import progress

    with refusing("refimpl progress", FileNotFoundError):
        progress.run()


@app.command(context_settings=PASSED_ON)
def exercise(context: typer.Context) -> None:
    """Your exercises: `refimpl exercise watch 02_ddp` grades what you save, `reset 02_ddp` begins a chapter anew."""
    from refimpl.cli.exercise import app as exercise_app

    pass_on(exercise_app, context)


def main() -> None:
    """Entry point of the console script."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that knows no check mark gets the rest
    try:
        with finding_room("refimpl"):
            sys.exit(app(prog_name="refimpl", standalone_mode=False))
    except UsageError as complaint:
        if text := " ".join(complaint.format_message().split()):
            refuse(complaint.ctx.command_path if complaint.ctx else "refimpl", text)
        sys.exit(2)  # without a text the command's help has been shown
    except typer.Abort:
        sys.exit(130)
