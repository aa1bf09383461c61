"""Tensors that `state_dict()` gives: what is saved of a few of them is theirs alone, and all are the model's memory."""

import pickle
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import worlds
from training import STAGES, Net

from refimpl.zero.loop import alone


def saved_by_hand(kind: str) -> None:
    model = Net()
    stage = STAGES[kind](model, torch.optim.AdamW(model.parameters()))
    state = model.state_dict()
    for name, tensor in {**state, **model.blocks[0].state_dict(prefix="blocks.0.")}.items():
        assert len(pickle.dumps(tensor)) < tensor.nbytes + 1000, name
    storages = {name: tensor.untyped_storage() for name, tensor in state.items()}
    same = [name for name in state if storages[name].data_ptr() == storages["head.weight"].data_ptr()]
    assert same == ["embed.weight", "head.weight"], "a tied weight is one, as in torch, and nothing else is"
    assert storages["embed.weight"]._cdata == storages["head.weight"]._cdata
    for name, p in model.named_parameters():
        state[name].fill_(3)
        assert torch.equal(p, torch.full_like(p, 3)), name
        assert model.state_dict(keep_vars=True)[name] is p
    model.head.weight.data.fill_(4)
    assert torch.equal(model.state_dict()["embed.weight"], torch.full_like(model.head.weight, 4))
    state = model.state_dict()
    stage.parked.send(["lp_params"])  # on a GPU their memory goes, and comes back elsewhere
    assert state["norm.weight"].untyped_storage()._cdata == model.norm.weight.untyped_storage()._cdata
    stage.release()


@pytest.mark.parametrize("kind", ["ddp", "zero1", "zero2"])
def test_each_has_a_storage_of_its_own_over_the_same_memory(kind: str) -> None:
    worlds.run(saved_by_hand, kind, ranks=2)


def written_on_one_rank(kind: str) -> None:
    model = Net()
    stage = STAGES[kind](model, torch.optim.AdamW(model.parameters()))
    given = model.state_dict()["norm.weight"]
    if stage.group.rank == 1:
        given.zero_()
    model(torch.arange(6).view(2, 3)).sum().backward()
    with pytest.raises(ValueError, match=r"written in place .* on some ranks alone: rank 1: norm.weight;"):
        stage.step()


@pytest.mark.parametrize("kind", ["ddp", "zero1", "zero2"])
def test_who_writes_to_one_on_a_rank_alone_is_told(kind: str) -> None:
    worlds.run(written_on_one_rank, kind, ranks=2)


def test_on_a_gpu_that_is_not_the_current_one_it_is_so_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch gives away no other GPU's memory ("Can't export tensors on a different CUDA device index")."""
    current = [torch.device("cuda", 0)]

    @contextmanager
    def device(chosen: torch.device) -> Any:
        current.append(chosen)
        yield
        current.pop()

    def given_away(view: Any) -> object:
        assert view.device == current[-1]
        return view

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(alone, "from_dlpack", given_away)
    view: Any = SimpleNamespace(is_cuda=True, device=torch.device("cuda", 1), shape=(1,), data_ptr=lambda: 0)
    shown: Any = SimpleNamespace(view=lambda p, tensor: tensor)
    hooks = alone.Alone()
    hooks.given = {}  # type: ignore[assignment]
    assert hooks.alone(torch.nn.Parameter(), view, shown) is view
    assert len(current) == 1
