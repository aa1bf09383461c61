"""The runner: executes any table on real ranks, line by line of this rank's program.

    F      value of the stage before -> stage -> value for the next one, or the loss
    B      gradients of the next one -> backward -> gradients for the stage before
    I, W   the same in two halves (`halves.py`)
    send   begins; as many may be under way to a rank as activations are alive here, two at least
    get    begins where the program has it, and is waited for when it is needed

A stage may add a loss of its own (`added`), such as that of its experts' balance: backward then begins at two places,
at what it sent on and at that loss, and no other stage hears of it.

Memory: between its F and its backward a micro-batch keeps its input and what autograd saves; its output is sent and
let go of, only the edge of the graph stays. The table says how many there are at a time.
Traffic: each boundary between ranks sends its activations forward and as many bytes of gradients back, a micro-batch.
Gradients are added in the order of the micro-batches, so they are those of one process that accumulates them, bit for
bit. (Where two paths cross, as in DualPipe, each stage has two copies that add their own; see `shared.py`.)
DeepSpeed: deepspeed/runtime/pipe/engine.py. torch: torch/distributed/pipelining/stage.py.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from refimpl.comm.group import Group
from refimpl.comm.work import Work
from refimpl.parallel.pipeline.halves import Halves
from refimpl.parallel.pipeline.messages import Recv, Send, programs
from refimpl.parallel.pipeline.schedules.table import Op, Table, Value
from refimpl.parallel.pipeline.verify import complete, run_synchronously
from refimpl.parallel.pipeline.wire import Arriving, Wire, form_of, tensors_of, with_gradient

Loss = Callable[[Any, Any], Tensor]
Added = Callable[[int], Tensor | None]

NO_GRADIENT = (
    "the loss has no gradient, so that nothing would be trained: it was detached, computed in no_grad() or from whole "
    "numbers (argmax), or no parameter of any stage requires one"
)


class Pipeline:
    """This rank's part of a pipeline over the ranks of `group`."""

    def __init__(
        self,
        table: Table,
        stages: Mapping[int, Callable[[Any], Any]],
        group: Group,
        loss: Loss,
        *,
        added: Added | None = None,
        dynamic: bool = False,
    ) -> None:
        """stages: stage -> its module or function of one value, for each that this rank holds (`table.holds`). It must
        not change its input in place: that is a leaf, which autograd refuses.

        loss: (output of the last stage, target) -> scalar. added: called with a stage after its forward pass -> None or
        a scalar that the micro-batch's loss gets too. dynamic: shapes may differ from micro-batch to micro-batch.
        ValueError if the table is for another number of ranks, is wrong, or holds other stages than are given here.
        """
        if table.ranks != group.size:
            raise ValueError(f"the schedule {table.name} is for {table.ranks} ranks, the group has {group.size}")
        if sorted(stages) != table.holds(group.rank):
            raise ValueError(
                f"rank {group.rank} holds stages {table.holds(group.rank)} of the schedule {table.name}, "
                f"and was given {sorted(stages)}"
            )
        complete(table)
        lists = programs(table)
        run_synchronously(table, lists)
        self.table, self.stages, self.group, self.loss = table, dict(stages), group, loss
        self.added, self.dynamic = added or (lambda stage: None), dynamic
        self.program = lists[group.rank]
        self.ahead = max(2, table.alive[group.rank])
        self.wires: dict[tuple[object, ...], Wire] = {}

    def run(self, inputs: Sequence[Any], targets: Sequence[Any], scale: float | None = None) -> dict[int, Tensor]:
        """Forward and backward of every micro-batch; gradients are added to the parameters' `.grad`.

        inputs, targets: one value a micro-batch; inputs are read on ranks that hold the first stage, targets on those
        that hold the last. scale: what each loss is multiplied with for backward, 1 / micro-batches if it is None.
        Returns this rank's share of the losses, not scaled, by micro-batch: those whose last stage is here, and what
        stages that are here have added.
        ValueError for another number of micro-batches, and for a loss without a gradient; RankLost when another rank
        is gone.
        """
        self._check(inputs, targets)
        self.group.share_messages()
        step = Step(self, inputs, targets, 1 / self.table.micro_batches if scale is None else scale)
        for line in self.program:
            step.do(line)
        return step.finish()

    @torch.no_grad()
    def evaluate(
        self,
        inputs: Sequence[Any],
        targets: Sequence[Any] | None = None,
        hear: Callable[[Any], object] | None = None,
    ) -> dict[int, Any]:
        """Forward alone. The losses, or the last stage's outputs if there are no targets, by micro-batch.

        hear: is called with each of these outputs, also where there are targets.
        """
        self._check(inputs, targets if targets is not None else inputs)
        self.group.share_messages()
        step = Step(self, inputs, targets, 0.0, hear)
        for line in self.program:
            if (line.kind == "F") if isinstance(line, Op) else line.value.way == "forward":
                step.do(line)
        return step.finish()

    def everywhere(self, losses: Mapping[int, Tensor]) -> Tensor:
        """[m], fp32: every micro-batch's loss, with what stages added, on every rank. A collective.

        losses: what `run` returned.
        """
        result = torch.zeros(self.table.micro_batches, device=self.group.device)
        for micro, loss in losses.items():
            if loss.numel() != 1:
                raise ValueError(f"the loss must be a scalar, not a tensor of shape {tuple(loss.shape)}")
            result[micro] = loss.reshape(())
        self.group.all_reduce(result, tag="pipeline losses")
        return result

    def reset_shapes(self) -> None:
        """Agree on shapes again at the next step. On every rank."""
        self.wires.clear()

    def wire(self, line: Send | Recv) -> Wire:
        """Where this value travels; training and evaluation have their own shapes."""
        value, other = line.value, line.to if isinstance(line, Send) else line.source
        key = type(line), value.way, value.stage, other, torch.is_grad_enabled()
        if key not in self.wires:
            name = f"{'activations' if value.way == 'forward' else 'gradients'} of stage {value.stage}"
            self.wires[key] = Wire(name, self.dynamic)
        return self.wires[key]

    def _check(self, inputs: Sequence[Any], targets: Sequence[Any]) -> None:
        for what, given, stage in (("inputs", inputs, 0), ("targets", targets, self.table.stages - 1)):
            if stage in self.stages and len(given) != self.table.micro_batches:
                raise ValueError(
                    f"the schedule {self.table.name} is for {self.table.micro_batches} micro-batches: got {len(given)} "
                    f"{what} on rank {self.group.rank}, which holds stage {stage}"
                )


