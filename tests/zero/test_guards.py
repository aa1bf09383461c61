"""What used to go wrong without a word: changes from outside, awkward models, NaN, drifting buffers, double owners."""

import copy
import dataclasses
import io
import warnings
from typing import Any

import pytest
import torch
from test_plain_loop import batch, by_adamw, every_stage, plain, small
from torch import Tensor, nn
from training import STAGES, Net, adamw, differing, tokens
from worlds import run

from refimpl.comm.group import Group
from refimpl.launch import RankError
from refimpl.offload.homes import Host
from refimpl.optim.loss_scale import DynamicLossScaler, LossScaler
from refimpl.zero.config import ZeroConfig
from refimpl.zero.init import GatheredParameters
from refimpl.zero.zero3 import Zero3


def stage_of_small(
    stage_name: str, dtype: torch.dtype = torch.float32, scaler: LossScaler | None = None, **config: Any
) -> Any:
    group = Group.world()
    model = small(group.rank).to(dtype)
    optimizer = by_adamw(model)
    return model, optimizer, STAGES[stage_name](model, optimizer, group, ZeroConfig(**config), scaler)


def refused(stage_name: str, how: str) -> None:
    model, optimizer, stage = stage_of_small(stage_name)
    plain(model, optimizer, lambda step: batch(step, stage.group.rank))
    if how == "double":
        model.double()
    if how == "half the model":
        model[0].to(torch.bfloat16)
    if how == "replaced":
        model[0].weight = nn.Parameter(torch.zeros(7, 5))
        plain(model, optimizer, lambda step: batch(step, stage.group.rank))
    if how == "fill":
        with torch.no_grad():
            model[0].weight.fill_(1.0)
    if how == "read":
        model[2].bias.sum()
    if how == "data":
        model[2].bias.data.zero_()
    if how == "average":
        twin = torch.optim.swa_utils.AveragedModel(model)
        twin.update_parameters(model)
    if how == "pickle on one":
        optimizer.add_param_group({"params": [model[0].weight]})


@every_stage
@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("double", r"parameter 0.weight: it lies in a buffer.*float64.*before the stage is built|cannot be|needs its"),
        ("half the model", r"parameter 0.weight: .*"),
        ("replaced", r"0.weight: replaced in the model since the stage was built"),
        ("pickle on one", r"0.weight is in a group of the optimizer already"),
    ],
)
def test_what_cannot_be_is_refused_at_the_call(stage: str, how: str, message: str) -> None:
    with pytest.raises(RankError, match=f"(?s){message}"):
        run(refused, stage, how, ranks=2)


@pytest.mark.parametrize(
    ("how", "said"), [("fill", "fill_"), ("read", "sum"), ("data", "zero_"), ("average", "detach")]
)
def test_a_freed_parameter_says_how_it_can_be_had(how: str, said: str) -> None:
    with pytest.raises(RankError, match=rf"parameter \d.\w+: {said} needs its values.*GatheredParameters"):
        run(refused, "zero3", how, ranks=2)


def loaded(stage_name: str, dtype: torch.dtype) -> bool:
    """Weights loaded into a built stage train on as if they had been there from the start."""
    model, optimizer, stage = stage_of_small(stage_name, dtype, reduce_bucket_size=40)
    plain(model, optimizer, lambda step: batch(step, stage.group.rank).to(dtype))
    other = small(7).to(dtype)
    model.to("cpu").to(torch.device("cpu", 1)).to(device="cpu:0").to(dtype)  # nothing to do
    model.load_state_dict(other.state_dict())
    assert differing(model.state_dict(), other.state_dict()) == []
    twin_optimizer = by_adamw(other)
    twin = STAGES[stage_name](other, twin_optimizer, stage.group, ZeroConfig(reduce_bucket_size=40))
    for p, q in zip(model.parameters(), other.parameters(), strict=True):  # the same moments, so the same steps
        for key in ("exp_avg", "exp_avg_sq"):
            stage.set_full_state(p, key, torch.zeros(p.shape))
        assert torch.equal(twin.full_parameter(q), stage.full_parameter(p).to(dtype).float())
    for group in optimizer.param_groups:
        for p in group["params"]:
            optimizer.state[p]["step"].zero_()
    plain(model, optimizer, lambda step: batch(step, stage.group.rank).to(dtype))
    plain(other, twin_optimizer, lambda step: batch(step, stage.group.rank).to(dtype))
    return differing(model.state_dict(), other.state_dict()) == []


