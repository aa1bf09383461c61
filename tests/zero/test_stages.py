"""DDP and ZeRO-1, 2, 3 against one process of plain torch: bits, bytes kept, bytes sent, order of events."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from pairs import pairwise
from torch import nn
from training import STAGES, Job, Net, differing, oracle, train
from worlds import run

from refimpl.launch import RankError
from refimpl.model.gpt import GPT, GPTConfig
from refimpl.optim.lion import Lion
from refimpl.optim.loss_scale import DynamicLossScaler, LossScaler
from refimpl.plan.formulas import by_collective, memory_bytes, traffic

RANKS = (2, 3, 4)
every_stage = pytest.mark.parametrize("stage", list(STAGES))
every_size = pytest.mark.parametrize("ranks", RANKS)


@every_size
@every_stage
def test_fp32_equals_one_process_bit_for_bit(stage: str, ranks: int) -> None:
    job = Job()
    assert differing(run(train, stage, job, ranks=ranks)[0].weights, oracle(ranks, job)) == []


@every_stage
def test_accumulation_adds_in_the_declared_order(stage: str) -> None:
    job = Job(micro_batches=3)
    expected = oracle(3, job, ranks_first=stage in ("zero2", "zero3"))
    assert differing(run(train, stage, job, ranks=3)[0].weights, expected) == []


def test_the_two_orders_of_accumulation_differ() -> None:
    """Else the test above would not tell them apart."""
    job = Job(micro_batches=3)
    assert differing(oracle(3, job), oracle(3, job, ranks_first=True)) != []


@every_stage
def test_clipping_uses_the_global_norm(stage: str) -> None:
    job = Job(clip=0.05)
    out = run(train, stage, job, ranks=3)
    assert differing(out[0].weights, oracle(3, job)) == []
    assert out[0].norms == out[1].norms == out[2].norms
    assert all(norm is not None and norm > 0.05 for norm in out[0].norms), "the limit must bite"


def test_all_stages_agree_bit_for_bit_in_bf16() -> None:
    weights = [run(train, stage, Job(dtype=torch.bfloat16), ranks=3)[0].weights for stage in STAGES]
    for other in weights[1:]:
        assert differing(other, weights[0]) == []


def in_short_slices(
    stage_name: str, longest: int, rows: int = 16, dtype: torch.dtype = torch.bfloat16
) -> tuple[list[int], dict[str, torch.Tensor] | None]:
    """Lengths of the slices that the optimizer knows of six parameters of 16 times `rows` elements, and the weights at
    the end."""
    from refimpl.comm.group import Group
    from refimpl.zero.optimizer import slices

    torch.manual_seed(0)
    layers = (nn.Linear(16, rows, bias=False) for _ in range(6))
    model = nn.Sequential(*layers).to(dtype)
    kept, slices.LONGEST = slices.LONGEST, longest
    try:
        stage = STAGES[stage_name](model, torch.optim.AdamW(model.parameters(), lr=0.1), Group.world())
    finally:
        slices.LONGEST = kept
    for _ in range(2):
        x = torch.ones(1, 16, dtype=dtype)
        stage.backward(sum(layer(x).float().square().sum() for layer in model))
        stage.step()
    return [s.end - s.start for cut in stage.update.slices.of.values() for s in cut], stage.full_state_dict()


@pytest.mark.parametrize(
    ("stage", "lengths"),
    [("ddp", {1536: [1536], 600: [512, 512, 512], 128: [256] * 6}), ("zero1", {600: [512, 256], 128: [256, 256, 256]})],
)
def test_a_long_master_is_cut_before_parameters_and_keeps_its_bits(stage: str, lengths: dict[int, list[int]]) -> None:
    """So the gradient that is widened at a time is short."""
    whole = run(in_short_slices, stage, 1 << 22, ranks=2)[0][1]
    for longest, expected in lengths.items():
        cut, weights = run(in_short_slices, stage, longest, ranks=2)[0]
        assert cut == expected
        assert weights is not None
        assert differing(weights, whole) == []
    assert len(run(in_short_slices, stage, 128, 16, torch.float32, ranks=2)[0][0]) == 1, "nothing is widened"
    odd = run(in_short_slices, stage, 128, 15, ranks=2)[0][0]  # parameters begin on multiples of 240
    assert odd == ([960, 576] if stage == "ddp" else [768])


class ByChannels(nn.Module):
    """Convolutions whose weights lie in the order of channels_last, one of them frozen, and a transposed matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(29, 13)
        self.first, self.frozen = nn.Conv2d(1, 8, 3), nn.Conv2d(8, 5, 3).requires_grad_(False)
        self.last = nn.Linear(135, 7)
        self.last.weight = nn.Parameter(self.last.weight.detach().t().contiguous().t(), requires_grad=False)
        self.to(memory_format=torch.channels_last)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        image = self.embed(tokens).unsqueeze(1)
        return self.last(self.frozen(self.first(image)).flatten(1)).square().mean()