@dataclass
class Kept:
    """What stays of one stage and micro-batch between forward and backward."""

    inputs: list[Tensor]  # those that a gradient is sent back for
    roots: list[GradientEdge]  # of the outputs that require one
    added: list[Tensor]  # the loss of its own, if it has one
    halves: Halves | None = None


@dataclass
class Step:
    """One run through the program."""

    pipeline: Pipeline
    inputs: Sequence[Any]
    targets: Sequence[Any] | None
    scale: float
    hear: Callable[[Any], object] | None = None
    here: dict[Value, Any] = field(default_factory=dict)  # values made here, or come here, and not used yet
    kept: dict[tuple[int, int], Kept] = field(default_factory=dict)
    sending: dict[int, deque[list[Work]]] = field(default_factory=dict)  # to each rank, the oldest first
    results: dict[int, Any] = field(default_factory=dict)

    def do(self, line: Op | Send | Recv) -> None:
        group = self.pipeline.group
        if isinstance(line, Send):
            under_way = self.sending.setdefault(line.to, deque())
            while len(under_way) >= self.pipeline.ahead:
                wait_for(under_way.popleft())
            under_way.append(self.pipeline.wire(line).send(group, self.here.pop(line.value), line.to))
        elif isinstance(line, Recv):
            self.here[line.value] = self.pipeline.wire(line).receive(group, line.source)
        elif line.kind == "F":
            self.forward(line.stage, line.micro)
        elif line.kind == "W":
            self.weight_half(line.stage, line.micro)
        else:
            self.backward(line.stage, line.micro, whole=line.kind == "B")

    def finish(self) -> dict[int, Any]:
        for under_way in self.sending.values():
            for works in under_way:
                wait_for(works)
        return self.results

    def forward(self, stage: int, micro: int) -> None:
        x = self._take(Value("forward", stage - 1, micro)) if stage else self.inputs[micro]
        out = self.pipeline.stages[stage](x)
        added = self.pipeline.added(stage) if self.targets is not None else None
        if stage == self.pipeline.table.stages - 1:
            if self.hear is not None:
                self.hear(out)
            if self.targets is not None:
                out = self.pipeline.loss(out, self.targets[micro])
                if not isinstance(out, Tensor):  # DeepSpeed evaluates a tuple, and trains none either
                    raise ValueError(f"the loss must be a scalar tensor, nothing beside it: got {type(out).__name__}")
                if torch.is_grad_enabled() and added is None and not with_gradient(out):
                    raise ValueError(NO_GRADIENT)
            self._result(micro, out)
        else:
            self._put(Value("forward", stage, micro), out)
        if added is not None:
            self._result(micro, added)
        if torch.is_grad_enabled():
            roots = [get_gradient_edge(t) for t in with_gradient(out)]
            self.kept[stage, micro] = Kept(with_gradient(x) if stage else [], roots, with_gradient(added))

    def backward(self, stage: int, micro: int, whole: bool) -> None:
        """All of it, or the input half."""
        kept = self.kept[stage, micro]
        roots, grads = self._gradients(stage, micro, kept)
        if whole:
            if roots:
                torch.autograd.backward(roots, grads)
            back = [x.grad for x in kept.inputs]
            del self.kept[stage, micro]
        else:
            kept.halves = Halves(roots, grads, kept.inputs)
            back = kept.halves.input_half()
        if stage:
            self._put(Value("backward", stage, micro), back)

    def weight_half(self, stage: int, micro: int) -> None:
        halves = self.kept.pop((stage, micro)).halves
        assert halves is not None
        halves.weight_half()

    def _gradients(self, stage: int, micro: int, kept: Kept) -> tuple[list[GradientEdge], list[Tensor]]:
        """The outputs that a gradient came for, and it; of a loss, its scale."""
        if stage == self.pipeline.table.stages - 1:
            pairs = [(root, torch.full_like(self.results[micro], self.scale)) for root in kept.roots]
        else:
            came = self._take(Value("backward", stage + 1, micro))
            pairs = [(root, grad) for root, grad in zip(kept.roots, came, strict=True) if grad is not None]
        pairs += [(get_gradient_edge(t), torch.full_like(t, self.scale)) for t in kept.added]
        return [root for root, _ in pairs], [grad for _, grad in pairs]

    def _result(self, micro: int, what: Any) -> None:
        """The last stage's, and what stages that are on this rank add to it."""
        what = what.detach() if isinstance(what, Tensor) else what
        self.results[micro] = self.results[micro] + what if micro in self.results else what

    def _put(self, value: Value, what: Any) -> None:
        """For a `Send` that follows, or for this rank's own next stage, where it begins a graph of its own."""
        to = self.pipeline.table.receiver(value)
        self.here[value] = what if to is not None else form_of(what).fill(tensors_of(what))

    def _take(self, value: Value) -> Any:
        what = self.here.pop(value)
        return what.wait() if isinstance(what, Arriving) else what


def wait_for(works: list[Work]) -> None:
    for work in works:
        work.wait()
