"""Plans: the formulas, the optimum against all plans there are, and on the repo's GPT predicted bytes = counted."""

import random
import weakref
from collections.abc import Callable, Iterator
from functools import cache

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from refimpl.activation.budget import Again, Block, Plan, best, blocks_of, every, forwards, keep, peak, slowdown, sqrt
from refimpl.activation.chain import Chain, count, measure, run
from refimpl.activation.checkpoint import Checkpoint
from refimpl.activation.policy import Results, matmuls, named
from refimpl.measure.memory import MemoryMeter
from refimpl.model.gpt import GPT, GPTConfig
from refimpl.plan.transformer import activation_bytes

CONFIG = GPTConfig(vocab=64, context=16, width=64, layers=7, heads=2)
INPUT = torch.randn(2, 16, 64, generator=torch.Generator().manual_seed(0))


@cache
def model() -> GPT:
    torch.manual_seed(0)
    return GPT(CONFIG)


@cache
def gpt_blocks() -> list[Block]:
    return measure(list(model().blocks), INPUT)


def equal(layers: int, saved: int) -> list[Block]:
    return [Block(1, 1, saved, 1.0, 2.0)] * layers


def test_the_table_of_the_docstring() -> None:
    layers, saved = 16, 12
    blocks = equal(layers, saved)
    assert peak(keep(layers), blocks) == layers * (1 + saved) + 1  # the last output
    assert peak(every(1, layers), blocks) == layers + saved
    for k in (2, 4, 8):
        assert peak(every(k, layers), blocks) == layers // k + k * (1 + saved) - 1  # the stretch's input is among them
    assert forwards(keep(layers), blocks) == layers
    assert forwards(every(4, layers), blocks) == forwards(sqrt(layers), blocks) == 2 * layers
    assert slowdown(sqrt(layers), blocks) == 4 / 3
    assert slowdown((*keep(8), *every(1, layers)[8:]), blocks) == pytest.approx(3.5 / 3)  # half of the forward again


@pytest.mark.parametrize(("layers", "k"), [(1, 1), (2, 2), (4, 2), (5, 3), (9, 3), (10, 4), (100, 10)])
def test_sqrt(layers: int, k: int) -> None:
    assert sqrt(layers) == every(k, layers)
    assert list(blocks_of(sqrt(layers))) == list(range(layers))


def plans(first: int, last: int, inside: bool = False) -> Iterator[Plan]:
    """Every plan for these blocks. `inside` a stretch of the same blocks it would be no plan to run them as one."""
    if first > last:
        yield ()
        return
    for rest in plans(first + 1, last):
        yield (first, *rest)
    for end in range(first, last if inside else last + 1):
        for stretch in plans(first, end, inside=True):
            for rest in plans(end + 1, last):
                yield (Again(stretch), *rest)


sizes = st.integers(1, 9)


@given(
    st.lists(st.tuples(sizes, st.integers(0, 20), st.integers(1, 5), st.integers(0, 9)), min_size=1, max_size=4),
    st.integers(4, 90),
)
def test_no_plan_is_better(parts: list[tuple[int, int, int, int]], budget: int) -> None:
    outputs = [size for size, *_ in parts[1:]] + [3]
    blocks = [Block(a, b, s, float(f), 0.0, k) for (a, s, f, k), b in zip(parts, outputs, strict=True)]
    fitting = [plan for plan in plans(0, len(blocks) - 1) if peak(plan, blocks) <= budget]
    if not fitting:
        with pytest.raises(ValueError, match="no plan fits") as refusal:
            best(blocks, budget)
        least = int(str(refusal.value).split()[-1])
        assert least == min(peak(plan, blocks) for plan in plans(0, len(blocks) - 1))
        return
    found = best(blocks, budget)
    assert list(blocks_of(found)) == list(range(len(blocks)))
    assert peak(found, blocks) <= budget
    assert forwards(found, blocks) == min(forwards(plan, blocks) for plan in fitting)


def test_sizes_that_are_rounded_stay_within_the_budget() -> None:
    blocks = [Block(9973 + i, 9973 + i + 1, 30011 + 7 * i, 1.0 + i, 0.0, 101) for i in range(6)]
    for budget in range(99_000, 240_000, 1009):
        assert peak(best(blocks, budget), blocks) <= budget


