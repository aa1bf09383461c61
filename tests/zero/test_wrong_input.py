"""What a stranger hands over by mistake is refused at once, by name, and changes nothing; what is right is taken."""

import copy
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from training import STAGES
from worlds import run

from refimpl.checkpoint.errors import CheckpointError, together
from refimpl.comm.group import Group
from refimpl.launch import RankError
from refimpl.offload.homes import Disk, Host
from refimpl.optim.lamb import Lamb
from refimpl.zero.config import ZeroConfig
from refimpl.zero.gather.order import RankDivergence
from refimpl.zero.stage import Stage


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 3))


def built(
    stage: str, kind: Any = torch.optim.AdamW, **options: Any
) -> tuple[nn.Sequential, torch.optim.Optimizer, Stage]:
    model = small()
    optimizer = kind(model.parameters())
    return model, optimizer, STAGES[stage](model, optimizer, config=ZeroConfig(**options))


def backward(model: nn.Module) -> None:
    model(torch.ones(2, 5)).sum().backward()


def misshapen(stage_name: str) -> None:
    """Views of the same memory, and values that would be broadcast or cut."""
    model, optimizer, stage = built(stage_name)
    weight = model[0].weight
    if stage_name != "zero3":  # there it has no values now
        for other in (weight.data[:3], weight.data.t(), weight.data.view(25)):
            with pytest.raises(RuntimeError, match=r"parameter 0\.weight"):
                weight.data = other
        weight.data = weight.data
    for arrived in (False, True):
        if arrived:
            backward(model)
        for shape in ((), (1, 5), (30,)):
            with pytest.raises(ValueError, match=r"0\.weight\.grad: a gradient of shape .* for a parameter of shape"):
                weight.grad = torch.ones(shape)
    optimizer.step()
    with pytest.raises(ValueError, match=r"a value of shape \(30,\) for a parameter of shape \(5, 5\)"):
        stage.set_full_state("0.weight", "exp_avg", torch.ones(30))
    with pytest.raises(ValueError, match=r"state 'step' of 0\.weight has no element for each"):
        stage.set_full_state("0.weight", "step", torch.tensor(9.0))
    assert all(stage.full_state(name, "step") == 1 for name in stage.names.values())
    part = stage.read_local("0.weight")
    assert part is not None
    for shape in ((), (1, 5), (30,)):
        with pytest.raises(ValueError, match=r"0\.weight: a value of shape .* for a parameter of shape \(5, 5\)"):
            stage.set_full_parameter("0.weight", torch.ones(shape))
    for key in ("", "exp_avg"):
        with pytest.raises(ValueError, match=rf"0\.weight: 26 elements for this rank's part of {part.numel()}"):
            stage.write_local("0.weight", torch.ones(26), key)
    no_such = r"no state 'exp_agv' of 0\.weight: take a step first, if the name is right"
    with pytest.raises(KeyError, match=no_such):
        stage.set_full_state("0.weight", "exp_agv", torch.ones(5, 5))
    with pytest.raises(KeyError, match=no_such):
        stage.write_local("0.weight", part, "exp_agv")


@pytest.mark.parametrize("stage", STAGES)
def test_a_value_of_another_shape_is_refused(stage: str) -> None:
    run(misshapen, stage, ranks=3)


def untrained(stage_name: str) -> None:
    model = small()
    model[0].requires_grad_(False)
    stage = STAGES[stage_name](model, torch.optim.AdamW(model.parameters()))
    backward(model)
    for ask in (stage.local_gradient, stage.read_local, lambda name: stage.write_local(name, torch.ones(25))):
        with pytest.raises(RuntimeError, match=r"0\.weight is not trained"):
            ask("0.weight")
    assert stage.full_state("0.weight", "exp_avg") is None


@pytest.mark.parametrize("stage", STAGES)
def test_what_is_not_trained_is_told_by_name(stage: str) -> None:
    run(untrained, stage, ranks=2)