@every_stage
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_can_be_loaded_into_a_stage(stage: str, dtype: torch.dtype) -> None:
    assert all(run(loaded, stage, dtype, ranks=3))


def one_weight_written(stage_name: str, offloaded: float) -> list[bool]:
    """Before each step one weight of another parameter is written; whether each stays what was written."""
    model = Net().to(torch.bfloat16)
    home: dict[str, Any] = {"optimizer_home": Host(), "offload_ratio": offloaded} if offloaded else {}
    config = ZeroConfig(reduce_bucket_size=700, **home)
    stage = STAGES[stage_name](model, torch.optim.AdamW(model.parameters(), lr=1e-6), config=config)
    params = [p for p in model.parameters() if p.requires_grad][::4]
    for step, p in enumerate(params):
        stage.backward(model(tokens(step, stage.group.rank)))
        p.data.view(-1)[-1] = 7 + step
        stage.step()
    return [p.data.view(-1)[-1].item() == 7 + step for step, p in enumerate(params)]


@pytest.mark.parametrize(("stage", "offloaded"), [("ddp", 0), ("zero1", 0), ("zero1", 0.5)])
def test_one_weight_that_is_written_is_what_the_update_starts_from(stage: str, offloaded: float) -> None:
    """Wherever it lies in its bucket, and wherever the masters rest."""
    for stayed in run(one_weight_written, stage, offloaded, ranks=3):
        assert len(stayed) > 4
        assert all(stayed)


def copied(stage_name: str) -> tuple[list[str], list[str], bool]:
    model, optimizer, stage = stage_of_small(stage_name)
    plain(model, optimizer, lambda step: batch(step, stage.group.rank))
    full = {name: stage.full_parameter(name) for name in stage.names.values()}
    twin = copy.deepcopy(model)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    saved = torch.load(io.BytesIO(file.getvalue()))
    average = torch.optim.swa_utils.AveragedModel(model)
    with GatheredParameters(model):
        average.update_parameters(model)
    twin(batch(0, 0)).sum().backward()
    return (
        differing(dict(twin.state_dict()), full),
        differing(saved, full),
        differing(dict(average.module.state_dict()), full) == [] and twin[0].weight.grad is not None,
    )


@every_stage
def test_copies_are_whole_and_plain(stage: str) -> None:
    for twin, saved, averaged in run(copied, stage, ranks=2):
        assert (twin, saved, averaged) == ([], [], True)


@dataclasses.dataclass
class Output:
    logits: Tensor
    aux: list[Tensor]