NESTED: Plan = (0, Again((Again((1, 2)), 3)), 4, Again((Again((5,)), 6)))


@pytest.mark.parametrize("plan", [keep(7), every(1, 7), every(2, 7), sqrt(7), every(7, 7), NESTED], ids=str)
def test_counted_is_predicted(plan: Plan) -> None:
    assert count(plan, list(model().blocks), INPUT) == peak(plan, gpt_blocks())


class Residual(nn.Module):
    """Its first product keeps a view of the input, which has three dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(16, 40), nn.GELU(), nn.Linear(40, 16))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


def tanh_ends() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 16), nn.Tanh())


ODD: dict[str, list[nn.Module]] = {
    "residual": [Residual() for _ in range(6)],
    "an output that its own block keeps": [tanh_ends() for _ in range(6)],
    "both in turn": [*(m for _ in range(3) for m in (Residual(), nn.Sequential(nn.Linear(16, 16), nn.Softmax(-1))))],
    "of other widths": [nn.Linear(w, v) for w, v in ((16, 40), (40, 24), (24, 24), (24, 8), (8, 56), (56, 16))],
    "inputs that nobody keeps": [m for _ in range(3) for m in (nn.Linear(16, 16).requires_grad_(False), nn.GELU())],
    "an output that is kept, behind it an input that is not": [
        m for _ in range(3) for m in (tanh_ends(), nn.Linear(16, 16).requires_grad_(False))
    ],
    "norms behind": [nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True) for _ in range(6)],
}


KINDS: list[Callable[[], nn.Module]] = [
    Residual, tanh_ends, nn.Tanh, nn.Identity, nn.GELU, lambda: nn.Linear(16, 16), lambda: nn.LayerNorm(16),
    lambda: nn.Dropout(0.3), lambda: nn.Unflatten(0, (1, -1)), lambda: nn.Softmax(-1),
    lambda: nn.Linear(16, 16).requires_grad_(False),
]  # fmt: skip


@pytest.mark.parametrize("name", ODD)
def test_counted_is_predicted_for_blocks_of_other_kinds(name: str) -> None:
    x = torch.randn(3, 5, 16)
    blocks = measure(ODD[name], x, repeat=1)
    budget = int(0.7 * peak(keep(6), blocks))
    for plan in (keep(6), every(1, 6), every(2, 6), every(6, 6), best(blocks, budget)):
        assert count(plan, ODD[name], x) == peak(plan, blocks)
    assert peak(best(blocks, budget), blocks) <= budget


def test_counted_is_predicted_for_views() -> None:
    modules = [m for _ in range(2) for m in (tanh_ends(), nn.Unflatten(-1, (4, 4)), nn.Flatten(-2))]
    x = torch.randn(3, 5, 16)
    blocks = measure(modules, x, repeat=1)
    for plan in (keep(6), every(1, 6), every(2, 6), every(6, 6)):
        assert count(plan, modules, x) == peak(plan, blocks)


def test_counted_is_predicted_behind_an_embedding() -> None:
    modules, ids = [nn.Embedding(11, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)], torch.arange(11).view(1, 11)
    blocks = measure(modules, ids, repeat=1)
    for plan in (keep(4), every(1, 4), every(2, 4)):
        assert count(plan, modules, ids) == peak(plan, blocks)


@pytest.mark.parametrize("seed", range(12))
def test_predicted_is_no_less_than_counted_for_any_plan_of_any_chain(seed: int) -> None:
    draw = random.Random(seed)
    modules = [draw.choice(KINDS)() for _ in range(draw.randint(2, 6))]
    x = torch.randn(5, 16)
    blocks = measure(modules, x, repeat=1)
    for plan in draw.sample([*plans(0, len(modules) - 1)][:400], 4 if len(modules) > 2 else 2):
        assert count(plan, modules, x) <= peak(plan, blocks)


def test_measuring_keeps_nothing_of_a_block_that_saves_its_output() -> None:
    outputs: list[weakref.ref[Tensor]] = []
    block = nn.Sequential(nn.Linear(16, 16), nn.Softmax(-1))
    block.register_forward_hook(lambda _, __, output: outputs.append(weakref.ref(output)))
    measure([block], torch.randn(5, 16), repeat=1)
    assert outputs
    assert [output() for output in outputs] == [None] * len(outputs)
    assert len(block._forward_hooks) == 1, "the test's own"


class Spare(nn.Module):
    """A batch norm, whose running statistics are no activations, and a parameter that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.spare = nn.BatchNorm1d(8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)