def test_all_stages_agree_bit_for_bit_where_tensors_are_not_laid_row_by_row() -> None:
    """Products round otherwise with other strides: also what is frozen must lie alike in all stages."""
    weights = [run(train, stage, Job(make=ByChannels), ranks=3)[0].weights for stage in STAGES]
    for other in weights[1:]:
        assert differing(other, weights[0]) == []


class OneChannel(nn.Module):
    """Its frozen weights count as contiguous in channels_last too, whose strides they have."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.frozen = nn.Embedding(29, 13), nn.Conv2d(1, 3, 3).requires_grad_(False)
        self.to(memory_format=torch.channels_last)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.frozen(self.embed(tokens).unsqueeze(1)).square().mean()


def test_a_frozen_convolution_of_one_channel_computes_alike_in_all_stages() -> None:
    losses = [run(train, stage, Job(make=OneChannel, steps=2))[0].losses for stage in STAGES]
    assert losses[1:] == losses[:1] * 3


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)


def adagrad(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(model.parameters(), lr=0.01, initial_accumulator_value=0.1)


def lion(model: nn.Module) -> torch.optim.Optimizer:
    return Lion(model.parameters(), lr=1e-3, weight_decay=0.1)


@every_stage
@pytest.mark.parametrize("optimizer", [sgd, adagrad, lion])
def test_other_elementwise_optimizers(stage: str, optimizer: Callable[[nn.Module], torch.optim.Optimizer]) -> None:
    job = Job(optimizer=optimizer, steps=4)
    assert differing(run(train, stage, job, ranks=3)[0].weights, oracle(3, job)) == []


def gpt(width: int = 64) -> GPT:
    return GPT(GPTConfig(vocab=64, context=16, width=width, layers=2, heads=2))


class Scored(nn.Module):
    """A GPT that takes the tests' tokens and returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = gpt()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.gpt(tokens, tokens.roll(-1, 1))
        return loss


