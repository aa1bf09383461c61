"""Grades chapter 08's delayed update: bits of a loop one step late, beside forward and backward, errors told."""

from concurrent.futures import Future
from threading import Event, get_ident
from typing import Any

import torch
from torch import Tensor, nn

from refimpl.grading.compare import Wrong, equal, require
from refimpl.grading.grade import on_ranks
from refimpl.grading.memory import Kept
from refimpl.grading.rank import Answer, case
from refimpl.grading.traffic import WatchedGroup

STEPS = 5
PATIENCE = 1.5  # seconds; only a wrong answer waits for them
HURRIED = 3  # in this step forward and backward are over before the update that runs beside them
A_MOMENT = 0.3  # seconds that it takes then


class Net(nn.Module):
    """The second layer is used in every other step only; another one is frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.always, self.sometimes, self.frozen = (nn.Linear(7, 7) for _ in range(3))
        self.frozen.requires_grad_(False)

    def loss(self, step: int) -> Tensor:
        x = torch.randn(5, 7, generator=torch.Generator().manual_seed(step))
        y = self.frozen(self.always(x))
        loss: Tensor = (y + self.sometimes(x) if step % 2 == 0 else y).square().mean()
        return loss


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.1, weight_decay=0.5)


def weights(net: Net) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in net.named_parameters()}


def one_process(late: bool = True) -> list[dict[str, Tensor]]:
    """Weights after each call of step(), and after finish(): a plain loop, with the gradients of the step before."""
    net = Net()
    optimizer, before, found = adamw(net.parameters()), None, []
    for step in range(STEPS + late):
        now = gradients(net, step) if step < STEPS else None
        given = before if late else now
        if given is not None:
            for p, grad in zip(net.parameters(), given, strict=True):
                p.grad = grad
            optimizer.step()
        before = now
        net.zero_grad()
        found.append(weights(net))
    return found


def gradients(net: Net, step: int) -> list[Tensor | None]:
    net.zero_grad()
    net.loss(step).backward()
    return [p.grad for p in net.parameters()]


class Gated:
    """AdamW, each of whose updates begins when it may: in the middle of the next forward and backward."""

    def __init__(self, masters: list[Tensor]) -> None:
        self.inner, self.masters, self.caller = adamw(masters), masters, get_ident()
        self.started, self.may, self.done = ([Event() for _ in range(STEPS)] for _ in range(3))  # of each update
        self.begun, self.fault, self.fails = 0, "", False

    def step(self) -> None:
        if get_ident() == self.caller:
            raise Wrong("the update runs in the caller's own time: begin it in the thread, self.thread.submit")
        number, self.begun = self.begun, self.begun + 1
        require(number < STEPS, f"{STEPS} calls of step(), and more than {STEPS} updates")
        self.started[number].set()
        if number + 1 == HURRIED:
            self.be_slow()
        elif not self.may[number].wait(PATIENCE):
            self.fault = "step() waits for the update that it begins: forward and backward of the next step come first"
        if self.fails:
            raise RuntimeError("no memory on the host")
        self.inner.step()
        self.done[number].set()

    def be_slow(self) -> None:
        """Run until the caller's next step() has begun."""
        handed = [master.grad for master in self.masters]
        self.may[HURRIED - 1].wait(A_MOMENT)
        if any(master.grad is not grad for master, grad in zip(self.masters, handed, strict=True)):
            raise Wrong("step() hands over gradients while the update before still uses its own: end that first")

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)


@on_ranks(1)
def test_DelayedUpdate(answer: Answer, group: WatchedGroup) -> None:
    expected, at_once = one_process(), one_process(late=False)
    case("the same bits as a loop that is one step late")
    net, kept = Net(), Kept(group)
    places = [p.data_ptr() for p in net.parameters()]
    late, gate = made(answer, net)
    for step in range(STEPS):
        forward_and_backward(net, gate, step)
        theirs = [name for name, p in net.named_parameters() if p.grad is not None]
        late.step()
        gone = [name for name in theirs if net.get_parameter(name).grad is None]
        require(not gone, f"step() has taken the .grad of {', '.join(gone[:3])}: the caller's, who sets them to None")
        gate.started[step].wait(PATIENCE)
        judge_grads(late, net)
        net.zero_grad()
        after = f"after call {step + 1} of step()"
        require(not gate.fault, gate.fault)
        judge_weights(net, expected[step], expected[step - 1] if step else None, at_once[step], after)
    trained = sum(p.nbytes for p in net.parameters() if p.requires_grad)
    room = sum(m.nbytes for m in late.masters) + 3 * trained
    advice = "masters, AdamW's two, and one copy of the gradients; the model's own are the caller's"
    kept.judge(room, "with an update under way DelayedUpdate", advice)
    gate.may[-1].set()
    late.finish()
    kept.judge(room, "after finish() DelayedUpdate", advice)
    judge_weights(net, expected[STEPS], expected[STEPS - 1], None, "after finish()")
    moved = places != [p.data_ptr() for p in net.parameters()]
    require(not moved, "weights lie in other memory now: copy into it, or a view of it, as in a buffer, stays old")
    with torch.no_grad():
        net.always.weight.zero_()
    late.finish()
    require(bool((net.always.weight == 0).all()), "a second finish() changes the weights: the update was given already")
    case("float64, and the thread begins its work after the gradients were zeroed")
    judge_late_start(answer)
    case("two steps: is the first update given to the model before the second begins?")
    judge_turns(answer)
    case("finish() after each step(), as before an evaluation")
    judge_again(answer)
    case("the optimizer raises an error in the thread")
    judge_error(answer)