def uncut_states() -> None:
    """Of Adafactor's rows and columns, and of LAMB on a rank that has nothing but padding."""
    model, optimizer, stage = built("ddp", torch.optim.Adafactor)
    backward(model)
    optimizer.step()
    row, column = (stage.full_state("0.weight", key) for key in ("row_var", "col_var"))
    assert row is not None
    assert column is not None
    assert (row.shape, column.shape) == ((5, 1), (1, 5))
    for state in optimizer.state.values():
        state["lines"] = torch.arange(3.0)  # as long as nothing of the parameter is
    assert torch.equal(stage.full_state("0.weight", "lines"), torch.arange(3.0))
    model, optimizer, stage = built("zero1", Lamb)
    with pytest.raises(KeyError, match="take a step first"):
        stage.set_full_state("0.weight", "exp_avg", torch.ones(5, 5))
    backward(model)
    optimizer.step()
    stage.set_full_state("0.weight", "exp_avg", torch.ones(5, 5))
    moment = stage.full_state("0.weight", "exp_avg")
    assert moment is not None
    assert torch.equal(moment, torch.ones(5, 5))


def test_a_state_that_is_not_cut_like_its_parameter_is_given_as_it_is() -> None:
    run(uncut_states, ranks=3)


def others_state(stage_name: str) -> None:
    """Of other buckets, of another model, of no stage: the one that is here stays."""
    model, optimizer, stage = built(stage_name)
    backward(model)
    optimizer.step()
    before = copy.deepcopy(stage.state_dict())
    wide = nn.Sequential(nn.Linear(5, 500), nn.Linear(500, 3))
    other = STAGES[stage_name](wide, torch.optim.AdamW(wide.parameters()))
    backward(wide)
    other.optimizer.step()
    for state, said in ((other.state_dict(), "from other buckets"), (model.state_dict(), "stage = None")):
        with pytest.raises(ValueError, match=said):
            stage.load_state_dict(state)
    after = stage.state_dict()
    assert all(map(torch.equal, before["masters"], after["masters"]))
    stage.load_state_dict(before)


@pytest.mark.parametrize("stage", ["ddp", "zero1", "zero3"])
def test_a_state_of_other_buckets_is_refused_before_anything_changes(stage: str) -> None:
    run(others_state, stage, ranks=2)


def named_and_expanded(stage_name: str) -> None:
    """`named_parameters` in the optimizer's groups; a buffer and a parameter whose elements share memory, and a buffer
    that does not lie row by row."""
    model = small()
    named, mine = list(model.named_parameters()), torch.full((1, 3), float(dist.get_rank()))
    model.register_buffer("mask", mine.expand(4, 3))
    model.register_buffer("turned", mine.repeat(4, 1).t())
    model.register_parameter("frozen", nn.Parameter(mine.clone().expand(4, 3), requires_grad=False))
    optimizer = torch.optim.AdamW(named[:2])
    stage = STAGES[stage_name](model, optimizer)
    assert torch.equal(model.turned, torch.zeros(3, 4)), "before any forward shares it"
    optimizer.add_param_group({"params": named[2:], "lr": 0.1})
    before = stage.full_parameter("2.weight")
    for _ in range(2):
        backward(model)
        optimizer.step()
    assert not torch.equal(stage.full_parameter("2.weight"), before)
    assert [group["param_names"] for group in optimizer.param_groups] == [
        ["0.weight", "0.bias"],
        ["2.weight", "2.bias"],
    ]
    state = model.state_dict()
    assert all(torch.equal(state[name], torch.zeros(4, 3)) for name in ("mask", "frozen"))  # rank 0's


@pytest.mark.parametrize("stage", STAGES)
def test_named_groups_and_expanded_memory_are_taken(stage: str) -> None:
    run(named_and_expanded, stage, ranks=2)


def test_a_configuration_that_would_mean_something_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="gradient_allreduce_op = 'avg': must be mean or sum"):
        ZeroConfig(gradient_allreduce_op="avg")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="gradient_clipping = nan"):
        ZeroConfig(gradient_clipping=float("nan"))
    with pytest.raises(TypeError, match=r"give several, \('Linear',\)"):
        ZeroConfig(leaf_modules="Linear")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"optimizer_home = 'cpu': give Host\(\) or Disk\(folder\)"):
        ZeroConfig(optimizer_home="cpu")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="gradient_home = Disk needs a Disk as optimizer_home"):
        ZeroConfig(optimizer_home=Host(), gradient_home=Disk(tmp_path))


