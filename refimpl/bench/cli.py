"""`refimpl bench zero`, `parallel`, `moe`, `sparse`, `kernels`, `comm`, `hierarchy`, `overlap` and more."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from refimpl.bench import options as opt
from refimpl.bench.publish import publish, write_rows
from refimpl.bench.race import Turns
from refimpl.bench.written import write_json, writing

app = typer.Typer(
    help="Measure side by side with peers.", no_args_is_help=True, pretty_exceptions_enable=False, add_completion=False
)

MIXTURES = ["256,64,128,8,2", "1024,128,256,8,1", "1024,256,512,16,2", "2048,128,256,32,4"]
PATTERNS = ["local", "bigbird", "fixed"]
BUCKETS: list[Any] = ["20K", "100K", "300K", "1M", "10M"]  # elements, as they are typed


@app.command(cls=opt.Lists)
def zero(
    ranks: opt.Ranks = [2, 4],
    params: opt.ModelSizes = ["10M"],  # type: ignore[list-item]
    stages: opt.Stages = [0, 1, 2, 3],
    dtypes: Annotated[list[str], typer.Option("--dtype", parser=opt.precision, help="fp32, bf16 or both.")] = ["fp32"],
    batch: opt.Batch = 1,
    context: opt.Context = 64,
    turns: opt.Turns = 4,
    steps: opt.Steps = 4,
    rounds: opt.Rounds = 1,
    file: opt.Json = None,
) -> None:
    """Step time of DDP and ZeRO-1, 2, 3 beside torch DDP, ZeroRedundancyOptimizer, FSDP2, DeepSpeed, compute alone."""
    from refimpl.bench.zero import HEAT, Workload, measure

    workloads = [Workload(p, batch, context, Turns(turns, steps), dtype) for p in params for dtype in dtypes]
    publish("Median step of the slowest rank", HEAT, measure(ranks, workloads, stages, rounds), file)


@app.command(cls=opt.Lists)
def parallel(
    ranks: opt.Ranks = [2, 4],
    axes: Annotated[list[str], typer.Option("--axis", parser=opt.axis, help="tensor, pipeline, context.")] = opt.AXES,
    kinds: Annotated[list[str] | None, typer.Option("--kind", help="Only these: sequence, 1f1b, zb-h1, ...")] = None,
    width: Annotated[int, typer.Option(min=4, help="Of the model.")] = 256,
    layers: Annotated[int, typer.Option(min=1, help="A multiple of the stages: 2 a rank and more.")] = 8,
    batch: Annotated[int, typer.Option(min=1, help="Sequences a (micro-)batch.")] = 4,
    context: opt.Context = 64,
    micro_batches: Annotated[int, typer.Option(min=1, help="Of a pipeline.")] = 8,
    sequence: Annotated[int, typer.Option(min=1, help="Tokens of the one sequence of the context axis.")] = 1024,
    turns: opt.Turns = 6,
    steps: opt.Steps = 2,
    rounds: opt.Rounds = 1,
    file: opt.Json = None,
) -> None:
    """Step time of tensor, sequence, pipeline and context parallelism beside torch's own; a pipeline by its formula."""
    from refimpl.bench.parallel import HEAT, KINDS, Workload, check, measure

    known = {kind for axis in axes for kind in KINDS[axis]}
    if unknown := sorted(set(kinds or []) - known):
        raise typer.BadParameter(f"--kind {unknown[0]!r}: choose from {', '.join(sorted(known))}")
    workload = Workload(width, layers, batch, context, micro_batches, sequence, Turns(turns, steps))
    with opt.in_one_line(ValueError):
        check(ranks, axes, workload, kinds or ())
    heats = measure(ranks, axes, workload, kinds or (), rounds)
    publish("Step of the slowest rank, beside torch's", HEAT, heats, file)


@app.command(cls=opt.Lists)
def moe(
    ranks: opt.ExpertRanks = [1, 2],
    sizes: Annotated[
        list[str], typer.Option("--size", parser=opt.mixture, help="TOKENS,WIDTH,HIDDEN,EXPERTS,K.")
    ] = MIXTURES,
    turns: opt.Turns = 4,
    steps: opt.Steps = 4,
    rounds: opt.Rounds = 1,
    file: opt.Json = None,
) -> None:
    """A mixture of experts, forward and backward, beside GShard's dense dispatch and a loop over experts."""
    from refimpl.bench.moe import HEAT, Size, measure

    chosen = [Size(*map(int, size.split(","))) for size in sizes]
    for size in chosen:
        if odd := [count for count in ranks if size.experts % count]:
            raise typer.BadParameter(f"--ranks {odd[0]}: {size.experts} experts cannot be dealt out to them equally")
    publish("Median step of the slowest rank", HEAT, measure(ranks, chosen, Turns(turns, steps), rounds), file)