class Awkward(nn.Module):
    """Returns a dataclass, hands on by an attribute, a 0-dim parameter, a weight used detached after its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(29, 6)
        self.inner = Inner()
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.last = nn.Linear(6, 29)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.inner(x=self.embed(tokens)).logits + self.inner.kept
        x = x @ self.last.weight.detach().t() @ self.last.weight * self.scale.exp()
        return nn.functional.cross_entropy(self.last(x).flatten(0, 1), tokens.flatten())


class Hidden:
    __slots__ = ("value",)

    def __init__(self, value: Tensor) -> None:
        self.value = value


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.slotted = Slotted()
        self.up, self.kept = nn.Parameter(torch.eye(6) * 0.3), torch.zeros(())

    def forward(self, x: Tensor) -> Output:
        self.kept = (x @ self.up).sin()
        return Output(self.slotted(self.frozen(input=x)).value, [])


class Slotted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(6) * 0.7)

    def forward(self, x: Tensor) -> Hidden:
        return Hidden(x @ self.weight)


def awkward(sharded: bool) -> tuple[dict[str, Tensor], int]:
    torch.manual_seed(0)
    model = Awkward()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    group = Group.world()
    stage = STAGES["zero3" if sharded else "ddp"](model, optimizer, group)
    gathered = 0
    for step in range(4):
        model(tokens(step, group.rank)).backward()
        gathered = sum(not u.is_free for u in stage.units) if isinstance(stage, Zero3) else 0
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.state_dict()), gathered


def test_awkward_outputs_keep_their_bits_under_zero3() -> None:
    plain_weights = run(awkward, False, ranks=2)[0][0]
    for weights, gathered in run(awkward, True, ranks=2):
        assert differing(weights, plain_weights) == []
        assert gathered == 0, "everything is freed when backward is over, frozen modules called by keyword too"


def nan_loss(stage_name: str, scaler: LossScaler | None = None) -> list[str]:
    model, optimizer, stage = stage_of_small(stage_name, scaler=scaler)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for step in range(5):
            loss = model(batch(step, 0)).sum()
            stage.backward(loss * float("nan") if stage.group.rank == 1 else loss)
            optimizer.step()
            optimizer.zero_grad()
    return [str(w.message) for w in seen]


def test_a_dynamic_scale_is_silent_until_it_is_at_its_minimum() -> None:
    told, _ = run(nan_loss, "ddp", DynamicLossScaler(8.0, hysteresis=1, raise_at_min=False), ranks=2)
    assert [text.split("(")[-1] for text in told] == ["4 skipped so far)"], "three of the steps have halved it"


@every_stage
def test_a_loss_that_is_nan_is_told_at_powers_of_two(stage: str) -> None:
    first, second = run(nan_loss, stage, ranks=2)
    assert second == []
    assert [text.split("(")[-1] for text in first] == [f"{n} skipped so far)" for n in (1, 2, 4)]
    name = STAGES[stage].__name__
    assert first[0].startswith(f"{name}, step 1: the loss of rank 1 is not finite; the update is skipped on every rank")


def nan_micro_batch(stage_name: str, whose: dict[int, int]) -> list[str]:
    """Of three micro-batches, `whose` says in which a rank's loss is NaN."""
    model, optimizer, stage = stage_of_small(stage_name)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for step in range(2):
            for micro in range(3):
                poison = float("nan") if step == 0 and whose.get(stage.group.rank) == micro else 1.0
                stage.backward(model(batch(step, 0)).sum() * poison, sync=micro == 2)
            optimizer.step()
            optimizer.zero_grad()
    assert stage.skipped_steps == 1
    return [str(w.message) for w in seen]


@every_stage
@pytest.mark.parametrize(("whose", "said"), [({1: 0}, "rank 1"), ({0: 2, 1: 1}, "rank 0, 1"), ({2: 1}, "rank 2")])
def test_whose_loss_it_was_is_told_of_any_micro_batch(stage: str, whose: dict[int, int], said: str) -> None:
    (told,), *others = run(nan_micro_batch, stage, whose, ranks=3)
    assert f"step 1: the loss of {said} is not finite; the update is skipped" in told
    assert others == [[], []]


class Normed(nn.Module):
    def __init__(self, sync: bool) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(5, 4), nn.BatchNorm1d(4)
        if sync:
            self.norm = nn.SyncBatchNorm.convert_sync_batchnorm(self.norm)
        self.register_buffer("positions", torch.arange(3.0), persistent=False)
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(self.first(x)) * self.scale
        return out.square().mean()


