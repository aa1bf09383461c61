"""A layout: what each axis divides.

    tensor (tp)     matrices and vocabulary / tp, and what lies between them; by sequence parallelism also what lies
                    outside, but for the inputs of the cut matrices (Megatron-LM gathers these again in backward)
    pipeline (pp)   layers / pp, cut where the engine does (`stages.py`): all wait for the stage with the most blocks;
                    stage 0 has up to pp micro-batches alive (1F1B), the last one the head
    data (dp)       sequences; ZeRO divides state over dp x cp; what ZeRO-3 has whole meanwhile: `gathered.py`
    context (cp)    tokens of a sequence: activations / cp, attention in a ring
    expert (ep)     experts, over consecutive ranks of dp x cp: parameters / ep, and ZeRO divides their state over the
                    dp x cp / ep that have the same ones. Experts are taken to get equally many tokens. Tensor ranks
                    divide the tokens before them; where experts are not dealt out, only under sequence parallelism

What a layout takes on a machine, in bytes and seconds, is in `judge.py`.
"""

from dataclasses import dataclass

from refimpl.plan import formulas, gathered
from refimpl.plan.shape import Shape


@dataclass(frozen=True)
class Mesh:
    """A layout. `batch`: sequences of a step, over all ranks; `micro`: sequences of a micro-batch."""

    dp: int
    pp: int
    tp: int
    batch: int
    micro: int = 1
    zero: formulas.Strategy = "zero1"
    recompute: bool = True  # each block keeps its input alone
    itemsize: int = 2
    cp: int = 1  # ranks that share a sequence
    sequence: bool = True  # tensor ranks divide the tokens outside the cut matrices (`parallelize(sequence=True)`)
    ep: int = 1  # ranks that share the experts
    scores: int = 0  # bytes that attention keeps of each; not fused 2 in 16 bits, 5 with dropout (Korthikanti et al.)
    budgets: gathered.Budgets = gathered.DEEPSPEEDS  # ZeRO-3's
    away: tuple[str, ...] = ()  # classes of bytes that are not on the GPU: offloaded

    @property
    def between(self) -> int:
        """Ranks that divide the tokens between the cut matrices."""
        return self.tp if self.sequence else 1

    @property
    def before_experts(self) -> int:
        """Ranks that divide the tokens before their experts."""
        return self.tp if self.ep > 1 else self.between

    def tokens(self, shape: Shape) -> int:
        """Of a micro-batch, on a context rank."""
        return self.micro * shape.context // self.cp

    @property
    def gpus(self) -> int:
        return self.dp * self.pp * self.cp * self.tp

    @property
    def micro_batches(self) -> int:
        return self.batch // (self.dp * self.micro)

    def check(self, shape: Shape) -> None:
        """ValueError for a layout that cannot be, with its reason."""
        for what, whole, parts in (
            ("sequences over ranks and micro-batches", self.batch, self.dp * self.micro),
            ("tokens over context ranks, two runs each", shape.context, 2 * self.cp if self.cp > 1 else 1),
            ("tokens of a context rank over tensor ranks", shape.context // self.cp, self.between),
        ):
            if whole % parts:
                raise ValueError(f"{whole} {what}: does not divide by {parts}")
        if self.pp > shape.layers + 2:
            raise ValueError(
                f"{shape.layers} layers, embedding and head over {self.pp} pipeline stages: each needs one of them"
            )
        if self.sequence and (why := shape.whole(self.tp)):
            raise ValueError(
                f"attention on {self.tp} tensor ranks: {why}, so each has it whole, and needs all tokens: use tp 1, or "
                "no sequence parallelism"
            )
        if self.ep > 1 and shape.experts is None:
            raise ValueError(f"ep {self.ep}: the model has no mixtures of experts")
        if self.dp * self.cp % self.ep or (shape.experts is not None and shape.experts.count % self.ep):
            count = shape.experts.count if shape.experts else 0
            raise ValueError(
                f"{count} experts over ep {self.ep} of {self.dp * self.cp} data ranks: it must divide both"
            )
        if self.pp > 1 and self.zero in ("zero2", "zero3"):
            raise ValueError(f"{self.zero} with {self.pp} pipeline stages: gradients or weights would travel m times")