@app.command(cls=opt.Lists)
def sparse(
    tokens: Annotated[list[int], typer.Option(parser=opt.count, help="Tokens of the sequence.")] = ["4096"],  # type: ignore[list-item]
    patterns: Annotated[list[str], typer.Option("--pattern", help="dense, local, fixed, bigbird, ...")] = PATTERNS,
    blocks: Annotated[list[int], typer.Option("--block", min=1, help="Tokens in a block's side.")] = [64],
    heads: Annotated[int, typer.Option(min=1, help="Heads.")] = 4,
    width: Annotated[int, typer.Option(min=1, help="Of a head.")] = 64,
    published: Annotated[bool, typer.Option("--published", help="As wide as in the patterns' papers.")] = False,
    turns: opt.Turns = 4,
    file: opt.Json = None,
) -> None:
    """Block-sparse attention beside dense attention and torch's FlexAttention, as a share of density times dense."""
    from refimpl.bench.sparse import HEAT, measure

    with opt.in_one_line(ValueError, NotImplementedError):
        heats = measure(tokens, patterns, blocks, heads, width, turns, published)
        publish("Attention over a pattern", HEAT, heats, file)


@app.command(cls=opt.Lists)
def comm(
    ranks: opt.Ranks = [2, 4],
    sizes: opt.BufferSizes = ["1M", "10M", "100M"],  # type: ignore[list-item]
    nodes: Annotated[int, typer.Option(min=1, help="Play so many nodes; 2 without --link: network namespaces.")] = 1,
    link: Annotated[str | None, typer.Option(help='Between nodes (2 by default): "1Gbit/s 100us".')] = None,
    turns: opt.Turns = 4,
    steps: opt.Steps = 4,
    rounds: opt.Rounds = 1,
    file: opt.Json = None,
) -> None:
    """Single collectives beside torch.distributed's own; over a slow link, beside their formulas."""
    from refimpl.bench import comm, links
    from refimpl.comm.link import Link

    if link is None and nodes == 1:
        heats = comm.measure(ranks, sizes, turns=Turns(turns, steps), rounds=rounds)
        publish("Median call of the slowest rank", comm.HEAT, heats, file)
        return
    with opt.in_one_line(ValueError, RuntimeError):
        asked = Link.parse(link, "--link") if link is not None else None
        found = links.heats(ranks, sizes, max(nodes, 2), asked, turns=Turns(turns, steps))
        publish("Over a link", links.HEAT, found, file)


@app.command(cls=opt.Lists)
def hierarchy(
    nodes: Annotated[list[int], typer.Option(min=2, help="Numbers of nodes.")] = [2],
    each: Annotated[int, typer.Option("--ranks-per-node", min=1, help="Ranks of a node.")] = 2,
    sizes: opt.BufferSizes = ["100K", "4M"],  # type: ignore[list-item]
    link: Annotated[str, typer.Option(help="What joins the nodes.")] = "100Mbit/s 1ms",
    turns: opt.Turns = 5,
    steps: opt.Steps = 4,
    file: opt.Json = None,
) -> None:
    """All-reduces over a slow link: ring, halving, tree and exchange, flat and in two levels, beside their formulas."""
    from refimpl.bench.hierarchy import HEAT, measure

    with opt.in_one_line(ValueError):
        publish("Least call of the slowest rank", HEAT, measure(nodes, each, sizes, link, Turns(turns, steps)), file)


