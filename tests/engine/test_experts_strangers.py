"""Mixtures as strangers build them: stacked, tied, marked by hand, copied, given to a second engine, partly frozen."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from worlds import run

from refimpl import launch
from refimpl.engine.configuration.keys import ConfigError
from refimpl.engine.experts import refuse_stacks
from refimpl.engine.initialize import initialize
from refimpl.model.experts import Experts, StackedExperts
from refimpl.model.gates import Gate, Routing
from refimpl.model.gpt import GPT, GPTConfig
from refimpl.model.moe import MoE, mixtures
from refimpl.optim.lamb import Lamb
from refimpl.optim.muon import Muon

WIDTH, EXPERTS, BATCH = 8, 4, 12


def experts_of(kind: str) -> nn.Module:
    if kind == "stacked":
        return StackedExperts(WIDTH, 6, EXPERTS, std=0.3)
    return Experts([nn.Sequential(nn.Linear(WIDTH, 6), nn.ReLU(), nn.Linear(6, WIDTH)) for _ in range(EXPERTS)])


class Net(nn.Module):
    """Two mixtures, whose experts can be the same."""

    def __init__(self, kind: str = "listed", tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.last = nn.Linear(4, WIDTH), nn.Linear(WIDTH, 1)
        experts = experts_of(kind)
        self.a = MoE(Gate(WIDTH, EXPERTS, Routing(k=2)), experts)
        self.b = MoE(Gate(WIDTH, EXPERTS, Routing(k=2)), experts if tied else experts_of(kind))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        h = h + self.a(h)
        h = h + self.b(h)
        loss: Tensor = self.last(h).square().mean()
        return loss


def settings(ep: int | None, stage: int, **more: Any) -> dict[str, Any]:
    zero = {
        "stage": stage,
        "stage3_param_persistence_threshold": 0,
        "stage3_gather_16bit_weights_on_model_save": True,
    }
    return {
        "train_batch_size": BATCH,
        "gradient_accumulation_steps": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": zero | more.pop("zero_optimization", {}),
        **({} if ep is None else {"expert_parallel": {"enabled": True, "autoep_size": ep}}),
        **more,
    }


def steps(engine: Any, first: int, last: int) -> list[float]:
    """Gradient norms."""
    norms = []
    for step in range(first, last):
        x = torch.randn(BATCH, 4, generator=torch.Generator().manual_seed(step))
        engine.backward(engine(x.chunk(engine.axes.feeds)[engine.axes.feed]))
        engine.step()
        norms.append(engine.stage.grad_norm)
    return norms


def trained(
    ep: int, stage: int, folder: Path | None, go_on: bool, kind: str = "stacked", tied: bool = False
) -> list[float]:
    """Two steps from the beginning, or from what was saved in the folder."""
    engine, *_ = initialize(model=Net(kind, tied), config=settings(ep, stage))
    if go_on:
        engine.load_checkpoint(folder)
    norms = steps(engine, 2 * go_on, 2 + 2 * go_on)
    if folder is not None:
        if not go_on:
            engine.save_checkpoint(folder)
        engine.save_16bit_model(folder, f"{ep} {stage} {go_on}.bin")
    return norms


@pytest.mark.parametrize(("ranks", "ep", "stage"), [(1, 1, 0), (4, 4, 3), (4, 2, 2), (2, 1, 1)])
def test_stacked_experts_are_saved_whole_and_go_on_at_another_ep(
    ranks: int, ep: int, stage: int, tmp_path: Path
) -> None:
    """Dealt out by the JSON: norms and weights of one process, in what two ranks saved and in what came of it."""
    one, two = tmp_path / "one", tmp_path / "two"
    start, (expected,) = run(trained, 1, 0, one, False, ranks=1), run(trained, 1, 0, one, True, ranks=1)
    found = run(trained, 2, 1, two, False, ranks=2)
    torch.testing.assert_close(found[0], start[0], rtol=2e-5, atol=0)
    goes_on = run(trained, ep, stage, two, True, ranks=ranks)
    torch.testing.assert_close(goes_on[0], expected, rtol=5e-5, atol=0)
    for mine, theirs in (("2 1 False", "1 0 False"), (f"{ep} {stage} True", "1 0 True")):
        whole, alone = torch.load(two / f"{mine}.bin"), torch.load(one / f"{theirs}.bin")
        assert whole.keys() == alone.keys()
        for name, w in alone.items():
            torch.testing.assert_close(whole[name], w, rtol=1e-3, atol=1e-4, msg=f"{name} of {mine}")


def test_muon_takes_a_stack_of_matrices_for_many() -> None:
    """So it goes the same way at any ep; LAMB, to which a stack is a layer, does not, nor Muon with a stack of rows."""

    def norms(ep: int) -> list[float]:
        section = {"type": "Muon", "params": {"lr": 1e-3, "muon_lr": 1e-2}}
        return steps(initialize(model=Net("stacked"), config=settings(ep, 1, optimizer=section))[0], 0, 3)

    assert run(norms, 2)[0] == pytest.approx(run(norms, 1)[0], rel=1e-6)
    experts = StackedExperts(4, 6, 2)
    experts.of, experts.bias = 4, nn.Parameter(torch.zeros(2, 4))
    with pytest.raises(
        ConfigError, match=r"Muon: bias is a stack of experts, .*or mark it, parameter.use_muon = False"
    ):
        refuse_stacks(experts, Muon(experts.parameters()))
    experts.bias.use_muon = False  # type: ignore[attr-defined]
    refuse_stacks(experts, Muon(experts.parameters()))
    with pytest.raises(ConfigError, match=r"Lamb: up is a stack of experts, .*autoep_size to 1, or take AdamW"):
        refuse_stacks(experts, Lamb(experts.parameters()))


@pytest.mark.parametrize("kind", ["stacked", "listed"])
def test_experts_of_two_layers_stay_the_same_ones(kind: str, tmp_path: Path) -> None:
    (alone,) = run(trained, 1, 0, None, False, kind, True, ranks=1)
    for stage in (1, 3):
        found = run(trained, 2, stage, tmp_path / str(stage), False, kind, True, ranks=2)
        torch.testing.assert_close(found[0], alone, rtol=2e-5, atol=0)
        whole = torch.load(tmp_path / str(stage) / f"2 {stage} False.bin")
        names = [name for name in whole if name.startswith("a.experts.")]
        assert all(torch.equal(whole[name], whole[f"b{name[1:]}"]) for name in names)
        assert all(len(whole[name]) == EXPERTS for name in names if kind == "stacked")


def shared_across(how: str) -> None:
    model = Net()
    if how == "experts":
        model.a.experts["3"][0].weight = model.a.experts["0"][0].weight  # type: ignore[index, union-attr]
    else:
        model.last.weight = model.a.experts["3"][2].weight  # type: ignore[index, union-attr]
    initialize(model=model, config=settings(2, 1))


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("experts", r"a.experts.0.0.weight is shared by experts of several ranks"),
        ("dense", r"last.weight is an expert's, and Linear has it too"),
    ],
)
def test_a_parameter_that_two_ranks_would_train_apart(how: str, says: str) -> None:
    with pytest.raises(launch.RankError, match=says):
        run(shared_across, how, ranks=2)


class Marked(nn.Module):
    """Experts that have one name on all ranks, as those of a stranger's layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.dense = nn.Linear(4, 4)
        torch.manual_seed(torch.distributed.get_rank() % 2)
        self.expert = nn.Linear(4, 1)
        for p in self.expert.parameters():
            p.allreduce, p.group_name = False, "ep_size_2"  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.expert(self.dense(x)).square().mean()
        return out