def running_means(stage_name: str, share: bool) -> Tensor:
    group = Group.world()
    torch.manual_seed(0)
    model = Normed(False)
    optimizer = by_adamw(model)
    STAGES[stage_name](model, optimizer, group, ZeroConfig(broadcast_buffers=share))
    for step in range(3):
        model(batch(step, group.rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
    model(batch(9, 0))
    model.eval()
    if group.rank == 0:
        with torch.no_grad():  # a rank may evaluate alone, except where parameters are sharded
            model(batch(0, 0)) if stage_name != "zero3" else None
    assert isinstance(model.norm.running_mean, Tensor)
    return model.norm.running_mean.clone()


@every_stage
def test_buffers_are_rank_0s_unless_told_not_to(stage: str) -> None:
    first, second = run(running_means, stage, True, ranks=2)
    assert torch.equal(first, second)
    first, second = run(running_means, stage, False, ranks=2)
    assert not torch.equal(first, second)


def both_in_one_loss(stage_name: str, share: bool) -> dict[str, Tensor]:
    """Weights after steps of two forwards and one backward, as a preference's and a discriminator's."""
    group = Group.world()
    torch.manual_seed(0)
    model = Normed(False)
    optimizer = by_adamw(model)
    stage = STAGES[stage_name](model, optimizer, group, ZeroConfig(broadcast_buffers=share))
    for step in range(3):
        (model(batch(step, group.rank)) - 2 * model(batch(step, 7)).log()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: stage.full_parameter(name) for name in stage.names.values()}


@every_stage
def test_a_graph_may_wait_while_buffers_are_shared(stage: str) -> None:
    """BatchNorm's running means and a constant are in the first forward's graph when the second one shares them."""
    found, expected = run(both_in_one_loss, stage, True, ranks=3), run(both_in_one_loss, stage, False, ranks=3)
    assert [differing(one, expected[0]) for one in found] == [[]] * 3


class Averaged(nn.Module):
    """Writes its own running mean, where autograd sees it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 4)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor, keep: bool) -> Tensor:
        if keep:
            self.mean.add_(x.mean())
        out: Tensor = self.first(x) * self.mean
        return out.square().mean()


def averaged_twice() -> None:
    group, model = Group.world(), Averaged()
    STAGES["ddp"](model, by_adamw(model), group)
    (model(batch(0, group.rank), True) + model(batch(1, group.rank), False)).backward()


def test_a_buffer_that_the_model_writes_is_no_other_in_a_graph_that_waits() -> None:
    with pytest.raises(RankError, match=r"rank 1 .*modified by an inplace operation"):
        run(averaged_twice, ranks=2)


def exact_masters(stage_name: str) -> float:
    """How far fp32 masters are from the weights before they were rounded."""
    torch.manual_seed(0)
    model = Net()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    stage = STAGES[stage_name](model, adamw(model), config=ZeroConfig(dtype=torch.bfloat16))
    assert all(p.dtype == torch.bfloat16 for p in model.parameters())
    return max(
        (stage.full_parameter(name) - w).abs().max().item()
        for name, w in before.items()
        if not name.startswith("frozen")
    )


@every_stage
def test_masters_begin_with_what_rounding_takes_off(stage: str) -> None:
    assert run(exact_masters, stage, ranks=3) == [0.0] * 3


def of_a_micro_batch_without_gradients(stage_name: str) -> list[Tensor | None]:
    """A gradient, where it may wait for the last micro-batch: rank 1's loss has nothing of the model, and then has."""
    model, _, stage = stage_of_small(stage_name)
    found = []
    for alike in (False, True):
        loss = model(batch(0, 0)).sum()
        nothing = stage.group.rank == 1 and not alike
        stage.backward(torch.zeros((), requires_grad=True) if nothing else loss, sync=False)
        found.append(stage.full_gradient("0.weight"))
        stage.zero_grad()
    return found


@pytest.mark.parametrize("stage", ["ddp", "zero1"])
def test_a_rank_that_has_no_gradient_at_all_counts_as_zero(stage: str) -> None:
    for some, all_of_them in run(of_a_micro_batch_without_gradients, stage, ranks=3):
        assert all_of_them.any()
        torch.testing.assert_close(some, all_of_them * 2 / 3)


def by_name(stage_name: str, dtype: torch.dtype) -> bool:
    """Get and set of weights, gradients and state; parts add up to the whole."""
    group = Group.world()
    model = Net().to(dtype)
    optimizer = adamw(model)
    model.register_parameter("codes", nn.Parameter(torch.full((3,), group.rank), requires_grad=False))
    stage = STAGES[stage_name](model, optimizer, group, ZeroConfig(reduce_bucket_size=300, dtype=dtype))
    codes = model.state_dict()["codes"]
    assert (codes.dtype, codes.tolist()) == (torch.int64, [0, 0, 0]), "rank 0's; whole numbers are not cast"
    with pytest.raises(KeyError, match="take a step first"):
        stage.set_full_state("embed.weight", "exp_avg", torch.zeros(29, 13))
    for step in range(2):
        model(tokens(step, group.rank)).backward()
        name = "blocks.1.up.weight"
        gradient = stage.full_gradient(name)
        assert gradient is not None
        assert stage.full_gradient("unused.weight") is None
        for other, p in model.named_parameters() if stage_name != "ddp" else ():  # whose gradients are plain tensors
            whole = stage.full_gradient(other)
            assert whole is None or (p.grad is not None and p.grad.norm() == whole.double().norm().float())
        stage.backward(model(tokens(step, group.rank)), sync=False)  # waits on each rank: it is replaced too
        stage.set_full_gradient(name, torch.ones(39, 13))
        assert torch.equal(stage.full_gradient(name), torch.ones(39, 13))
        sizes = group.all_gather_object(stage.local_gradient(name).numel())
        assert sum(sizes) == (39 * 13 if stage_name != "ddp" else 39 * 13 * group.size)
        optimizer.step()
        optimizer.zero_grad()
    moment = stage.full_state(name, "exp_avg")
    assert moment is not None
    torch.testing.assert_close(moment, torch.full((39, 13), 0.1 + 0.9 * 0.1))  # of two gradients of 1
    assert stage.full_state("frozen.weight", "exp_avg") is None
    new = torch.randn(39, 13, generator=torch.Generator().manual_seed(3))
    stage.set_full_parameter(name, new)
    stage.set_full_state(name, "exp_avg", -new)
    assert torch.equal(stage.full_state(name, "exp_avg"), -new)
    assert torch.equal(stage.full_parameter(name), new)
    assert torch.equal(model.state_dict()[name], new.to(dtype))
    stage.set_full_parameter("frozen.bias", torch.arange(13.0))
    assert torch.equal(model.state_dict()["frozen.bias"], torch.arange(13.0).to(dtype))
    shards = dict(stage.named_shards())
    assert shards.keys() == {n for n, p in model.named_parameters() if p.requires_grad}
    assert shards[name].data_ptr() == stage.local_parameter(name).data_ptr()
    frozen = stage.full_parameter("frozen.weight")
    assert torch.equal(frozen, model.state_dict()["frozen.weight"].float())
    if stage_name != "zero3":
        assert frozen.data_ptr() != model.get_parameter("frozen.weight").data_ptr(), "memory of its own"
    return True


@every_stage
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_everything_by_name(stage: str, dtype: torch.dtype) -> None:
    assert all(run(by_name, stage, dtype, ranks=3))


def inference(stage: str, built_inside: bool) -> tuple[float, float]:
    torch.manual_seed(0)
    model = Net()
    with torch.no_grad():
        expected = model(tokens(0, 0)).item()
    with torch.inference_mode(built_inside):
        STAGES[stage](model)
    with torch.inference_mode():
        model(tokens(1, 0))
    with torch.inference_mode(built_inside), torch.no_grad():
        return expected, model(tokens(0, 0)).item()


@every_stage
@pytest.mark.parametrize("built_inside", [False, True])
def test_inference_needs_no_optimizer(stage: str, built_inside: bool) -> None:
    for expected, got in run(inference, stage, built_inside, ranks=2):
        assert expected == got
