"""Every layout that a number of GPUs allows, judged: those that fit, the fastest first, and those that do not."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product

from refimpl.plan.formulas import STRATEGIES
from refimpl.plan.judge import Machine, Verdict, judge
from refimpl.plan.mesh import Mesh
from refimpl.plan.shape import Shape

POWERS = (1, 2, 4, 8, 16)
TOKENS = 4096  # of a sequence that a rank keeps at least, where ranks share sequences: below, blocks are too small
RESERVE = 0.1  # of a GPU's memory, for what no formula counts: kernels' workspaces, NCCL's buffers, fragments


@dataclass(frozen=True)
class Found:
    """`fit`: the fastest first. `over`: those that do not fit, the least too large first.

    `uncounted`: keys of the configuration that change bytes or time, and that no formula here knows.
    """

    fit: list[Verdict]
    over: list[Verdict]
    uncounted: tuple[str, ...] = ()


def search(shape: Shape, gpus: int, batch: int, machine: Machine) -> Found:
    """ValueError if no layout divides the model, the GPUs and the batch."""
    verdicts = [judge(shape, mesh, machine) for mesh in meshes(shape, gpus, batch, machine)]
    if not verdicts:
        raise ValueError(
            f"{gpus} GPUs, {batch} sequences a step, {shape.layers} layers, {shape.heads} heads: no layout divides "
            "them all; change the batch or the number of GPUs"
        )
    return found(verdicts, machine)


def found(verdicts: Iterable[Verdict], machine: Machine) -> Found:
    """Those that leave the reserve free, and those that do not."""
    verdicts, room = list(verdicts), (1 - RESERVE) * machine.memory
    fit = sorted((v for v in verdicts if v.total <= room), key=lambda v: v.step)
    over = sorted((v for v in verdicts if v.total > room), key=lambda v: v.total)
    return Found(fit, over)


def meshes(shape: Shape, gpus: int, batch: int, machine: Machine) -> Iterator[Mesh]:
    """Those that can be, tensor parallelism no wider than a node."""
    tensor = [n for n in POWERS if n <= machine.in_node]
    context = [n for n in POWERS if n == 1 or shape.context // n >= TOKENS]
    stages, experts = range(1, shape.layers + 1), shape.experts.count if shape.experts else 1
    for tp, cp, pp in product(tensor, context, stages):
        if gpus % (tp * cp * pp):
            continue
        dp = gpus // (tp * cp * pp)
        shared = [n for n in range(1, experts + 1) if experts % n == 0 and dp * cp % n == 0]
        for ep, micro, zero, recompute in product(shared, (1, 2, 4, 8), STRATEGIES[1:], (False, True)):
            mesh = Mesh(dp, pp, tp, batch, micro, zero, recompute, cp=cp, ep=ep)
            if dp * cp == 1 and zero != "zero1":
                continue  # nothing to divide
            try:
                mesh.check(shape)
            except ValueError:
                continue
            yield mesh
