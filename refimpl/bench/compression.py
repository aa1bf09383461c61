"""When does it pay to send less?  Each method's step on links of several bandwidths, and its loss after equal time.

On what link a model trains changes no bit of it, only when a step is over. So each method learns once, without a link,
and after each step it is asked for its loss on one batch that it does not train on (that of the step's own batch says
more of the batch than of the method); on each link a few of its steps are timed, all methods in turns; and its loss
after T seconds is that of the step which it has then reached. T is what the method with the shortest step needs for all
steps. A method with a warm-up is charged DDP's step for each step of that. Every rank is a node.

The time that a method computes, of which there is more the better it compresses, stands against what the link would
have taken: it pays where bytes saved / bandwidth is more than that, and the steps are worth as much as DDP's.
Agarwal et al. 2022 ("On the utility of gradient compression in distributed training systems", arXiv:2103.00543) find
that at data centers' bandwidths it rarely is.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor

from refimpl import launch
from refimpl.bench.methods import FIRST, METHODS, PERIOD, Method, Step
from refimpl.bench.race import Turns, race, slowest
from refimpl.comm.group import Group
from refimpl.comm.link import VARIABLE
from refimpl.comm.topology import tell_floor
from refimpl.model.data import Batches, corpus
from refimpl.model.gpt import GPT, GPTConfig
from refimpl.ranks.environment import variables

HEAT = ("link", "ranks", "parameters", "seconds")
BAND = 0.02  # nats a byte; what lies nearer to DDP's loss is no better and no worse


@dataclass(frozen=True)
class Task:
    """What every method learns: the demo's text, by a GPT."""

    gpt: GPTConfig
    steps: int = 200
    batch: int = 4  # sequences a rank
    turns: int = 5

    @property
    def warm_up(self) -> int:
        """Steps of the methods that have one."""
        return max(1, self.steps // 5)


@dataclass(frozen=True)
class Row:
    """`sent_mb`: by rank 0 in a step, on the mean, after the warm-up. `loss`: after `seconds`. `pays`: beside DDP."""

    link: str
    ranks: int
    parameters: int
    seconds: float
    method: str
    sent_mb: float
    step_ms: float
    times_ddp: float
    steps: int
    loss: float
    pays: str


@dataclass
class Learned:
    """One method without a link: the ranks' mean loss after 0, 1, ... steps, and bytes that rank 0 sends in one."""

    losses: list[float]
    sent: float


def begin(task: Task, method: Method, group: Group, warm_up: int, pace: float = 1.0) -> tuple[GPT, Batches, Step]:
    """A fresh model, the same for each method and rank; its data; its step."""
    torch.manual_seed(0)
    model = GPT(task.gpt)
    return model, Batches(corpus(), task.gpt.context, task.batch), method.make(model, group, warm_up, pace)


def curves(task: Task, names: Sequence[str]) -> dict[str, Learned]:
    """Runs on every rank."""
    found = {}
    for method in chosen(names):
        group, losses, sent = Group.world(), list[float](), 0
        model, batches, step = begin(task, method, group, task.warm_up)
        unseen = Batches(corpus(), task.gpt.context, 2 * task.batch, seed=1).batch(0, 0)
        for number in range(task.steps):
            losses.append(ask(model, unseen))
            if number == task.steps - task.steps % PERIOD - PERIOD:  # a whole period, the last
                group.ledger.reset()
            step(model(*batches.batch(number, group.rank)))
            if number == task.steps - task.steps % PERIOD - 1:
                sent = sum(group.ledger.sent_bytes().values())
        of_ranks = group.all_gather_object([*losses, ask(model, unseen)])
        found[method.name] = Learned([fmean(step) for step in zip(*of_ranks, strict=True)], sent / PERIOD)
        launch.report(method.name)
    return found


@torch.no_grad()
def ask(model: GPT, batch: tuple[Tensor, Tensor]) -> float:
    """The loss, with nothing learnt."""
    loss: Tensor = model.eval()(*batch)
    model.train()
    return loss.item()


def times(task: Task, names: Sequence[str]) -> dict[str, list[float]]:
    """Runs on every rank of a world with a link: milliseconds of every step of each method, after its warm-up.

    They learn next to nothing: a warm-up as short as this one would not bear their full learning rates.
    """
    group, steps = Group.world(), {}
    tell_floor(group)
    for method in chosen(names):
        model, batches, step = begin(task, method, Group.world(), 1, pace=1e-3)
        data = batches.batch(0, group.rank)
        steps[method.name] = lambda model=model, data=data, step=step: step(model(*data))
    return race(group, steps, Turns(task.turns, PERIOD))


def chosen(names: Sequence[str]) -> list[Method]:
    """ValueError for a name that no method has."""
    known = {method.name: method for method in METHODS}
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"no method {unknown[0]!r}: choose from {', '.join(map(repr, known))}")
    return [known[name] for name in names]


