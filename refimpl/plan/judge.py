"""One layout on one machine: bytes a GPU by class, bytes it sends on each axis, the bubble, the time of a step.

Time, each term stated: large products at `efficiency` of the peak; what lies between them at the speed of the GPU's
own memory (norms, activations, softmax: `kept.py`); the bubble (pp - 1) / m of both; the all-reduces of tensor
parallelism, which nothing hides, over `node` bandwidth (over `network` where tp exceeds a node); messages between
stages; tokens to their experts and back, which nothing hides; the gradients' reduction and the gathers, as far as they
exceed the last micro-batch's backward: these, and the stages' messages, over `network`, unless one node has all GPUs.
Narayanan et al. 2021, arXiv:2104.04473, sections 2 and 3; Korthikanti et al. 2022, arXiv:2205.05198, section 4.
"""

from dataclasses import dataclass

from refimpl.plan import formulas, gathered
from refimpl.plan.kept import activations, moved
from refimpl.plan.mesh import Mesh
from refimpl.plan.shape import Shape
from refimpl.plan.stages import experts_of, kinds, most_blocks, parameters_of
from refimpl.plan.time import bubble
from refimpl.plan.traffic import busiest


@dataclass(frozen=True)
class Machine:
    """What a GPU and its links can do: by default an A100 of 80 GB, 8 in a node. Bandwidths: bytes/s; of links one way.

    `reads`: of its own memory.
    """

    memory: float = 80e9
    peak: float = 312e12  # floating-point operations a second, 16 bit
    efficiency: float = 0.62  # share of the peak that large products reach
    in_node: int = 8
    node: float = 240e9
    network: float = 22e9
    reads: float = 2e12


@dataclass(frozen=True)
class Verdict:
    """Bytes by class on the fullest GPU, bytes it sends by axis, seconds by cause. `mfu`: of the peak, no recompute."""

    mesh: Mesh
    bytes: dict[str, int]
    sent: dict[str, int]
    seconds: dict[str, float]
    mfu: float
    bubble: float

    @property
    def total(self) -> int:
        return sum(self.bytes.values())

    @property
    def step(self) -> float:
        return sum(self.seconds.values())

    @property
    def largest(self) -> str:
        """The class of which there are most bytes."""
        return max(self.bytes, key=lambda name: self.bytes[name])

    @property
    def limit(self) -> str:
        """What a step waits for most, beside compute; that, if for nothing."""
        seconds, name = max((s, name) for name, s in self.seconds.items() if name != "compute")
        return name if seconds > 0 else "compute"


def judge(shape: Shape, mesh: Mesh, machine: Machine) -> Verdict:
    """ValueError for a layout that cannot be."""
    mesh.check(shape)
    stages = kinds(shape, mesh.pp, mesh.tp)
    fullest = max((state(shape, mesh, stage) for stage in stages), key=lambda found: sum(found.values()))
    sent = busiest(shape, mesh)
    done = shape.flops(mesh.batch, mesh.recompute, mesh.tp, mesh.tp // mesh.before_experts) / mesh.gpus
    uneven = most_blocks(shape, mesh.pp, mesh.tp) * mesh.pp / shape.layers
    compute = uneven * done / (machine.peak * machine.efficiency)
    memory = moved(shape, mesh) / machine.reads
    idle = bubble(mesh.pp, mesh.micro_batches)
    inside = mesh.tp <= machine.in_node
    last = (compute + memory) / mesh.micro_batches * (3 if mesh.recompute else 2) / (4 if mesh.recompute else 3)
    between = machine.node if mesh.gpus <= machine.in_node else machine.network
    seconds = {
        "compute": compute,
        "memory": memory,
        "bubble": (compute + memory) * idle / (1 - idle),
        "tensor": sent["tensor"] / (machine.node if inside else machine.network),
        "pipeline": sent["pipeline"] / between,
        "context": sent["context"] / (machine.node if mesh.tp * mesh.cp <= machine.in_node else machine.network),
        "expert": sent.get("expert", 0) / (machine.node if mesh.tp * mesh.ep <= machine.in_node else machine.network),
        "data": max(0.0, sent["data"] / between - last),
    }
    step = sum(seconds.values())
    mfu = shape.flops(mesh.batch) / (step * machine.peak * mesh.gpus)
    return Verdict(mesh, fullest, sent, seconds, mfu, idle)


def state(shape: Shape, mesh: Mesh, stage: int) -> dict[str, int]:
    """Bytes by class."""
    replicas, found = mesh.dp * mesh.cp, dict[str, int]()
    for elements, ranks in (
        (parameters_of(shape, mesh, stage), replicas),
        (experts_of(shape, mesh, stage), replicas // mesh.ep),
    ):
        layout = formulas.Layout(elements, padding=0, buckets=0)
        for name, size in formulas.memory_bytes(mesh.zero, ranks, mesh.itemsize, layout).items():
            found[name] = found.get(name, 0) + size
    if mesh.zero == "zero3":
        found["gathered"] = mesh.itemsize * gathered.elements(shape, replicas, mesh.tp, mesh.ep, mesh.budgets)
    found["activations"] = activations(shape, mesh, stage)
    return {name: 0 if name in mesh.away else size for name, size in found.items()}
