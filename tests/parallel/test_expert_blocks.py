"""Mixtures that hand their experts rows, in every form that is published: dealt out, they are themselves whole."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from worlds import run

from refimpl.comm.axes import Axes
from refimpl.comm.group import Group
from refimpl.parallel.expert.auto import autoep, expert_portions
from refimpl.parallel.expert.blocks import Slots, Sorted
from refimpl.parallel.expert.looped import Looped

BOUND = 64 * torch.finfo(torch.float32).eps
WIDTH, INNER, EXPERTS = 8, 12, 4


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.silu(self.up(x)))
        return out


class Block(nn.Module):
    """A router that sends nothing to the last expert, a list of experts, and one for all tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.experts: nn.Module = nn.ModuleList([Mlp() for _ in range(EXPERTS)])
        self.shared_expert = Mlp()

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.gate(x).softmax(1)
        weights, chosen = scores[:, :-1].topk(2, 1)
        return weights, chosen


class AsMixtral(Block):
    """Experts without tokens are not called."""

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        x = hidden.view(-1, WIDTH)
        weights, chosen = self.route(x)
        out = torch.zeros_like(x)
        for e in chosen.unique().tolist():
            token, place = (chosen == e).nonzero(as_tuple=True)
            out.index_add_(0, token, self.experts[e](x[None, token].reshape(-1, WIDTH)) * weights[token, place, None])  # type: ignore[index]
        return (out + self.shared_expert(x)).view_as(hidden), weights