def marked(stage: int, folder: Path, save: bool) -> dict[str, Tensor]:
    engine, *_ = initialize(model=Marked(), config=settings(None, stage))
    if save:
        steps(engine, 0, 1)
        engine.save_checkpoint(folder)
    else:
        engine.load_checkpoint(folder)
    return {name: w.clone() for name, w in engine.module.state_dict().items()}


def test_experts_of_one_name_are_each_rank_s_own_in_a_checkpoint(tmp_path: Path) -> None:
    saved = run(marked, 1, tmp_path, True, ranks=4)
    assert not torch.equal(saved[0]["expert.weight"], saved[1]["expert.weight"])
    for ranks, stage in ((4, 0), (2, 3)):
        for there, here in zip(saved, run(marked, stage, tmp_path, False, ranks=ranks), strict=False):
            assert all(torch.equal(there[name], here[name]) for name in there)


def saved_as_one(folder: Path) -> None:
    engine, *_ = initialize(model=Marked(), config=settings(None, 1))
    engine.save_16bit_model(folder)


def test_experts_of_one_name_are_no_whole_model(tmp_path: Path) -> None:
    with pytest.raises(launch.RankError, match=r"expert.weight: the model itself has split it"):
        run(saved_as_one, tmp_path, ranks=2)


def second_engine(stages: tuple[int, int], copied: bool) -> tuple[list[float], list[float]]:
    """The norm after one step by an engine that went on, and by a second one."""
    engine, *_ = initialize(model=Net(), config=settings(2, stages[0]))
    steps(engine, 0, 1)
    model = copy.deepcopy(engine.module) if copied else engine.module
    if not copied:
        engine.destroy()
    second, *_ = initialize(model=model, config=settings(None if copied else 2, stages[1]))
    found = steps(second, 1, 2)
    control, *_ = initialize(model=Net(), config=settings(2, 1))
    return found, steps(control, 0, 2)[1:]


