"""Grades chapter 12's stage on real ranks: what it computes, sends and keeps at each tick."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from refimpl.grading.compare import equal, require
from refimpl.grading.grade import on_ranks
from refimpl.grading.memory import Kept, untouched
from refimpl.grading.rank import Answer, case
from refimpl.grading.traffic import WatchedGroup, all_done, most_under_way, starts
from refimpl.parallel.pipeline.schedules.named import schedule
from refimpl.parallel.pipeline.schedules.table import Op

ROWS, WIDTH, HIDDEN, WORDS = 32, 24, 8, 11


class Layers(nn.Module):
    """Of one stage; the first begins with an embedding, if there are words. The output's memory is not contiguous."""

    def __init__(self, stage: int, dtype: torch.dtype, words: bool) -> None:
        super().__init__()
        torch.manual_seed(stage)
        self.table = nn.Embedding(WORDS, WIDTH) if words and stage == 0 else None
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.up.bias.requires_grad_(False)
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.table is None else self.table(x)
        return self.down(torch.tanh(self.up(x))).t().contiguous().t()


def loss(out: Tensor, target: Tensor) -> Tensor:
    return (out - target).square().mean()


class Scene:
    """A model over the ranks, the data of one step, and its gradients in one process."""

    def __init__(self, group: WatchedGroup, micro: int, dtype: torch.dtype, words: bool, even: bool) -> None:
        """`even`: micro-batches count alike; else each has a scale of its own."""
        self.rank, self.last, self.even, self.words = group.rank, group.size - 1, even, words
        self.scales = [1 / micro if even else 2.0**-k for k in range(micro)]
        torch.manual_seed(50)
        drawn = [torch.randint(WORDS, (ROWS,)) for _ in range(micro)]
        self.inputs = drawn if words else [torch.randn(ROWS, WIDTH, dtype=dtype) for _ in range(micro)]
        self.targets = [torch.randn(ROWS, WIDTH, dtype=dtype) for _ in range(micro)]
        self.like, self.layers = torch.zeros(ROWS, WIDTH, dtype=dtype), Layers(group.rank, dtype, words)
        self.layers.register_forward_pre_hook(self.look)
        self.seen: list[int] = []  # where the inputs lie, in the order of the forwards
        self.buffers: dict[int, int] = {}  # of the micro-batches that are alive
        self.expected, self.losses = self.one_process(group.size, dtype)

    def look(self, layers: nn.Module, given: tuple[Tensor]) -> None:
        require(layers.training, "the module is in evaluation mode: its dropout does nothing; leave the mode as it is")
        self.seen.append(given[0].data_ptr())

    def one_process(self, stages: int, dtype: torch.dtype) -> tuple[dict[str, Tensor | None], list[Tensor]]:
        """The gradients of this rank's layers, and the loss of every micro-batch."""
        model, losses = [Layers(s, dtype, self.words) for s in range(stages)], []
        for x, target, scale in zip(self.inputs, self.targets, self.scales, strict=True):
            self.before = {n: p.grad.clone() for n, p in model[self.rank].named_parameters() if p.grad is not None}
            for layers in model:
                x = layers(x).contiguous()
            losses.append(loss(x, target))
            (losses[-1] * scale).backward()
        return {n: p.grad for n, p in model[self.rank].named_parameters()}, [x.detach() for x in losses]

    def alive_bytes(self, alive: int) -> int:
        """What so many micro-batches keep: the input, what tanh gives, and on the last stage the difference squared."""
        row = WIDTH * (self.words or self.rank > 0) + HIDDEN + WIDTH * (self.rank == self.last)
        return alive * ROWS * row * self.like.element_size()


@on_ranks(1, 2, 3, 4)
def test_Stage(answer: Answer, group: WatchedGroup) -> None:
    for name, micro, dtype, words in (
        ("1f1b", 5, torch.float32, True),
        ("gpipe", 3, torch.bfloat16, True),
        ("1f1b", 1, torch.float32, True),
        ("gpipe, the last micro-batch goes back first", 3, torch.float32, False),
    ):
        case(f"{name}, {micro} micro-batch{'es' * (micro > 1)}, {str(dtype).removeprefix('torch.')}")
        scene, fresh = Scene(group, micro, dtype, words, even="," not in name), group.fresh()
        order: Sequence[Op] = schedule(name.partition(",")[0], group.size, micro).orders[group.rank]
        if "," in name:
            order = [*order[:micro], *reversed(order[micro:])]
        with untouched(inputs=scene.inputs, targets=scene.targets, like=scene.like):
            kept = Kept(group)
            stage = answer.Stage(scene.layers, fresh, loss, scene.like)
            run(stage, scene, order, kept)
            times = f"the module ran {len(scene.seen)} times for {micro} micro-batches: once each, in forward"
            require(len(scene.seen) == micro, times)
            judge_gradients(scene, micro)
            judge_sends(fresh, scene, micro)
            own = [x for x in scene.inputs if x.requires_grad]
            require(not own, "the caller's `inputs` require a gradient now: only what was received must")
            room = sum(p.grad.nbytes for p in scene.layers.parameters() if p.grad is not None)
            advice = "the parameters' gradients alone may stay: what of a micro-batch, or of a send, is still held?"
            kept.judge(room, "after finish() the stage", advice)
    if group.size > 2:
        judge_apart(answer, group.tally())


