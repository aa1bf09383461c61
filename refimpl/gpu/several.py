"""What several ranks exchange, and what must arrive: every way of a group, and the parallel ways built on it.

A GPU for each rank if there are two, by NCCL; else two share the GPU by gloo. Numbers are small whole ones, which every
format holds; a rank's are its own.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from refimpl.comm.collectives import Op
from refimpl.comm.group import Group
from refimpl.comm.mesh import Mesh
from refimpl.parallel.context.layout import Layout
from refimpl.parallel.context.ring import ring_attention
from refimpl.parallel.context.ulysses import ulysses
from refimpl.parallel.pipeline.runner import Pipeline
from refimpl.parallel.pipeline.schedules.one_f_one_b import one_f_one_b

OPS: tuple[Op, ...] = ("sum", "mean", "max")
ADDED = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64)
MOVED = (torch.float32, torch.bfloat16, torch.bool, torch.int16, torch.uint8, torch.float8_e4m3fn)
NEAR = 1e-2  # relative: a mean may be a sum of parts that were divided first; of attention and gradients


def found() -> dict[str, str]:
    """Of each way what is wrong on this rank, "" if nothing is."""
    by_library, in_order = Group.world(), Group.world(deterministic=True)
    said = {
        f"reductions, by the library ({by_library.backend})": tried(reductions, by_library),
        "reductions, in rank order": tried(reductions, in_order),
        "all-gathers and broadcasts": tried(gathers, by_library),
        "all-gathers and broadcasts, of broadcasts alone": tried(gathers, in_order),
        "all-to-alls, even and uneven": tried(exchanges, by_library),
        "messages round a ring and along a chain": tried(messages, by_library),
        "groups of some ranks, objects, barriers": tried(lines, by_library),
        "attention over all ranks' tokens": tried(attention, by_library),
        "a pipeline's gradients": tried(pipeline, by_library),
    }
    by_library.settle()
    return said


def tried(check: Callable[[Group], list[str]], group: Group) -> str:
    """What is wrong, in words."""
    try:
        return ", ".join(check(group)[:5])
    except Exception as error:  # the next way is to be tried too
        return f"{type(error).__name__}: {error}"


def near(found: Tensor, expected: Tensor | float) -> bool:
    wide = torch.as_tensor(expected, dtype=torch.float64, device=found.device)
    return bool(((found.double() - wide).abs() <= NEAR * wide.abs().clamp(min=1)).all())


def reductions(group: Group) -> list[str]:
    n, rank, wrong = group.size, group.rank, list[str]()
    whole = {"sum": n * (n + 1) / 2, "mean": (n + 1) / 2, "max": float(n)}
    for dtype in ADDED:
        for op in OPS if dtype.is_floating_point else ("sum", "max"):
            for size in (0, 1, 1001):
                x = torch.full((size,), rank + 1, dtype=dtype, device=group.device)
                group.all_reduce(x, op, async_op=True).wait()
                wrong += [] if near(x, whole[op]) else [f"all_reduce {op} of {size} {dtype}"]
            x = torch.arange(1, n + 1, device=group.device).repeat_interleave(33).mul(rank + 1).to(dtype)
            for wide in {dtype, torch.float32} if dtype.is_floating_point else {dtype}:
                out = torch.empty(33, dtype=wide, device=group.device)
                group.reduce_scatter(out, x.clone(), op, async_op=True).wait()
                right = near(out, (rank + 1) * whole[op])
                wrong += [] if right else [f"reduce_scatter {op} of {dtype} to {wide}"]
    return wrong


def gathers(group: Group) -> list[str]:
    n, wrong = group.size, list[str]()
    for dtype in MOVED:
        mine = torch.full((3,), group.rank % 2, device=group.device).to(dtype)
        expected = torch.arange(n).repeat_interleave(3) % 2
        out = torch.empty(3 * n, dtype=dtype, device=group.device)
        group.all_gather(out, mine, async_op=True).wait()
        wrong += [] if near(out.float(), expected) else [f"all_gather of {dtype}"]
        parts = [torch.empty_like(mine) for _ in range(n)]
        group.all_gather(parts, mine)
        wrong += [] if near(torch.cat([p.float() for p in parts]), expected) else [f"all_gather of {dtype} to a list"]
        for root in range(n):
            x = mine.clone()
            group.broadcast(x, root)
            wrong += [] if near(x.float(), float(root % 2)) else [f"broadcast of {dtype} from {root}"]
    return wrong


def exchanges(group: Group) -> list[str]:
    """Rank r sends (r + i) % 3 rows to rank i, so to some of them none."""
    n, rank, wrong = group.size, group.rank, list[str]()
    everyone = torch.arange(n, device=group.device)
    out = torch.empty(2 * n, dtype=torch.int64, device=group.device)
    group.all_to_all(out, (100 * rank + everyone).repeat_interleave(2))
    wrong += [] if near(out, (100 * everyone + rank).repeat_interleave(2)) else ["even"]
    for dtype in (torch.float32, torch.bfloat16):
        rows = [(rank + i) % 3 for i in range(n)]
        x = torch.cat([torch.full((count, 2), 8.0 * rank + i) for i, count in enumerate(rows)]).to(group.device, dtype)
        expected = torch.cat([torch.full((count, 2), 8.0 * i + rank) for i, count in enumerate(rows)])
        found = torch.empty_like(x)
        group.all_to_all(found, x, in_splits=rows, out_splits=rows, async_op=True).wait()
        wrong += [] if near(found, expected) else [f"uneven, of {dtype}"]
    return wrong


def messages(group: Group) -> list[str]:
    n, rank, wrong = group.size, group.rank, list[str]()
    right, left = (rank + 1) % n, (rank - 1) % n
    x = torch.full((1 << 20,), float(rank), device=group.device)
    outs = [torch.empty_like(x) for _ in range(3)]
    for work in [group.send_recv(x, right, out, left, async_op=True) for out in outs]:
        work.wait()
    wrong += [] if all(near(out, float(left)) for out in outs) else ["the ring"]
    total = torch.zeros_like(x)
    if rank > 0:
        group.recv(total, rank - 1)
    total += rank
    if rank < n - 1:
        group.send(total, rank + 1)
    wrong += [] if near(total, rank * (rank + 1) / 2) else ["the chain"]
    return wrong


def lines(group: Group) -> list[str]:
    n, wrong = group.size, list[str]()
    columns = 2 if n % 2 == 0 else 1
    mesh = Mesh({"row": n // columns, "column": columns})
    for axis in ("row", "column"):
        line = mesh.group(axis)
        x = torch.ones(7, device=group.device)
        line.all_reduce(x)
        wrong += [] if near(x, float(line.size)) else [f"the sum along a {axis}"]
        wrong += [] if line.all_gather_object(line.rank) == list(range(line.size)) else [f"objects along a {axis}"]
        line.barrier()
    return wrong


def attention(group: Group) -> list[str]:
    """Of this rank's tokens, beside the whole computed here."""
    n, wrong = group.size, list[str]()
    draw = torch.Generator().manual_seed(0)
    whole = [torch.randn(1, n, 16 * n, 16, generator=draw).to(group.device).requires_grad_() for _ in range(3)]
    expected = F.scaled_dot_product_attention(whole[0], whole[1], whole[2], is_causal=True)
    expected.square().sum().backward()  # type: ignore[no-untyped-call]
    layout = Layout(16 * n, n)
    for name in ("ring attention", "Ulysses"):
        q, k, v = mine = [layout.cut(x.detach(), group.rank, 2).contiguous().requires_grad_() for x in whole]
        out = ring_attention(q, k, v, group, layout) if name == "ring attention" else ulysses(q, k, v, group)
        out.square().sum().backward()  # type: ignore[no-untyped-call]
        wrong += [] if near(out.detach(), layout.cut(expected.detach(), group.rank, 2)) else [name]
        for x, part in zip(whole, mine, strict=True):
            assert x.grad is not None
            assert part.grad is not None
            wrong += [] if near(part.grad, layout.cut(x.grad, group.rank, 2)) else [f"{name}, a gradient"]
    return wrong


def pipeline(group: Group) -> list[str]:
    """A linear layer a rank, beside all of them here."""
    n, rank = group.size, group.rank
    torch.manual_seed(0)
    layers = [nn.Linear(8, 8) for _ in range(n)]
    inputs = [torch.randn(4, 8).to(group.device) for _ in range(2 * n)]
    chain, mine = nn.Sequential(*layers).to(group.device), nn.Linear(8, 8).to(group.device)
    mine.load_state_dict(layers[rank].state_dict())
    for x in inputs:
        (chain(x).square().mean() / len(inputs)).backward()
    run = Pipeline(one_f_one_b(n, len(inputs)), {rank: mine}, group, lambda out, _: out.square().mean())
    run.run(inputs, inputs)
    pairs = zip(mine.named_parameters(), layers[rank].parameters(), strict=True)
    return [name for (name, p), q in pairs if p.grad is None or q.grad is None or not close(p.grad, q.grad)]


def close(found: Tensor, expected: Tensor) -> bool:
    """Beside the greatest entry."""
    return bool((found - expected).abs().max() <= NEAR * expected.abs().max())