def bare(stage_name: str) -> None:
    model = small()
    STAGES[stage_name](model.parameters(), torch.optim.AdamW(model.parameters()))


def test_zero3_asks_for_a_module() -> None:
    run(bare, "zero2", ranks=2)
    with pytest.raises(RankError, match="gathers parameters around the calls of modules"):
        run(bare, "zero3", ranks=2)


def of_a_leaf(stage_name: str) -> None:
    leaf = torch.ones(3, requires_grad=True)  # which torch's optimizers take
    STAGES[stage_name]([leaf], torch.optim.SGD([leaf]))  # type: ignore[list-item]


@pytest.mark.parametrize("what", ["parameter", "buffer"])
def test_what_is_not_dense_is_refused_by_name(what: str) -> None:
    """A graph's edges ended in "unsupported memory format option Contiguous"."""
    model, edges = nn.Sequential(nn.Linear(3, 3)), torch.eye(3).to_sparse()
    if what == "buffer":
        model[0].register_buffer("edges", edges)
    else:
        model[0].edges = nn.Parameter(edges)
    for stage in STAGES.values():
        with pytest.raises(TypeError, match=rf"^{what} 0\.edges is torch\.sparse_coo.* in a plain attribute"):
            stage(model, torch.optim.SGD(model[0].parameters(), lr=0.1), Group(None))


def test_bare_parameters_are_parameters() -> None:
    with pytest.raises(RankError, match="model: a Tensor among its parameters"):
        run(of_a_leaf, "zero1", ranks=2)


def in_a_group_of_its_own() -> list[str]:
    """Of the ranks 1 and 2 of three, one fails alone, one has another model, and one goes another way."""
    ranks = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        return []
    group, model = Group(ranks), small()

    def fails() -> None:
        if dist.get_rank() == 2:
            raise CheckpointError("its disk")

    with pytest.raises(CheckpointError) as failed:
        together(group, fails)
    with pytest.raises(ValueError, match="have different models") as differs:
        STAGES["ddp"](larger := nn.Linear(5, dist.get_rank()), torch.optim.AdamW(larger.parameters()), group)
    STAGES["zero3"](model, torch.optim.AdamW(model.parameters()), group)
    with pytest.raises(RankDivergence) as parted:
        model[2 if dist.get_rank() == 2 else 0](torch.ones(2, 5))
    return [str(failed.value), str(differs.value), str(parted.value)]


def test_a_rank_is_called_by_its_number_in_the_job() -> None:
    _, *texts = run(in_a_group_of_its_own, ranks=3)
    for failed, differs, parted in texts:
        assert failed == "rank 2: its disk"
        assert "rank 1: weight [1, 5]" in differs
        assert "rank 2: weight [2, 5]" in differs
        assert "rank 1: a new forward of 0" in parted
        assert "rank 2: a new forward of 2" in parted


class Unsaveable(nn.Module):
    """A module of somebody's whose state is not ready when it is first asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.is_ready = nn.Parameter(torch.ones(5)), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale

    def get_extra_state(self) -> int:
        if not self.is_ready:
            raise ValueError("not ready")
        return 1

    def set_extra_state(self, state: int) -> None:
        """Nothing."""


def interrupted_save() -> None:
    group, last = Group.world(), Unsaveable()
    model = nn.Sequential(small()[:1], last)
    stage = STAGES["zero3"](model, torch.optim.AdamW(model.parameters()))
    with pytest.raises(ValueError, match="not ready"):
        model.state_dict()
    with pytest.raises(RuntimeError, match="needs its values"):  # and no NaN
        last.scale.sum()
    with pytest.raises(ValueError, match="not ready") if group.rank == 0 else nullcontext():
        stage.full_state_dict()
    last.is_ready = True
    assert torch.equal(model.state_dict()["1.scale"], torch.ones(5))  # which every rank helps to gather
    assert torch.equal(model(torch.ones(2, 5)), model(torch.ones(2, 5)))


def test_a_save_that_raises_leaves_nothing_behind() -> None:
    run(interrupted_save, ranks=2)