def made(answer: Answer, net: Net) -> tuple[Any, Gated]:
    gates: list[Gated] = []

    def optimizer(masters: list[Tensor]) -> Gated:
        gates.append(Gated(masters))
        return gates[-1]

    late = answer.DelayedUpdate(list(net.parameters()), optimizer)
    return late, gates[0]


def forward_and_backward(net: Net, gate: Gated, step: int) -> None:
    """In whose middle the update that is under way runs from beginning to end."""
    loss, before = net.loss(step), weights(net)
    if step not in (0, HURRIED):
        gate.may[step - 1].set()
        ran = gate.done[step - 1].wait(PATIENCE)
        require(ran, "no update is under way while forward and backward run: step() must begin one")
    for name, p in net.named_parameters():
        require(torch.equal(p, before[name]), f"{name} changes while forward and backward run: step() brings it, later")
    loss.backward()


def judge_grads(late: Any, net: Net) -> None:
    for master, p in zip(late.masters, net.parameters(), strict=True):
        stale = p.grad is None and master.grad is not None
        require(not stale, "a parameter without a gradient is given an old one, or zeros: its master's must be None")
        if p.grad is not None and master.grad is not None:
            shared = master.grad.untyped_storage().data_ptr() == p.grad.untyped_storage().data_ptr()
            require(
                not shared,
                "the thread is given the model's own gradients, which the caller zeroes meanwhile: copy them",
            )
    net.zero_grad(set_to_none=False)  # in place: what the thread has must not change


def judge_weights(
    net: Net, expected: dict[str, Tensor], older: dict[str, Tensor] | None, newer: dict[str, Tensor] | None, when: str
) -> None:
    for name, found in weights(net).items():
        known = {}
        if name.startswith("frozen"):
            same = torch.equal(found, expected[name])
            require(same, f"{name} has no gradient and was updated all the same {when}: leave its master's grad None")
        if older is not None:
            known["no update arrived: give the model the masters of the one before, which is over by now"] = older[name]
        if newer is not None:
            known["these are the weights without a delay"] = newer[name]
        equal(found, expected[name], f"{name} {when}", known=known, rtol=0, atol=0)


class Late:
    """A thread that is busy until `may` is set."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.may, self.asked = inner, Event(), False

    def submit(self, fn: Any, *args: Any, **kwargs: Any) -> Any:
        self.asked = True

        def work() -> Any:
            self.may.wait(PATIENCE)
            return fn(*args, **kwargs)

        return self.inner.submit(work)


def judge_late_start(answer: Answer) -> None:
    """What the thread is handed must be whole before step() returns."""
    net, twin, decayed = (Net().double() for _ in range(3))
    late = answer.DelayedUpdate(list(net.parameters()), adamw)
    late.thread = thread = Late(late.thread)
    for model in (net, twin, decayed):
        model.always(torch.ones(7, dtype=torch.float64)).square().sum().backward()
    decayed.zero_grad(set_to_none=False)
    for model in (twin, decayed):
        adamw(model.parameters()).step()
    late.step()
    own = "the update begins in another thread than self.thread: one is there for all steps, self.thread.submit(fn)"
    require(thread.asked, own)
    net.zero_grad(set_to_none=False)
    thread.may.set()
    late.finish()
    for name, found in weights(net).items():
        expected = weights(twin)[name]
        known = {
            "rounded to fp32 on its way: keep the parameter's dtype": expected.float().double(),
            "the gradients were read in the thread, when they were zeroed: copy them in step()": weights(decayed)[name],
        }
        equal(found, expected, f"{name} after step() and finish()", known=known, rtol=1e-12, atol=0)


class Orderly:
    """A thread that ends an update before anybody goes on, and is given one when the model has what the last one made.

    So what races elsewhere (the next update changes masters while they are copied) is seen here in every run.
    """

    def __init__(self, late: Any) -> None:
        self.late, self.inner, self.early = late, late.thread, False

    def submit(self, fn: Any, *args: Any, **kwargs: Any) -> Any:
        pairs = zip(self.late.params, self.late.masters, strict=True)
        self.early = self.early or not all(torch.equal(p, master) for p, master in pairs)
        future = self.inner.submit(fn, *args, **kwargs)
        future.exception(PATIENCE)
        return future


def judge_turns(answer: Answer) -> None:
    """An update is given to the model before the next begins."""
    net = Net()
    late = answer.DelayedUpdate(list(net.parameters()), adamw)
    late.thread = thread = Orderly(late)
    for step in range(2):
        net.loss(step).backward()
        late.step()
        net.zero_grad()
    torn = (
        "the next update begins before the masters are copied to the model, and may change them meanwhile: copy first"
    )
    require(not thread.early, torn)


def judge_again(answer: Answer) -> None:
    net, twin = Net(), Net()
    late, optimizer = answer.DelayedUpdate(list(net.parameters()), adamw), adamw(twin.parameters())
    for step in (0, 2):
        for model in (net, twin):
            model.zero_grad()
            model.loss(step).backward()
        late.step()
        late.finish()
        optimizer.step()
    judge_weights(net, weights(twin), None, None, "after two times step() and finish()")


def judge_error(answer: Answer) -> None:
    net = Net()
    late, gate = made(answer, net)
    gate.fails = True
    gate.may[0].set()
    net.loss(0).backward()
    late.step()
    under_way = [value for value in vars(late).values() if isinstance(value, Future)]
    for future in under_way:
        future.exception(PATIENCE)
    try:
        late.step()
    except RuntimeError:
        again = ""
        try:
            late.finish()
        except RuntimeError as error:
            again = str(error)
        return require(not again, "the update's error is raised by every call from now on: forget the Future first")
    raise Wrong("the update failed in its thread, and the next step() does not say so: ask for the Future's result()")