def test_buffers_and_unused_parameters() -> None:
    modules = [nn.Linear(8, 8), Spare(), nn.Linear(8, 8), Spare(), nn.Linear(8, 8)]
    x = torch.randn(6, 8)
    blocks = measure(modules, x, repeat=1)
    for plan in (keep(5), every(1, 5), every(2, 5)):
        assert count(plan, modules, x) == peak(plan, blocks)


@pytest.mark.parametrize("share", [0.9, 0.6, 0.4, 0.25, 0.18])
def test_counted_is_predicted_and_within_the_budget(share: float) -> None:
    budget = int(share * peak(keep(7), gpt_blocks()))
    plan = best(gpt_blocks(), budget)
    assert count(plan, list(model().blocks), INPUT) == peak(plan, gpt_blocks()) <= budget


def test_a_measured_block_is_the_formulas() -> None:
    """Korthikanti et al.'s count, for this GPT: 16 B T w elements, two statistics a norm, one a head of attention."""
    block = gpt_blocks()[0]
    assert block.input == block.output == INPUT.nbytes
    assert block.input + block.saved == activation_bytes(CONFIG, batch=2, itemsize=4)


def test_a_policy_keeps_the_products() -> None:
    """Between forward and backward, beside the last output: of 16 tensors the input and those of 10 results."""
    blocks, unit = list(model().blocks), INPUT.nbytes

    def between(how: Checkpoint) -> int:
        meter = MemoryMeter(lambda: {"parameters": model().parameters()})
        with meter:
            y = run(every(1, 7), blocks, INPUT.clone().requires_grad_(), how)
            kept = meter.now()["activations"]
        y.sum().backward()
        return kept

    bare, products, none = (between(Checkpoint(policy=p)) for p in (None, matmuls(), named("cumsum")))
    statistics = 2 * 16 * 2 * 4  # one fp32 number a token and head, which fused attention returns beside its result
    assert bare == none
    assert products - bare == 7 * (10 * unit + statistics)


@pytest.mark.parametrize(("dropout", "kept"), [(0.0, 1), (0.5, 0)])
def test_fused_attention_is_kept_unless_it_draws(dropout: float, kept: int) -> None:
    x = torch.randn(1, 2, 4, 8)
    results = Results(matmuls())
    with results.kept():
        torch.nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=dropout)
    fused = [kept for _, kept in results.calls if kept is not None and isinstance(kept[0], tuple)]
    assert len(fused) == kept


def test_an_operation_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no operation 'addmmm'; did you mean addmm"):
        named("addmmm")


def test_a_model_runs_by_a_plan() -> None:
    """The weights keep their names, and the gradients their bits."""
    torch.manual_seed(0)
    gpt = GPT(CONFIG)
    names = list(gpt.state_dict())
    tokens = torch.randint(64, (2, 16))

    def gradients() -> list[Tensor | None]:
        gpt.zero_grad(set_to_none=True)
        gpt(tokens, tokens.roll(-1, 1)).backward()
        return [p.grad for p in gpt.parameters()]

    expected = gradients()
    gpt.blocks = Chain(gpt.blocks, NESTED)
    assert list(gpt.state_dict()) == names
    for mine, plain in zip(gradients(), expected, strict=True):
        assert mine is not None
        assert plain is not None
        assert torch.equal(mine, plain)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 block, not 0"):
        every(0, 4)
    with pytest.raises(ValueError, match=r"the plan runs blocks \[0, 1\], the chain has 3"):
        Chain(nn.ModuleList(nn.Identity() for _ in range(3)), keep(2))
    with pytest.raises(ValueError, match="no plan fits into 10 bytes"):
        best(gpt_blocks(), 10)