def fused(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


GPT_JOB = Job(make=Scored, optimizer=fused, config={"reduce_bucket_size": 20_000, "leaf_modules": ("Block",)})


@every_size
@every_stage
def test_gpt_with_fused_adamw(stage: str, ranks: int) -> None:
    """Every parameter's size is a multiple of 64, so even the fused kernel gives the bits of plain torch."""
    out = run(train, stage, GPT_JOB, ranks=ranks)[0]
    assert differing(out.weights, oracle(ranks, GPT_JOB)) == []


@pytest.mark.parametrize(
    ("stage", "ranks", "micro_batches", "dtype"), pairwise([*STAGES], RANKS, [1, 3], [torch.float32, torch.bfloat16])
)
def test_counted_bytes_equal_the_formulas(stage: str, ranks: int, micro_batches: int, dtype: torch.dtype) -> None:
    job = replace(GPT_JOB, dtype=dtype, micro_batches=micro_batches, steps=2)
    out = run(train, stage, job, ranks=ranks)[0]
    expected = memory_bytes(stage, ranks, dtype.itemsize, out.layout)
    assert {name: out.memory[name] for name in expected} == expected
    assert out.memory["gathered"] == 0
    assert out.buckets[1] < out.buckets[0] + 1000, "but for a message's, the buffers of a step serve the next"
    rows = traffic(stage, ranks, dtype.itemsize, out.layout, micro_batches)
    assert out.sent == by_collective(rows)
    assert out.layout.padding < 64 * ranks * out.layout.buckets


class Nothing(nn.Module):
    """A parameter of no elements, in a bucket of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.part = nn.Embedding(29, 13), nn.Module()
        self.part.nothing = nn.Parameter(torch.zeros(0, 3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.embed(tokens).square().mean() + self.part.nothing.sum()


@every_stage
def test_a_bucket_of_no_elements_takes_no_byte(stage: str) -> None:
    """Its gradients took one."""
    job = Job(make=Nothing, optimizer=fused, steps=2, config={"reduce_bucket_size": 1})
    out = run(train, stage, job, ranks=2)[0]
    expected = memory_bytes(stage, 2, 4, out.layout)
    assert {name: out.memory[name] for name in expected} == expected
    assert out.sent == by_collective(traffic(stage, 2, 4, out.layout))


@every_size
def test_sent_in_units_of_the_parameters(ranks: int) -> None:
    """2, 2, 2 and 3 times (N-1)/N of the parameters' bytes, up to the padding."""
    for stage, times in {"ddp": 2, "zero1": 2, "zero2": 2, "zero3": 3}.items():
        out = run(train, stage, replace(GPT_JOB, steps=1), ranks=ranks)[0]
        assert out.sent_by_tag["gradients"] + out.sent_by_tag.get("parameters", 0) == (
            times * (ranks - 1) * 4 * (out.layout.numel + out.layout.padding) // ranks
        )


@every_stage
def test_reduction_overlaps_backward(stage: str) -> None:
    """Collective i starts before gradient i + 1 exists."""

    def marks_after_first_reduction(overlap: bool) -> int:
        job = replace(GPT_JOB, steps=1, config=GPT_JOB.config | {"overlap_comm": overlap})
        events = run(train, stage, job, ranks=2)[0].events
        names = ["grad" if e.phase == "mark" else f"{e.phase} {e.tag}" for e in events]
        return names[names.index("start gradients") :].count("grad")

    assert marks_after_first_reduction(overlap=True) > 0
    assert marks_after_first_reduction(overlap=False) == 0


@every_stage
def test_two_reductions_are_in_flight_at_most(stage: str) -> None:
    # No layer of this model is unused: that would hold all buckets behind it back to the end of backward.
    job = replace(GPT_JOB, steps=1, config={"reduce_bucket_size": 300})
    events = run(train, stage, job, ranks=2)[0].events
    flying, most, fills_meanwhile = 0, 0, False
    for event in events:
        if event.tag == "gradients":
            flying += {"start": 1, "end": -1}[event.phase]
            most = max(most, flying)
        fills_meanwhile |= event.phase == "mark" and flying == 2
    assert most == 2
    assert fills_meanwhile, "a third bucket fills while two travel"


@every_stage
def test_infinite_loss_on_one_rank_skips_the_step_on_all(stage: str) -> None:
    outs = run(train, stage, Job(steps=3, poison=(1, 1)), ranks=3)
    assert [o.done for o in outs] == [[True, False, True]] * 3
    weights = outs[0].weights
    assert weights is not None
    assert all(w.isfinite().all() for w in weights.values())


def large_gradients() -> list[float | None]:
    """Every stage's norm of nine gradients whose squares no fp32 holds."""
    from refimpl.comm.group import Group

    norms = []
    for stage_class in STAGES.values():
        model = nn.Linear(3, 3, bias=False)
        stage = stage_class(model, torch.optim.SGD(model.parameters(), lr=1e-26), Group.world())
        stage.backward(1e25 * model(torch.ones(1, 3)).sum())
        assert stage.step(), type(stage).__name__
        norms.append(stage.grad_norm)
    return norms


def test_gradients_too_large_to_square_are_finite() -> None:
    assert run(large_gradients, ranks=2)[0] == pytest.approx([3e25] * 4)


@every_stage
@pytest.mark.parametrize(
    "config",
    [
        {"prescale_gradients": True},
        {"gradient_predivide_factor": 2.0},
        {"communication_data_type": torch.float16},
        {"grad_accum_dtype": torch.float32},
        {"allgather_bucket_size": 100},
        {"reduce_bucket_size": 1},
    ],
    ids=lambda c: next(iter(c)),
)
def test_ways_to_reduce_agree_closely(stage: str, config: dict[str, object]) -> None:
    """Dividing before, on the way or in another dtype rounds differently, and computes the same thing."""
    job = Job(steps=3, optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.1))
    out = run(train, stage, replace(job, config={"reduce_bucket_size": 700} | config), ranks=3)[0]
    assert out.weights is not None
    for name, expected in oracle(3, job).items():
        torch.testing.assert_close(out.weights[name], expected, rtol=2e-3, atol=2e-5, msg=name)


@every_stage
def test_the_gather_in_pieces_changes_no_bit(stage: str) -> None:
    job = Job(steps=3, config={"reduce_bucket_size": 700, "allgather_bucket_size": 100})
    out = run(train, stage, job, ranks=3)[0]
    assert differing(out.weights, oracle(3, job)) == []
    pieces = sum((event.phase, event.tag) == ("start", "parameters") for event in out.events)
    assert stage in ("ddp", "zero3") or 100 * pieces >= out.layout.numel + out.layout.padding, "at most 100 a call"


@every_stage
def test_fp16_halves_the_scale_on_overflow_and_goes_on(stage: str) -> None:
    """The scale starts too high for fp16; every rank skips the same steps and ends with the same scale."""

    def scaler() -> LossScaler:
        return DynamicLossScaler(initial_scale=2.0**24, window=4, hysteresis=1)

    job = Job(steps=16, dtype=torch.float16, scaler=scaler)
    outs = run(train, stage, job, ranks=2)
    assert outs[0].scales == outs[1].scales
    assert outs[0].done == outs[1].done
    assert not outs[0].done[0]
    assert outs[0].done[-1]
    for done, before, after in zip(outs[0].done, [2.0**24, *outs[0].scales], outs[0].scales, strict=False):
        assert after == before / 2 if not done else after in (before, 2 * before)
    assert outs[0].losses[-1] < outs[0].losses[0]