@dataclass
class Measured:
    """Over one link. `at`: method -> the second at which each of its steps is over."""

    link: str
    ranks: int
    task: Task
    learned: dict[str, Learned]
    step_ms: dict[str, float]

    @property
    def seconds(self) -> float:
        """The equal time: until the first method is through."""
        return min(self.at(name)[-1] for name in self.step_ms)

    def at(self, name: str) -> list[float]:
        """When each step of a method is over."""
        warm = self.task.warm_up if any(m.warms_up for m in chosen([name])) else 0
        slow = max(self.step_ms[FIRST], self.step_ms[name])
        ends, now = [], 0.0
        for number in range(self.task.steps):
            now += (slow if number < warm else self.step_ms[name]) / 1e3
            ends.append(now)
        return ends

    def rows(self) -> list[Row]:
        size = sum(p.numel() for p in GPT(self.task.gpt).parameters())
        return [
            Row(
                self.link, self.ranks, size, self.seconds, name, self.learned[name].sent / 1e6, ms,
                ms / self.step_ms[FIRST], self.reached(name), self.loss(name), self.verdict(name),
            )
            for name, ms in self.step_ms.items()
        ]  # fmt: skip

    def reached(self, name: str) -> int:
        """Steps that are over within the equal time."""
        return sum(end <= self.seconds * (1 + 1e-9) for end in self.at(name))

    def loss(self, name: str) -> float:
        """What it has come to by then."""
        return self.learned[name].losses[self.reached(name)]

    def verdict(self, name: str) -> str:
        """Whether its loss is below DDP's."""
        gain = self.loss(FIRST) - self.loss(name)
        return "-" if name == FIRST else "yes" if gain > BAND else "no" if gain < -BAND else "even"


def measure(ranks: int, task: Task, links: Sequence[str], names: Sequence[str]) -> Iterator[Measured]:
    """One link at a time; `links` as REFIMPL_LINK is said. `names` begins with DDP.

    ValueError for unknown methods, and for a context longer than the text.
    """
    chosen(names)
    Batches(corpus(), task.gpt.context, task.batch)
    with variables({VARIABLE: ""}):
        learned = launch.run(curves, task, names, ranks=ranks, timeout=600, device="cpu")[0]
    for link in links:
        with variables({VARIABLE: link}):
            of_ranks = launch.run(times, task, names, ranks=ranks, timeout=600, device="cpu")
        ms = {name: of_period(calls) for name, calls in slowest(of_ranks).items()}
        yield Measured(link, ranks, task, learned, ms)


def of_period(calls: Sequence[float]) -> float:
    """A step's mean over a period: a step in which ranks meet counts as often as it comes. Of each the least of turns.

    What a busy machine adds is in the other turns; it would be larger than what is asked for here.
    """
    return fmean(min(calls[place::PERIOD]) for place in range(PERIOD))


def draw(found: Sequence[Measured], file: Path) -> None:
    """Loss over time, a panel a link, one below the other, as a PNG file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 3.4 * len(found) + 1.3), layout="constrained")  # as wide as a phone shows
    FigureCanvasAgg(figure)
    for place, one in enumerate(found):
        axes = figure.add_subplot(len(found), 1, place + 1)
        for number, name in enumerate(one.step_ms):
            when, losses = [0.0, *one.at(name)], one.learned[name].losses
            style = "-" if number < 10 else "--"
            axes.plot(when, losses, style, label=name, lw=2.5 if name == FIRST else 1.2, color=f"C{number % 10}")
        axes.set(title=one.link, xlabel="seconds", xlim=(0, one.seconds), ylabel="loss on a batch apart, nats a byte")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8)
    figure.savefig(file, dpi=150)