@app.command(cls=opt.Lists)
def overlap(
    ranks: opt.Ranks = [2],
    sizes: Annotated[list[int], typer.Option("--bucket", parser=opt.count, help="Elements in a bucket.")] = BUCKETS,
    link: Annotated[str, typer.Option(help="What joins the ranks.")] = "500Mbit/s 2ms",
    width: Annotated[int, typer.Option(min=1, help="Of the model.")] = 128,
    layers: opt.Layers = 6,
    context: Annotated[int, typer.Option(min=1, help="Tokens of the one sequence of a rank.")] = 256,
    turns: opt.Turns = 5,
    file: opt.Json = None,
    picture: Annotated[Path | None, typer.Option(help="Draw sizes and timelines here, a PNG.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Write a step of the best size here, as a trace.")] = None,
) -> None:
    """What of a step's communication is exposed, by the size of a bucket, over a slow link: measured and predicted."""
    from refimpl.bench import overlap as bench
    from refimpl.bench.overlap_picture import draw
    from refimpl.measure.timeline import chrome_trace

    picture = opt.drawable(picture, "--picture") if picture else None
    trace = opt.writable(trace, "--trace") if trace else None
    workload = bench.Workload(width, layers, context, Turns(turns, 1))
    done: list[bench.Row] = []
    for count_ in ranks:
        with opt.in_one_line(ValueError):
            laps = bench.race(count_, sizes, workload, link)
        heat = bench.rows(laps, link)
        publish("DDP over a slow link", bench.HEAT, [heat], None)
        done += heat
        best = bench.best(heat)
        print(f"best bucket size: measured {best['measured']:,}, predicted {best['predicted']:,}, whose step takes")
        print(f"{best['costs']:.2f} times the best")
        if picture:
            with writing(picture):
                draw(heat, laps, picture)
        if trace:
            last = {rank: lap.steps[best["measured"]][-1] for rank, lap in enumerate(laps)}
            write_json(trace, chrome_trace(last), indent=None)
    if file:
        write_rows(file, done)


@app.command(cls=opt.Lists)
def compression(
    ranks: Annotated[int, typer.Option(min=2, help="Number of ranks, each a node.")] = 2,
    links: Annotated[list[str], typer.Option("--link", help="Links to train over.")] = opt.LINKS,
    methods: Annotated[list[str] | None, typer.Option("--method", help="Only these, beside DDP.")] = None,
    width: Annotated[int, typer.Option(min=4, help="Of the model: a multiple of 4.")] = 128,
    layers: opt.Layers = 4,
    context: opt.Context = 64,
    batch: opt.Batch = 4,
    train: Annotated[int, typer.Option("--train", min=1, help="Steps that each method learns.")] = 200,
    turns: opt.Turns = 5,
    plot: Annotated[Path | None, typer.Option(help="Draw the losses here, as PNG.")] = None,
    hooks: Annotated[bool, typer.Option("--hooks", help="Instead: beside torch's hooks, without a link.")] = False,
    file: opt.Json = None,
) -> None:
    """When does it pay to send less: steps and losses after equal time, each method beside DDP, on slow links."""
    from refimpl.bench import compress_peers
    from refimpl.bench.compression import HEAT, Measured, Task, draw, measure
    from refimpl.bench.methods import FIRST, METHODS
    from refimpl.comm.link import Link

    plot = opt.drawable(plot, "--plot") if plot else None
    names = [FIRST, *(name for name in methods or [method.name for method in METHODS] if name != FIRST)]
    task = Task(opt.gpt(context=context, width=width, layers=layers), train, batch, turns)
    if hooks:
        if methods or links != opt.LINKS:
            raise typer.BadParameter("--hooks has methods of its own, and no link: leave --method and --link out")
        rows = compress_peers.measure(ranks, task.gpt, batch, Turns(turns))
        return publish("Beside torch's hooks", compress_peers.HEAT, [rows], file)
    done: list[Measured] = []
    with opt.in_one_line(ValueError):
        for link in links:
            Link.parse(link, "--link")
        found = measure(ranks, task, links, names)
        publish("After equal time", HEAT, (done.append(one) or one.rows() for one in found), file)  # type: ignore[func-returns-value]
    if plot:
        with writing(plot):
            draw(done, plot)


@app.command(cls=opt.Lists)
def checkpoint(
    ranks: opt.AnyRanks = [2],
    params: opt.ModelSizes = ["25M"],  # type: ignore[list-item]
    stages: opt.Stages = [2],
    turns: opt.Turns = 6,
    folder: opt.Folder = None,
    file: opt.Json = None,
) -> None:
    """Time that training stands still for a save: synchronous, asynchronous, the copy alone, torch.save."""
    from refimpl.bench.checkpoint import HEAT, measure

    heats = measure(ranks, params, stages, Turns(turns, 1), opt.on_disk(folder) if folder else None)
    publish("Time of a save, slowest rank", HEAT, heats, file)