def test_stages_agree_bit_for_bit_in_fp16() -> None:
    def scaler() -> LossScaler:
        return DynamicLossScaler(initial_scale=2.0**16, window=4, hysteresis=2)

    job = Job(steps=8, dtype=torch.float16, scaler=scaler, clip=0.5)
    weights = [run(train, stage, job, ranks=3)[0].weights for stage in STAGES]
    for other in weights[1:]:
        assert differing(other, weights[0]) == []


@every_stage
def test_gradients_may_be_summed_over_ranks(stage: str) -> None:
    """A sum over two ranks at half the rate is a mean."""
    job = Job(steps=3, config={"reduce_bucket_size": 700, "gradient_allreduce_op": "sum"})
    halved = replace(job, optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.05))
    expected = oracle(2, replace(job, optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.1)))
    assert differing(run(train, stage, halved, ranks=2)[0].weights, expected) == []


@every_stage
def test_an_unused_parameter_can_be_an_error(stage: str) -> None:
    job = Job(steps=1, config={"ignore_unused_parameters": False})
    with pytest.raises(RankError, match=r"no gradient for unused\.\w+"):
        run(train, stage, job, ranks=2)


def three_backwards(stage_name: str) -> tuple[dict[str, torch.Tensor] | None, None]:
    from training import tokens

    from refimpl.comm.group import Group
    from refimpl.zero.config import ZeroConfig

    torch.manual_seed(0)
    model, group = Net(), Group.world()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    stage = STAGES[stage_name](model, optimizer, group, ZeroConfig(reduce_bucket_size=700))  # type: ignore[call-arg]
    for micro in range(3):
        stage.backward(model(tokens(0, micro * group.size + group.rank)))
    stage.step()
    return stage.full_state_dict(), None


@every_stage
def test_three_backwards_before_a_step_add_up(stage: str) -> None:
    weights = run(three_backwards, stage, ranks=2)[0][0]
    job = Job(steps=1, micro_batches=3, optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.3))
    for name, expected in oracle(2, job, ranks_first=True).items():
        torch.testing.assert_close(weights[name], expected, rtol=1e-6, atol=1e-6, msg=name)


def kept_until_the_step(stage_name: str) -> list[float]:
    """Each rank uses one layer of three, and no backward sends: by how much each layer's weights change."""
    from refimpl.comm.group import Group
    from refimpl.zero.config import ZeroConfig

    model, group = nn.ModuleList(nn.Linear(3, 3) for _ in range(3)), Group.world()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    stage = STAGES[stage_name](model, optimizer, group, ZeroConfig(reduce_bucket_size=1))  # type: ignore[call-arg]
    before = [layer.weight.detach().clone() for layer in model]
    stage.backward(model[group.rank](torch.ones(1, 3)).sum(), sync=False)
    stage.step()
    return [(was - layer.weight).mean().item() for was, layer in zip(before, model, strict=True)]


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("stage", ["ddp", "zero1"])
def test_a_step_sends_what_was_kept_also_where_ranks_used_other_layers(stage: str, ranks: int) -> None:
    expected = [pytest.approx(1 / ranks if layer < ranks else 0) for layer in range(3)]
    assert run(kept_until_the_step, stage, ranks=ranks) == [expected] * ranks


def misuse(stage_name: str, how: str) -> None:

    from refimpl.comm.group import Group

    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if how == "lbfgs":
        optimizer = torch.optim.LBFGS(model.parameters())  # type: ignore[assignment]
    if how == "foreign":
        optimizer = torch.optim.SGD([*model.parameters(), nn.Parameter(torch.ones(3))], lr=0.1)
    stage = STAGES[stage_name](model, optimizer, Group.world())  # type: ignore[call-arg]
    if how == "twice":
        STAGES[stage_name](model, torch.optim.SGD(model.parameters(), lr=0.1))
    if how == "all twice":
        STAGES[stage_name](model, optimizer)
    if how == "no backward":
        stage.step()


@every_stage
@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("lbfgs", "LBFGS is not known to be element-wise"),
        ("foreign", r"SGD, group 0: a tensor of shape \(3,\) is not a parameter of the stage.s model"),
        ("twice", r"belongs to a \w+ already: call its release"),
        ("all twice", r"this SGD belongs to \w+ already: .* release\(\) that one first"),
        ("no backward", "no backward"),
    ],
)
def test_misuse_is_named(stage: str, how: str, message: str) -> None:
    if (stage, how) == ("ddp", "lbfgs"):
        return  # it has whole parameters: see test_plain_loop.py
    with pytest.raises(RankError, match=message):
        run(partial(misuse, stage, how), ranks=2)