@pytest.mark.parametrize(
    ("stages", "copied"), [((1, 1), True), ((1, 2), False), ((2, 3), False), ((3, 3), False), ((3, 0), False)]
)
def test_a_second_engine_has_the_same_experts(stages: tuple[int, int], copied: bool) -> None:
    found, expected = run(second_engine, stages, copied, ranks=2)[0]
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=0)


def at_another_ep() -> None:
    engine, *_ = initialize(model=Net(), config=settings(2, 1))
    engine.destroy()
    initialize(model=engine.module, config=settings(4, 1))


def test_experts_are_dealt_out_once() -> None:
    with pytest.raises(launch.RankError, match=r"autoep_size = 4: the experts are dealt out to 2 ranks already"):
        run(at_another_ep, ranks=4)


def of_gpt(ep: int, balance: float, every: int, more: dict[str, Any]) -> list[float]:
    """Gradient norms of two steps."""
    torch.manual_seed(7)
    shape = GPTConfig(vocab=31, context=8, width=16, layers=2, heads=2)
    model = mixtures(GPT(shape), EXPERTS, Routing(k=2), every=every, balance=balance, z=balance)
    engine, *_ = initialize(model=model, config=settings(ep, 1, **more))
    norms = []
    for step in range(2):
        ids = torch.randint(31, (BATCH, 9), generator=torch.Generator().manual_seed(step))
        mine = ids.chunk(engine.axes.feeds)[engine.axes.feed]
        engine.train_batch(iter([(mine[:, :-1], mine[:, 1:])]))
        norms.append(engine.stage.grad_norm)
    return norms


@pytest.mark.parametrize(
    ("balance", "every", "ep", "more"),
    [
        (1.0, 1, 1, {"tensor_parallel": {"autotp_size": 2}}),  # the losses are means over all tokens of a rank
        (0.0, 2, 2, {"tensor_parallel": {"autotp_size": 2}}),
        (0.0, 1, 2, {"pipeline": {"stages": 2}}),
        (0.0, 2, 2, {"pipeline": {"stages": 2}}),
        (1.0, 1, 1, {"pipeline": {"stages": 2}}),  # of all stages
        (1.0, 1, 1, {"pipeline": {"stages": 2}, "tensor_parallel": {"autotp_size": 2}}),
    ],
)
def test_gpt_s_mixtures_beside_other_axes(balance: float, every: int, ep: int, more: dict[str, Any]) -> None:
    (alone,) = run(of_gpt, 1, balance, every, {}, ranks=1)
    found = run(of_gpt, ep, balance, every, more, ranks=ep * 2 ** len(more))
    torch.testing.assert_close(found[0], alone, rtol=5e-5, atol=0)


def test_losses_of_mixtures_that_the_last_stage_has_not() -> None:
    """Over context ranks the loss is weighted by tokens that only the last stage knows."""
    more = {"pipeline": {"stages": 2}, "sequence_parallel_size": 2}
    with pytest.raises(launch.RankError, match=r"inside a TokenMean.*other stages' would be lost \(balance=0.5, z=0.5"):
        run(of_gpt, 1, 0.5, 1, more, ranks=4)


def one_expert_trained(ep: int, stage: int, alone: bool) -> list[float]:
    """Of the second mixture one expert, and of everything else all or nothing."""
    model = Net()
    for name, p in model.named_parameters():
        p.requires_grad_(name.startswith("b.experts.0") or not (alone or ".experts." in name))
    engine, *_ = initialize(model=model, config=settings(ep, stage))
    return steps(engine, 0, 2)


@pytest.mark.parametrize("alone", [True, False])
def test_one_expert_is_trained(alone: bool) -> None:
    """Nothing of it is on the other rank, whose tokens train it all the same."""
    (expected,) = run(one_expert_trained, 1, 0, alone, ranks=1)
    for stage in (0, 2):
        found = run(one_expert_trained, 2, stage, alone, ranks=2)
        torch.testing.assert_close(found[0], expected, rtol=2e-5, atol=0)
    with pytest.raises(launch.RankError, match=r"stage = 3: b.experts has frozen experts on some ranks alone"):
        run(one_expert_trained, 2, 3, alone, ranks=2)