def run(stage: Any, scene: Scene, order: Sequence[Op], kept: Kept) -> None:
    """One step in that order; memory is looked at before the first backward, when the most is alive."""
    ahead = [op.kind for op in order].index("B")
    for place, (kind, _, k) in enumerate(order):
        if place == ahead:
            under_way = scene.like.nbytes * (scene.rank < scene.last)
            what = f"with {ahead} micro-batch{'es' * (ahead > 1)} between forward and backward the stage"
            advice = "keep the input and get_gradient_edge(out); the output itself is sent and let go of, a target too"
            judge_under_way(stage.group)
            kept.judge(scene.alive_bytes(ahead) + under_way, what, advice)
        if kind == "F":
            judge_loss(forward(stage, scene, k), scene, k)
            scene.buffers[k] = scene.seen[-1]
            own = len(set(scene.buffers.values())) == len(scene.buffers)
            require(own, "two micro-batches share the memory of their input: the second overwrites the first")
        else:
            stage.backward(k, scene.scales[k])
            del scene.buffers[k]
        judge_begun(stage.group, kind, scene)
    stage.finish()
    over = "after finish() self.sending still holds sends that are over: let go of them, the next step begins anew"
    require(not getattr(stage, "sending", None), over)


def judge_apart(answer: Answer, group: WatchedGroup) -> None:
    """The middle one of three stages begins a send to either neighbour, who have received nothing yet."""
    case("a send to the next stage, then one to the stage before")
    group.rank, group.size = 1, 3
    stage = answer.Stage(nn.Linear(2, 2), group, loss, torch.zeros(2, 2))
    for to in (2, 0):
        stage.send(torch.zeros(2, 2), to)
    waits = (
        "a send to one neighbour waits until the other has received, who may wait for it: wait for those to the same"
    )
    require({e.tag for e in group.ledger.open_calls()} == {"to 0", "to 2"}, waits)


def judge_begun(group: WatchedGroup, kind: str, scene: Scene) -> None:
    """Between two ticks the last send is under way: nobody has waited for it yet."""
    to, what = (scene.rank + 1, "forward") if kind == "F" else (scene.rank - 1, "backward")
    begun = any(e.tag == f"to {to}" for e in group.ledger.open_calls())
    advice = "hand it to self.send, which begins and returns"
    require(begun or not 0 <= to <= scene.last, f"{what} stands until rank {to} has what it sends: {advice}")


def forward(stage: Any, scene: Scene, k: int) -> Tensor | None:
    """A forward, with what this rank is given; only the first stage has inputs, only the last targets."""
    inputs = scene.inputs[k] if scene.rank == 0 else None
    target = scene.targets[k].clone() if scene.rank == scene.last else None  # which nobody else keeps
    result: Tensor | None = stage.forward(k, inputs, target)
    same = target is None or torch.equal(target, scene.targets[k])
    require(same, "the target was changed: it is an input and must keep its values")
    return result


def judge_loss(found: Any, scene: Scene, k: int) -> None:
    if scene.rank < scene.last:
        require(found is None, f"forward returns a {type(found).__name__} on a stage that is not the last: None there")
        return
    equal(found, scene.losses[k], f"the loss of micro-batch {k}", parts=len(scene.losses))
    require(not found.requires_grad, "the loss that forward returns still holds its graph: return out.detach()")


def judge_gradients(scene: Scene, micro: int) -> None:
    for name, p in scene.layers.named_parameters():
        truth, what = scene.expected[name], f"the gradient of {name} after the step"
        if truth is None:
            require(p.grad is None, f"{what}: it is frozen, and must get none")
            continue
        require(p.grad is not None, f"{what} is missing: backward did not reach it")
        rough = 2e-2 if truth.dtype == torch.bfloat16 else 1e-5
        parts = micro if micro != scene.last + 1 and scene.even else 0
        stages = scene.last + 1
        known = {"divided by the number of stages: the loss is multiplied by `scale` alone": truth / stages}
        known = known if stages > 1 else {}
        if name in scene.before:
            alone = truth - scene.before[name]
            known["the last micro-batch's alone: gradients add up, whoever zeroes them does so between steps"] = alone
        known |= {"`scale` was left out: it multiplies the loss": truth * micro} if micro > 1 and scene.even else {}
        equal(p.grad, truth, what, parts=parts, known=known, rtol=rough, atol=rough / 10)


def judge_sends(group: WatchedGroup, scene: Scene, micro: int) -> None:
    """A message a micro-batch and neighbour, of the bytes of an activation."""
    sends = starts(group.ledger, "send")
    others = sorted(set(group.ledger.calls()) - {"send", "recv"})
    require(not others, f"{', '.join(others)} is used: a stage sends to its neighbours, and receives")
    neighbours = [r for r in (scene.rank - 1, scene.rank + 1) if 0 <= r <= scene.last]
    for to in neighbours:
        mine, what = [e for e in sends if e.tag == f"to {to}"], "activations" if to > scene.rank else "gradients"
        require(len(mine) == micro, f"{len(mine)} {what} are sent to rank {to}, expected {micro}, one a micro-batch")
        for e in mine:
            nbytes = scene.like.nbytes
            wide = e.sent_bytes == 2 * nbytes and scene.like.element_size() == 2
            require(not wide, f"{what} travel as fp32 where `like` is bf16: twice the bytes")
            require(e.sent_bytes == nbytes, f"{e.sent_bytes:,} bytes of {what} are sent, expected {nbytes:,}")
    judge_under_way(group)
    all_done(group, "finish()")


def judge_under_way(group: WatchedGroup) -> None:
    sends = [e for e in group.ledger.events if e.op == "send"]
    for tag in sorted({e.tag for e in sends}):
        most = most_under_way([e for e in sends if e.tag == tag])
        advice = "at most one to each neighbour: wait for the one before"
        require(most <= 1, f"{most} sends {tag} are under way at once, each with its buffer: {advice}")