@app.command(cls=opt.Lists)
def overhead(
    ranks: opt.AnyRanks = [8],
    stages: opt.Stages = [0, 1, 2, 3],
    units: Annotated[int, typer.Option(min=1, help="Modules of 10 parameters in the model.")] = 100,
    turns: opt.Turns = 5,
    steps: opt.Steps = 4,
    top: Annotated[int, typer.Option(min=1, help="Functions to show.")] = 25,
    file: opt.Json = None,
) -> None:
    """CPU time a step in our own Python, by function, on a model of 100 tiny units and 1,000 parameters.

    ZeRO-3 with each unit by itself, with neighbours gathered as one, and with small parameters left whole.
    """
    from refimpl.bench.overhead import HEAT, measure

    publish("CPU time of a step, mean over ranks", HEAT, measure(ranks, stages, units, turns, steps, top), file)


@app.command(cls=opt.Bench)
def disk(
    folder: Annotated[Path, typer.Argument(help="On the disk to measure; a file without a name is made there.")],
    size: Annotated[int, typer.Option(parser=opt.count, help="Bytes to move.")] = "500M",  # type: ignore[assignment]
    turns: Annotated[int, typer.Option(min=1, help="Times each way's turn comes.")] = 3,
    file: opt.Json = None,
) -> None:
    """A disk's own MB/s by size and number of requests, and what offloading gets out of it."""
    from refimpl.bench.disk import HEAT, measure
    from refimpl.offload.blocks import OffloadError

    with opt.in_one_line(OffloadError):
        publish("Best turn", HEAT, measure(folder, size, turns), file)


@app.command(cls=opt.Lists)
def offload(
    ranks: opt.Ranks = [2],
    params: opt.ModelSizes = ["10M"],  # type: ignore[list-item]
    stages: opt.Stages = [2, 3],
    batch: opt.Batch = 1,
    context: opt.Context = 64,
    turns: opt.Turns = 3,
    steps: opt.Steps = 3,
    folder: opt.Folder = None,
    file: opt.Json = None,
) -> None:
    """A step with optimizer state, gradients and parameters in host memory or on a disk, beside a plain one."""
    from refimpl.bench.offload import HEAT, measure
    from refimpl.bench.zero import Workload

    workloads = [Workload(p, batch, context, Turns(turns, steps)) for p in params]
    heats = measure(ranks, workloads, stages, opt.on_disk(folder) if folder else None)
    publish("Median step of the slowest rank", HEAT, heats, file)


@app.command(cls=opt.Bench)
def kernels(
    only: Annotated[str, typer.Option(help="Cases whose name holds this word: softmax, bf16, ...")] = "",
    seconds: Annotated[float, typer.Option(min=1, help="After so long only ours and eager torch.")] = 420,
    file: opt.Json = None,
) -> None:
    """Kernels beside eager torch, torch.compile and Liger-Kernel, as shares of this machine's copy and product."""
    from refimpl.bench.kernels import HEAT, measure

    try:
        publish("Kernels", HEAT, measure(only, seconds), file)
    except ValueError as error:
        raise typer.BadParameter(f"--only: {error}") from None


@app.command("one-bit", cls=opt.Lists)
def one_bit(
    names: Annotated[list[str] | None, typer.Option("--optimizer", help="Only these; default: all.")] = None,
    ranks: Annotated[int, typer.Option(min=1, help="Ranks.")] = 2,
    steps: Annotated[int, typer.Option(min=1, help="Steps; the first fifth is the warm-up.")] = 400,
    width: Annotated[int, typer.Option(min=4, help="Of the model, a multiple of 4.")] = 96,
    layers: opt.Layers = 2,
    context: opt.Context = 64,
    file: opt.Json = None,
) -> None:
    """The 1-bit optimizers beside Adam and LAMB on the demo's text: loss, and bytes a step once they compress."""
    from refimpl.bench.one_bit import BESIDE, measure, table

    if unknown := sorted(set(names or []) - BESIDE.keys()):
        raise typer.BadParameter(f"--optimizer {unknown[0]!r}: choose from {', '.join(BESIDE)}")
    model = opt.gpt(context=context, width=width, layers=layers)
    with opt.in_one_line(ValueError):
        rows = measure(names or list(BESIDE), model, ranks, steps)
    print(table(rows))
    if file:
        write_rows(file, rows)


@app.command()
def table(
    report: Annotated[Path, typer.Argument(help="What `refimpl bench zero --json`, or compression, wrote.")],
) -> None:
    """The table that README.md or docs/benchmarks.md shows of a report, in Markdown."""
    from refimpl.bench.table import markdown

    try:
        print(markdown(json.loads(report.read_text())["rows"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise typer.BadParameter(
            f"{report}: not a report of `refimpl bench zero --json` or compression: {error!r}"
        ) from None