class AsDeepSeek(Block):
    """Two ways, by mode; in training each expert is called, with no rows too, and the gate has noise."""

    def forward(self, hidden: Tensor) -> Tensor:
        x = hidden.view(-1, WIDTH)
        if self.training:
            x = F.dropout(x, 0.3)
        weights, chosen = self.route(x)
        flat = chosen.flatten()
        if self.training:
            rows = x.repeat_interleave(2, 0)
            made = torch.empty_like(rows)
            for e, expert in enumerate(self.experts):  # type: ignore[arg-type]
                made[flat == e] = expert(rows[flat == e])
        else:
            order = flat.argsort(stable=True)
            rows, parts, start = x[order // 2], [], 0
            for e, n in enumerate(flat.bincount(minlength=EXPERTS).tolist()):
                if n:
                    parts.append(self.experts[e](rows[start : start + n]))  # type: ignore[index]
                start += n
            made = torch.empty_like(rows)
            made[order] = torch.cat(parts)
        out = (made.view(-1, 2, WIDTH) * weights[:, :, None]).sum(1)
        return (out + self.shared_expert(x)).view_as(hidden)


class AsSwitch(Block):
    """By name, with noise that changes its input in place."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleDict({f"expert_{i}": Mlp() for i in range(EXPERTS)})

    def forward(self, hidden: Tensor) -> Tensor:
        if self.training:
            hidden *= torch.empty_like(hidden).uniform_(0.9, 1.1)
        weights, chosen = self.route(hidden.view(-1, WIDTH))
        out = hidden.clone()
        for e, expert in enumerate(self.experts.values()):  # type: ignore[operator]
            mine = (chosen[:, 0] == e).view(hidden.shape[:-1])
            out[mine] = expert(hidden[mine])
        return out * weights[:, :1].view(*hidden.shape[:-1], 1)


class Everyone(Block):
    """A soft mixture: each expert gets all tokens, in three dimensions."""

    def forward(self, hidden: Tensor) -> Tensor:
        scores = self.gate(hidden).softmax(-1)
        parts = [expert(hidden) * scores[..., e : e + 1] for e, expert in enumerate(self.experts)]  # type: ignore[arg-type]
        out: Tensor = sum(parts, torch.zeros_like(hidden))
        return out


class ByRows(nn.Module):
    """One matrix of all experts, for rows that are sorted."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        self.weight = nn.Parameter(torch.randn(EXPERTS, out, width))

    def forward(self, rows: Tensor, sizes: list[int]) -> Tensor:
        parts = rows.split(sizes)
        return torch.cat([F.linear(parts[e], self.weight[e]) for e in range(self.num_experts)])


class AsJetMoe(Block):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Identity()
        self.up_experts, self.down_experts = ByRows(WIDTH, INNER), ByRows(INNER, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        x = hidden.view(-1, WIDTH)
        weights, chosen = self.route(x)
        flat = chosen.flatten()
        order = flat.argsort(stable=True)
        sizes = flat.bincount(minlength=EXPERTS).tolist()
        made = self.down_experts(F.silu(self.up_experts(x[order // 2], sizes)), sizes)
        out = torch.zeros_like(x).index_add(0, order // 2, made * weights.flatten()[order, None])
        return out.view_as(hidden)


class InSlots(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER))
        self.down = nn.Parameter(torch.randn(EXPERTS, INNER, WIDTH))
        self.num_experts = EXPERTS

    def forward(self, rows: Tensor) -> Tensor:
        rows = rows.view(self.up.shape[0], -1, WIDTH)
        return (F.silu(rows @ self.up) @ self.down).view(-1, WIDTH)


class AsLlama4(Block):
    def __init__(self) -> None:
        super().__init__()
        self.experts = InSlots()

    def forward(self, hidden: Tensor) -> Tensor:
        x = hidden.view(-1, WIDTH)
        scores = self.gate(x).sigmoid()
        made = self.experts(x.repeat(EXPERTS, 1) * scores.T.reshape(-1, 1))
        out: Tensor = made.view(EXPERTS, -1, WIDTH).sum(0) + self.shared_expert(x)
        return out.view_as(hidden)


class Net(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.first, self.moe, self.last = nn.Linear(WIDTH, WIDTH), kind(), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.moe(self.first(x))
        out: Tensor = self.last(h[0] if isinstance(h, tuple) else h)
        return out


def made(kind: type[nn.Module], seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net(kind)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}


def dealt_out(kind: type[nn.Module], ep: int, way: type, exact: bool, training: bool, tp: int = 1) -> None:
    """Outputs and gradients of the whole model's; outputs of lists to the bit, and what is drawn drawn once."""
    axes = Axes.of_sizes({"tp": tp}, Group.world()).with_experts(ep)
    rank = axes.replicas.rank
    model, whole = made(kind, rank).train(training), made(kind).train(training)
    names = list(whole.state_dict())
    before = torch.random.get_rng_state()
    assert autoep(model, axes) is model
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(part.training == training for part in model.modules())
    assert any(isinstance(module.__dict__.get("dealt"), way) for module in model.modules())
    assert set(model.state_dict()) <= set(names)
    for _ in range(2):
        torch.manual_seed(7 + rank)
        x = torch.randn(2, 1 + rank, WIDTH)
        after = []
        outputs = []
        for m in (model, whole):
            torch.manual_seed(rank)
            outputs.append(m(x))
            after.append(torch.random.get_rng_state())
        output, expected = outputs
        assert torch.equal(*after)
        assert torch.equal(output, expected) if exact else (output - expected).norm() <= BOUND * expected.norm()
    output.square().sum().backward()
    expected.square().sum().backward()
    portions, mine = expert_portions(model), gradients(model)
    dealt = {p for p in model.parameters() if getattr(p, "allreduce", True) is False}
    experts = [name for name in names if "experts." in name]
    assert dealt
    for name, full in gradients(whole).items():
        if name in experts:
            axes.expert.all_reduce(full)
        p = dict(model.named_parameters()).get(name)
        if p is None:
            assert name in experts
            continue
        assert (p in dealt) == (name in experts)
        if p in portions:
            _, first, count, total = portions[p]
            assert (total, count) == (EXPERTS, EXPERTS // ep)
            full = full[first : first + count]
        assert (mine[name] - full).norm() <= BOUND * full.norm() + 1e-12, name


@pytest.mark.parametrize(
    ("kind", "way", "training"),
    [
        (AsMixtral, Looped, False), (AsDeepSeek, Looped, False), (AsDeepSeek, Looped, True), (AsSwitch, Looped, True),
        (Everyone, Looped, True), (AsJetMoe, Sorted, True), (AsLlama4, Slots, True),
    ],
)  # fmt: skip
def test_every_form(kind: type[nn.Module], way: type, training: bool) -> None:
    run(dealt_out, kind, 2, way, way is Looped, training, ranks=2)


@pytest.mark.parametrize(("ep", "tp"), [(4, 1), (2, 2)])
@pytest.mark.parametrize("kind", [AsMixtral, AsLlama4])
def test_on_four_ranks(kind: type[nn.Module], ep: int, tp: int) -> None:
    """Tensor ranks have the same tokens, and send all of them each."""
    run(dealt_out, kind, ep, Looped if kind is AsMixtral else Slots, kind is AsMixtral, True, tp, ranks=4)


class Counting(AsMixtral):
    """Counts its tokens in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        self.seen += hidden.shape[1]
        return super().forward(hidden)


class Beside(AsMixtral):
    """Hands its experts more than rows."""

    def forward(self, hidden: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return super().forward(hidden * mask)


class Chained(Block):
    """An expert's rows are what the one before it answered."""

    def forward(self, hidden: Tensor) -> Tensor:
        for expert in self.experts:  # type: ignore[union-attr]
            hidden = hidden + expert(hidden)
        return hidden


class Uncalled(Block):
    """Has experts for another time."""

    def forward(self, hidden: Tensor) -> Tensor:
        return F.linear(F.linear(hidden, self.gate.weight), self.gate.weight.mT)


class Twofold(AsMixtral):
    """With a list of others before its experts."""

    def __init__(self) -> None:
        super().__init__()
        fine = self._modules.pop("experts")
        self.coarse_experts = nn.ModuleList([Mlp() for _ in range(2)])
        self.experts = fine

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(sum((expert(hidden) for expert in self.coarse_experts), hidden))


class Wider(Block):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH + 1) for _ in range(EXPERTS)])

    def forward(self, hidden: Tensor) -> Tensor:
        return sum((expert(hidden) for expert in self.experts), torch.zeros(()))[..., :-1]  # type: ignore[union-attr]


class Ranked(ByRows):
    """Its rows are weighted by where they stand among all."""

    def forward(self, rows: Tensor, sizes: list[int]) -> Tensor:
        return super().forward(rows * torch.arange(1, len(rows) + 1)[:, None], sizes)


class Levelled(InSlots):
    """The mean of all slots is taken off."""

    def forward(self, rows: Tensor) -> Tensor:
        return super().forward(rows - rows.mean(0))


@pytest.mark.parametrize(
    ("experts", "why"),
    [
        (Ranked(WIDTH, WIDTH), r"experts \(Ranked\): an expert's rows answer otherwise without the others'"),
        (Levelled(), r"experts \(Levelled\): an expert's rows answer otherwise beside other rows"),
    ],
)
def test_rows_that_know_of_others_are_refused(experts: nn.Module, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        autoep(nn.ModuleDict({"experts": experts}), Axes.of_data(Group(None)))


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (Counting, r"its block \(Counting\) changes a buffer, and would do so twice"),
        (Beside, r"its block \(Beside\) cannot be tried with tokens alone \(TypeError: .*mask"),
        (Chained, r"its block \(Chained\) answers otherwise if all experts are called at once"),
        (Uncalled, r"its block \(Uncalled\) does not call them"),
        (Twofold, "its block has another list of experts; they cannot be dealt out"),
        (Wider, r"an expert \(Linear\) does not give back rows like those"),
    ],
)
def test_refused_by_name(kind: type[nn.Module], why: str) -> None:
    model = made(kind)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match=r"moe\.experts \(ModuleList\): .*" + why):
        autoep(model, Axes.of_data(Group(None)))
    assert type(model.moe) is kind
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def other_routes_the_second_time() -> Callable[..., Any]:
    """A block that draws by Python's own generator, which nobody puts back."""
    calls = iter(range(1000))

    class Fickle(AsMixtral):
        fickle = False

        def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
            weights, chosen = super().route(x)
            return weights, (chosen + next(calls) * self.fickle) % EXPERTS

    return Fickle


def test_a_block_that_is_not_the_same_twice() -> None:
    model = made(other_routes_the_second_time())  # type: ignore[arg-type]
    autoep(model, Axes.of_data(Group(None)))
    model.moe.fickle = True  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match=r"was called otherwise the second time: its routing must be the same"):
        model(torch.randn(2, 3, WIDTH))
