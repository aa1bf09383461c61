"""Every layout that a number of GPUs allows, judged: those that fit, the fastest first, and those that do not."""

from collections.abc import Iterator
from dataclasses import dataclass

from refimpl.plan.formulas import STRATEGIES
from refimpl.plan.mesh import Machine, Mesh, Verdict, judge
from refimpl.plan.shape import Shape

RESERVE = 0.1  # of a GPU's memory, for what no formula counts: kernels' workspaces, NCCL's buffers, fragments


@dataclass(frozen=True)
class Found:
    """`fit`: the fastest first. `over`: those that do not fit, the least too large first."""

    fit: list[Verdict]
    over: list[Verdict]


def search(shape: Shape, gpus: int, batch: int, machine: Machine) -> Found:
    """ValueError if no layout divides the model, the GPUs and the batch."""
    verdicts = [judge(shape, mesh, machine) for mesh in meshes(shape, gpus, batch, machine)]
    if not verdicts:
        raise ValueError(
            f"{gpus} GPUs, {batch} sequences a step, {shape.layers} layers, {shape.heads} heads: no layout divides "
            "them all; change the batch or the number of GPUs"
        )
    room = (1 - RESERVE) * machine.memory
    fit = sorted((v for v in verdicts if v.total <= room), key=lambda v: v.step)
    over = sorted((v for v in verdicts if v.total > room), key=lambda v: v.total)
    return Found(fit, over)


def meshes(shape: Shape, gpus: int, batch: int, machine: Machine) -> Iterator[Mesh]:
    """Those that can be, tensor parallelism no wider than a node."""
    for tp in (n for n in (1, 2, 4, 8, 16) if n <= machine.in_node):
        for pp in range(1, shape.layers + 1):
            if gpus % (tp * pp):
                continue
            for micro in (1, 2, 4, 8):
                for zero in STRATEGIES[1:]:
                    for recompute in (False, True):
                        mesh = Mesh(gpus // (tp * pp), pp, tp, batch, micro, zero, recompute)
                        if mesh.dp == 1 and zero != "zero1":
                            continue  # nothing to divide
                        try:
                            mesh.check(shape)
                        except ValueError:
                            continue
                        yield mesh
