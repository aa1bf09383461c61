"""A model built sharded: the same bits as built whole, never whole while it is built, writable when gathered."""

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from training import Net, adamw, differing, tokens
from worlds import run

from refimpl.comm.group import Group
from refimpl.launch import RankError
from refimpl.model.gpt import GPT, GPTConfig
from refimpl.offload.homes import Disk, Host
from refimpl.offload.shelf import HostShelf, Shelf
from refimpl.zero.config import ZeroConfig
from refimpl.zero.gather.unit import unit_of, whole
from refimpl.zero.init import GatheredParameters, Init
from refimpl.zero.parameter import Freed
from refimpl.zero.zero1 import Zero1
from refimpl.zero.zero3 import Zero3


class Fussy(Net):
    """Changes its children's weights in its constructor, and once more by apply."""

    def __init__(self) -> None:
        super().__init__()
        with torch.no_grad():
            self.blocks[0].down.weight.mul_(0.5)
        self.apply(self.set_bias)

    def set_bias(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.normal_(module.bias)


class Parametrized(nn.Module):
    """Of its children's weights it makes parameters of its own, gives one other memory, and keeps a view of one."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = parametrizations.weight_norm(nn.Conv1d(3, 5, 2), dim=2)
        self.square = parametrizations.orthogonal(nn.Linear(5, 5))
        self.inner = nn.Linear(5, 3)
        self.twin = nn.Parameter(self.inner.weight)
        self.register_buffer("first", self.inner.weight.detach()[0])
        self.last = nn.Linear(3, 2)


def built_alike(make: type[nn.Module]) -> bool:
    torch.manual_seed(0)
    whole = make()
    torch.manual_seed(0)
    with Init():
        sharded = make()
    assert all(isinstance(p, Freed) for p in sharded.parameters())
    assert differing(dict(sharded.named_buffers()), dict(whole.named_buffers())) == []  # while no memory is gathered
    with GatheredParameters(sharded):
        return differing(sharded.state_dict(), whole.state_dict()) == []


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("make", [Net, Fussy, Parametrized])
def test_same_bits_as_built_whole(make: type[nn.Module], ranks: int) -> None:
    assert all(run(built_alike, make, ranks=ranks))


def trained_after_init(sharded: bool) -> dict[str, Tensor] | None:
    torch.manual_seed(0)
    with Init(enabled=sharded):
        model = Fussy()
    stage = Zero3(model, adamw(model), Group.world())
    for step in range(3):
        stage.backward(model(tokens(step, stage.group.rank)))
        stage.step()
    return stage.full_state_dict()


def test_trains_to_the_same_bits() -> None:
    plain, sharded = run(trained_after_init, False, ranks=3)[0], run(trained_after_init, True, ranks=3)[0]
    assert plain is not None
    assert differing(sharded, plain) == []


def most_while_built() -> tuple[int, int, int]:
    """Largest number of whole elements at any construction, of the model and of its largest module."""
    most = 0
    models: list[nn.Module] = []
    original = nn.Module.register_parameter

    def spied(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        nonlocal most
        original(self, name, param)
        models.append(self)
        seen = {p for m in models for p in m.parameters(recurse=False) if p.untyped_storage().nbytes() > 4}
        most = max(most, sum(p.numel() for p in seen))

    nn.Module.register_parameter = spied  # type: ignore[method-assign]
    with Init():
        model = GPT(GPTConfig(vocab=64, context=16, width=64, layers=4, heads=2))
    nn.Module.register_parameter = original  # type: ignore[method-assign]
    sizes = [sum(p.numel() for p in m.parameters(recurse=False)) for m in model.modules()]
    return most, sum(p.numel() for p in model.parameters()), max(sizes)


def test_never_whole_while_it_is_built() -> None:
    most, model, module = run(most_while_built, ranks=2)[0]
    assert most <= 2 * module
    assert most < model / 5


def change(modifier_rank: int | None, small: int = 0) -> tuple[Tensor, Tensor]:
    model = Net()
    stage = Zero3(model, adamw(model), Group.world(), ZeroConfig(param_persistence_threshold=small))
    weight = model.blocks[0].up.weight
    with GatheredParameters(weight, modifier_rank=modifier_rank), torch.no_grad():
        weight.fill_(1.0 + stage.group.rank)
    assert (unit_of(weight) is None) == (weight.numel() < small)
    with GatheredParameters(weight):
        seen = weight.detach().clone()
    stage.backward(model(tokens(0, 0)))
    stage.step()  # the update starts from the changed master weights
    with GatheredParameters(weight):
        return seen, weight.detach().clone()


@pytest.mark.parametrize("small", [0, 10**6])
def test_the_modifier_ranks_change_is_kept(small: int) -> None:
    """Also of a parameter that is small enough to stay whole."""
    for seen, stepped in run(change, 1, small, ranks=2):
        assert torch.equal(seen, torch.full_like(seen, 2.0))
        assert bool(((stepped - 2.0).abs() < 0.1).all())


def change_small(writer: int, dtype: torch.dtype) -> list[Tensor]:
    """Rank `writer` alone writes a weight that is cut, its bias, which is whole everywhere, and a frozen bias."""
    model = Net().to(dtype)
    stage = Zero3(model, adamw(model), Group.world(), ZeroConfig(param_persistence_threshold=100))
    params = [model.blocks[0].up.weight, model.blocks[0].up.bias, model.frozen.bias]
    assert [unit_of(p) is None for p in params] == [False, True, True]
    with GatheredParameters(params, modifier_rank=1), torch.no_grad():
        for p in params if stage.group.rank == writer else []:
            p.data.fill_(2.0)
    stage.backward(model(tokens(0, stage.group.rank)))
    stage.step()
    return [stage.full_parameter(p) for p in params]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ranks", [2, 3])
def test_small_parameters_become_the_modifier_ranks_too(ranks: int, dtype: torch.dtype) -> None:
    for weight, bias, frozen in run(change_small, 1, dtype, ranks=ranks):
        assert ((weight - 2).abs() < 0.1).all()
        assert ((bias - 2).abs() < 0.1).all()
        assert (frozen == 2).all()


def test_a_small_one_that_the_modifier_rank_has_not_written_is_an_error() -> None:
    lost = "blocks.0.up, blocks.0.up.bias, frozen.bias were written here, which is lost: rank 1"
    with pytest.raises(RankError, match=lost):
        run(change_small, 0, torch.float32, ranks=2)


def change_in_an_inner_block(outer: int | None) -> Tensor:
    """What rank 1 alone writes in a block without modifier_rank, of which there is another around."""
    with Init():
        layer = nn.Linear(3, 4)
    rank = Group.world().rank
    with GatheredParameters(layer, modifier_rank=outer), torch.no_grad():
        if rank == 1:
            with GatheredParameters(layer.weight):
                layer.weight.fill_(2.0)
    with GatheredParameters(layer):
        return layer.weight.detach().clone()


def test_the_outer_block_says_whose_changes_are_kept() -> None:
    """transformers' PatchTST initializes so."""
    assert all(bool((weight == 2).all()) for weight in run(change_in_an_inner_block, 1, ranks=2))
    with pytest.raises(RankError, match=r"rank 1 raised(.|\n)*parameters of Linear were written"):
        run(change_in_an_inner_block, None, ranks=2)


def test_without_a_modifier_a_change_is_an_error() -> None:
    with pytest.raises(RankError, match=r"parameters of blocks.0.up were written.*modifier_rank=0"):
        run(change, None, ranks=2)


def merged(scale: float, dtype: torch.dtype) -> tuple[Tensor, int]:
    """The weights after three steps, before each of which an adapter is merged and, at `scale`, unmerged; warnings."""
    seen = 0
    model = Net().to(dtype)
    stage = Zero3(model, adamw(model), Group.world(), ZeroConfig(param_persistence_threshold=0))
    weight = model.blocks[0].up.weight
    adapter = torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)).to(dtype) / 8
    for step in range(3):
        told = warnings.catch_warnings(record=True)
        with told as words, GatheredParameters(list(model.parameters())):
            warnings.simplefilter("always")
            before = weight.detach().clone()
            weight.data += adapter
            assert not torch.equal(weight, before)
            weight.data -= scale * adapter
            if scale == 0:
                weight.data = before
        assert all("of blocks.0.up was taken back but for rounding, which is dropped" in str(w.message) for w in words)
        assert not (words and scale == 0)
        seen += len(words)
        stage.backward(model(tokens(step, stage.group.rank)))
        stage.step()
    return stage.full_parameter(weight), seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_taken_back_is_no_change(dtype: torch.dtype) -> None:
    """TRL's trainers send merged weights to vLLM so. Exactly or but for rounding: the bits that the ranks own stay."""
    rounded, exact = (run(merged, scale, dtype, ranks=3) for scale in (1.0, 0.0))
    assert all(torch.equal(weight, exact[0][0]) for weight, _ in [*rounded, *exact])
    assert sum(told for _, told in rounded) > 0 == sum(told for _, told in exact)
    with pytest.raises(RankError, match=r"parameters of blocks.0.up were written, which is lost"):
        run(merged, 0.5, dtype, ranks=3)


def written_to_data(where: str) -> None:
    """By rank 1; in the first two cases in what rank 0 owns of it: no checksum of its own shard tells it."""
    group = Group.world()
    model = nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 1))
    Zero3(model, torch.optim.SGD(model.parameters(), lr=0.1), group, ZeroConfig(param_persistence_threshold=0))
    weight = model[0].weight

    def write(*_: Any) -> None:
        if group.rank == 1:
            weight.data[0] = 1

    if where == "forward":
        model[0].register_forward_pre_hook(write)
        model(torch.ones(2, 8))
    elif where == "block":
        with GatheredParameters(weight):
            write()
    elif where == "other memory":
        with GatheredParameters(weight):
            weight.data = torch.zeros_like(weight) if group.rank == 1 else weight.data
    elif where == "other memory in forward":
        with whole([weight]):
            weight.data = torch.zeros_like(weight) if group.rank == 1 else weight.data
    else:
        for both in (True, False):
            with GatheredParameters(weight, modifier_rank=0):
                if both or group.rank == 1:
                    weight.data.fill_(group.rank)


class Filled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 3)
        self.inner.weight.data = torch.ones(3, 4)


def test_a_constructor_gives_what_it_has_made_other_values() -> None:
    with Init(Group.world()):
        weight = Filled().inner.weight
    assert weight.type() == "torch.FloatTensor"  # a word, for which it need not be whole
    with GatheredParameters(weight):
        assert torch.equal(weight, torch.ones(3, 4))


def replaced(ranks_write: bool) -> list[Tensor]:
    """Two weights get other memory, one of them its old memory again; the weights after a step."""
    model = Net()
    stage = Zero3(model, adamw(model), Group.world(), ZeroConfig(param_persistence_threshold=0))
    up, down = model.blocks[0].up.weight, model.blocks[0].down.weight
    before = stage.full_parameter(down)
    with GatheredParameters([up, down], modifier_rank=0):
        old, swapped = up.data, down.data
        was = old.clone()
        if ranks_write or stage.group.rank == 0:
            up.data = torch.full_like(up, 2.0)
            assert bool((up == 2).all())
        down.data = torch.zeros_like(down)
        assert not bool(down.any())
        down.data = swapped
        assert torch.equal(old, was)
    assert torch.equal(stage.full_parameter(down), before)
    stage.backward(model(tokens(0, stage.group.rank)))
    stage.step()
    return [stage.full_parameter(p) for p in (up, down)]


@pytest.mark.parametrize("ranks_write", [True, False])
@pytest.mark.parametrize("ranks", [2, 3])
def test_in_a_block_a_parameter_may_get_other_memory(ranks: int, ranks_write: bool) -> None:
    """As PEFT's DoRA, IA3 and others do where they merge: `weight.data = new`."""
    results = run(replaced, ranks_write, ranks=ranks)
    for up, down in results:
        assert bool(((up - 2.0).abs() < 0.1).all())
        assert torch.equal(down, results[0][1])


LOST = {
    "other memory": "of 0 were written, which is lost without modifier_rank",
    "other memory in forward": "of 0 was written while it was gathered",
    "block": "of 0 were written, which is lost without modifier_rank",
    "forward": "of 0 was written while it was gathered",
    "other rank": "of 0 were written here, which is lost: rank 0, whose changes are kept, has made none",
}


@pytest.mark.parametrize("where", list(LOST))
def test_what_is_written_to_data_and_lost_is_an_error(where: str) -> None:
    with pytest.raises(RankError, match=f"rank 1 raised(.|\\n)*{LOST[where]}"):
        run(written_to_data, where, ranks=2)


def unsettled() -> list[float]:
    """Who writes to `p.data` between forward and backward is not in autograd's way, as in torch."""
    model = nn.Linear(3, 1, bias=False)
    stage = Zero1(model, torch.optim.SGD(model.parameters(), lr=1.0), Group.world())
    x = torch.ones(1, 3, requires_grad=True)
    loss = model(x).sum()
    model.weight.data.zero_()
    stage.backward(loss)
    stage.step()
    assert x.grad is not None
    return [*x.grad.flatten().tolist(), *model.weight.flatten().tolist()]


def test_autograd_does_not_look_at_data() -> None:
    assert run(unsettled, ranks=2) == [[0.0, 0.0, 0.0, -1.0, -1.0, -1.0]] * 2


def read_without_a_change() -> bool:
    with Init():
        layer = nn.Linear(3, 4)
    with GatheredParameters(layer, modifier_rank=0), torch.no_grad():
        layer.weight.fill_(float("nan"))
    with GatheredParameters(layer):  # memory that nobody has set may hold NaN
        return bool(layer.weight.isnan().all())


def test_nan_is_no_change() -> None:
    assert all(run(read_without_a_change, ranks=2))


def born_with_state(sharded: bool) -> Tensor:
    """Adagrad's constructor makes its state, like the parameters, of which each rank has a part by then."""
    torch.manual_seed(0)
    with Init(enabled=sharded):
        model = nn.Linear(5, 7)
    optimizer = torch.optim.Adagrad(model.parameters(), initial_accumulator_value=0.5)
    stage = Zero3(model, optimizer, Group.world(), ZeroConfig(param_persistence_threshold=0))
    for _ in range(2):
        stage.backward(model(torch.ones(1, 5)).sum())
        stage.step()
    return torch.cat([stage.full_parameter("weight"), stage.full_state("weight", "sum")])


def test_an_optimizer_that_is_born_with_state() -> None:
    expected = run(born_with_state, False, ranks=2)
    assert all(map(torch.equal, run(born_with_state, True, ranks=2), expected))


def trained_in_a_block(held: bool, alone: bool) -> list[Tensor]:
    """The weights after three steps whose forward and backward run while all is whole; `alone`: rank 0 looks, too."""
    torch.manual_seed(0)
    group = Group.world()
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    stage = Zero3(model, optimizer, group, ZeroConfig(param_persistence_threshold=0))
    for step in range(3):
        x = torch.randn(2, 5, generator=torch.Generator().manual_seed(10 * step + group.rank))
        with GatheredParameters(model) if held else nullcontext():
            if alone and group.rank == 0:
                with torch.no_grad():
                    assert model(x).isfinite().all()
            model(x).square().mean().backward()
        assert all(unit.is_free for unit in stage.units)
        optimizer.step()
    return [stage.full_parameter(name) for name in ("0.weight", "2.bias")]


@pytest.mark.parametrize("ranks", [2, 3])
def test_what_is_held_is_neither_gathered_nor_freed(ranks: int) -> None:
    usual = run(trained_in_a_block, False, False, ranks=ranks)[0]
    for alone in (False, True):
        for found in run(trained_in_a_block, True, alone, ranks=ranks):
            assert all(map(torch.equal, found, usual))


def loaded_by_hand(of_a_stage: bool, on_all: bool, singly: bool = False) -> bool:
    """Module by module, as transformers and Lightning load a file: on rank 0 alone, or `load_state_dict` on every rank.

    `Module._load_from_state_dict` begins what `load_state_dict` would end. `singly`: a parameter at a time, the others
    of its module in shards, as transformers 5 loads the experts that it merges.
    """
    torch.manual_seed(1)
    source = Net().state_dict()
    torch.manual_seed(0)
    with nullcontext() if of_a_stage else Init():
        model = Net()
    group = Zero3(model, adamw(model), Group.world()).group if of_a_stage else Group.world()
    for path, module in model.named_modules():
        prefix = path + "." if path else ""
        own = dict(module.named_parameters(recurse=False))
        for names in [[name] for name in own] if singly else [list(own)]:
            with GatheredParameters([own[name] for name in names], modifier_rank=0):
                if on_all:
                    module.load_state_dict({name: source[prefix + name] for name in names}, strict=False)
                elif group.rank == 0:
                    given = {prefix + name: source[prefix + name] for name in names}
                    module._load_from_state_dict(given, prefix, {}, True, [], [], [])
    assert all(isinstance(p, Freed) for p in model.parameters())
    return differing(model.state_dict(), source) == []


@pytest.mark.parametrize("on_all", [False, True])
def test_loading_a_parameter_at_a_time(on_all: bool) -> None:
    assert all(run(loaded_by_hand, False, on_all, True, ranks=2))


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("of_a_stage", [False, True])
@pytest.mark.parametrize("on_all", [False, True])
def test_loading_inside_a_block_leaves_nothing_whole(on_all: bool, of_a_stage: bool, ranks: int) -> None:
    assert all(run(loaded_by_hand, of_a_stage, on_all, ranks=ranks))


def loaded_without_a_block() -> None:
    model = Net()
    Zero3(model, adamw(model), Group.world())
    state = model.state_dict()
    model.load_state_dict(state)
    for path, module in model.named_modules():
        module._load_from_state_dict(state, path + "." if path else "", {}, True, [], [], [])


def test_loading_by_hand_without_a_block_is_refused() -> None:
    with pytest.raises(RankError, match=r"_load_from_state_dict of a sharded module, called by hand.*load_state_dict"):
        run(loaded_without_a_block, ranks=2)


class Skipping(nn.Module):
    """Built by `skip_init`: on the meta device first, with memory that nobody has written afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.utils.skip_init(nn.Linear, 5, 7)
        self.two = nn.utils.skip_init(nn.Bilinear, 7, 7, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.one(x).tanh()
        return self.two(y, y).square().mean()


def skipped_init() -> bool:
    with Init():
        model = Skipping()
    assert all(isinstance(p, Freed) for p in model.parameters())
    source = {
        name: torch.randn(p.shape, generator=torch.Generator().manual_seed(3)) for name, p in model.named_parameters()
    }
    model.load_state_dict(source)
    twin = Skipping()
    twin.load_state_dict(source)
    stage = Zero3(model, adamw(model), Group.world())
    stage.backward(model(torch.ones(2, 5)))
    stage.step()
    optimizer = adamw(twin)
    twin(torch.ones(2, 5)).backward()
    optimizer.step()
    return all(torch.allclose(model.state_dict()[name], p, atol=1e-6) for name, p in twin.named_parameters())


@pytest.mark.parametrize("ranks", [2, 3])
def test_skip_init(ranks: int) -> None:
    assert all(run(skipped_init, ranks=ranks))


def kept_views() -> bool:
    """What a script keeps of a block without a copy, while a graph waits for its backward, and after a step."""
    torch.manual_seed(0)
    group = Group.world()
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    twin = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    stage = Zero3(model, torch.optim.SGD(model.parameters(), lr=0.1), group, ZeroConfig(param_persistence_threshold=0))
    twin.load_state_dict(model.state_dict())
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    for _ in range(3):
        x = torch.randn(2, 5, requires_grad=True)
        loss = model(x).square().mean()
        with GatheredParameters(model):
            kept = {name: p.data.cpu() for name, p in model.named_parameters()}
        assert differing(kept, twin.state_dict()) == []
        stage.backward(loss)
        stage.step()
        assert differing(kept, twin.state_dict()) == []
        for rank in range(group.size):
            theirs = x.detach().clone()
            group.broadcast(theirs, rank)
            (twin(theirs).square().mean() / group.size).backward()
        optimizer.step()
        optimizer.zero_grad()
        stepped = model.state_dict()
        assert all(torch.allclose(stepped[name], p, atol=1e-6) for name, p in twin.named_parameters())
        twin.load_state_dict(stepped)  # bit for bit, to compare with the next `kept`
    return all(unit.is_free and not unit.full.untyped_storage().nbytes() for unit in stage.units)


@pytest.mark.parametrize("ranks", [2, 3])
def test_what_is_kept_of_a_block_keeps_its_values(ranks: int) -> None:
    assert all(run(kept_views, ranks=ranks))


class SecondTry(nn.Module):
    """Its first child's constructor raises; the next one's does not."""

    def __init__(self) -> None:
        super().__init__()
        for missing in (True, False):
            try:
                self.attention = Attention(missing)
            except ImportError:
                continue


class Attention(nn.Module):
    def __init__(self, missing: bool) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 4)
        self.codes = nn.Parameter(torch.tensor([1, 300, 70_001]), requires_grad=False)
        if missing:
            raise ImportError("no flash attention here")


def second_try() -> str:
    with Init(dtype=torch.bfloat16):
        model = SecondTry()
    with pytest.raises(ValueError, match="modifier_rank=2, but 2 ranks share"):
        GatheredParameters(model, modifier_rank=2)
    with GatheredParameters(model):
        assert model.attention.proj.weight.dtype == torch.bfloat16
        assert model.attention.codes.tolist() == [1, 300, 70_001]
    with pytest.raises(RuntimeError, match="needs its values") as told:
        model.attention.proj.weight.sum()  # nobody constructs any more: it is not gathered behind the caller's back
    return str(told.value)


def test_a_constructor_that_raises_is_over_and_integers_stay_integers() -> None:
    assert all("before `initialize`" in text for text in run(second_try, ranks=2))


def tied() -> bool:
    """As transformers' `tie_weights` does with a head that has a bias, behind zero.Init."""
    with Init():
        head = nn.Linear(5, 7)
    with GatheredParameters(head):
        before = head.bias.detach().clone()
    head.bias.data = nn.functional.pad(head.bias.data, (0, head.weight.shape[0] - head.bias.shape[0]), "constant", 0)
    for compute in (head.bias.data.mul_, lambda by: nn.functional.pad(head.bias.data, (0, by))):
        with pytest.raises(RuntimeError, match=r"parameter of Linear: (mul_|pad) needs its values"):
            compute(2)
    with GatheredParameters(head):
        return torch.equal(head.bias, before)


def test_data_of_what_is_sharded_has_a_shape_and_no_values() -> None:
    assert all(run(tied))


def test_before_there_is_a_stage_what_is_sharded_lies_nowhere() -> None:
    """transformers' run_clm.py counts a new model by `{p.data_ptr(): p.numel() for p in model.parameters()}`."""
    with Init():
        model = Net()
    assert {p.data_ptr() for p in model.parameters()} == {0}
    with GatheredParameters(model):
        assert 0 not in {p.data_ptr() for p in model.parameters()}
    stage = Zero3(model, adamw(model), Group(None), ZeroConfig())
    with pytest.raises(RuntimeError, match="data_ptr needs its values, and outside its module's forward"):
        model.head.weight.data_ptr()
    stage.release()


def halves(model: nn.Module) -> None:
    model.bfloat16().half()


def a_part(model: nn.Module) -> None:
    model.to(torch.bfloat16)
    for module in model.modules():
        if isinstance(module, nn.LayerNorm | nn.BatchNorm1d):
            module.float()


def one_by_one(model: nn.Module) -> None:
    """The vectors alone, rounded on the way: they share no shard with the matrices beside them."""
    for p in model.parameters():
        if p.ndim < 2:
            p.data = p.data.bfloat16().to(torch.float64)
    model.get_parameter("head.weight").data = model.get_parameter("head.weight").data.type(torch.bfloat16)


class Casting(Net):
    """Casts a child in its constructor, where another one is gathered."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].bfloat16()
        self.register_buffer("scale", self.blocks[0].up.weight.float().abs().amax())
        self.after = nn.BatchNorm1d(5, dtype=torch.float64)
        self.after.weight.data = self.after.weight.data.float()


def cast_alike(cast: Callable[[nn.Module], None]) -> bool:
    """Whether a sharded model and a whole one are the same after `cast`, and after two steps; the sharded, uncalled."""
    models, trained = [], []
    for sharded in (True, False):
        torch.manual_seed(0)
        with Init(enabled=sharded):
            model = Casting()
        sent = Group.world().ledger.sent_bytes()
        cast(model)
        assert Group.world().ledger.sent_bytes() == sent  # no rank needs another for it
        models.append(model)
    ours, theirs = models
    assert {n: p.dtype for n, p in ours.named_parameters()} == {n: p.dtype for n, p in theirs.named_parameters()}
    with GatheredParameters(ours):
        assert differing(ours.state_dict(), theirs.state_dict()) == []  # buffers too
    for model in models:
        model.float()
        stage = Zero3(model, adamw(model), Group.world())
        for step in range(2):
            stage.backward(model(tokens(step, stage.group.rank)))
            stage.step()
        trained.append(stage.full_state_dict())
    return trained[0] is None or differing(*trained) == []


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("cast", [halves, a_part, one_by_one])
def test_cast_in_shards_as_whole(cast: Callable[[nn.Module], None], ranks: int) -> None:
    assert all(run(cast_alike, cast, ranks=ranks))


def half_way() -> None:
    with Init():
        model = nn.Linear(5, 7)
    given = model.weight.data.half()
    for compute in (given.sum, lambda: given + 1, lambda: nn.Parameter(given), lambda: deepcopy(given)):
        with pytest.raises(RuntimeError, match=r"Linear, as torch.float16: .* needs its values.*model.to"):
            compute()
    with pytest.raises(RuntimeError, match="needs its values"):
        model.bias.data = given[0]
    stage = Zero3(model, adamw(model), Group.world())
    with pytest.raises(RuntimeError, match=r"parameter weight: half needs its values"):
        model.half()
    assert isinstance(stage.full_parameter("weight"), Tensor)


def test_what_is_converted_is_a_parameters_or_nothing() -> None:
    run(half_way)


def cast_at_rest(folder: Path) -> bool:
    """As on a GPU, whose shards may wait at the host, and on a disk."""
    with Init():
        model = nn.Linear(5, 7)
    with GatheredParameters(model):
        wanted = {name: t.half() for name, t in model.state_dict().items()}
    for unit in map(unit_of, model.parameters()):
        assert unit is not None
        shelf = HostShelf(Host(), unit.mine) if unit.numel > 7 else Shelf(Disk(folder), unit.mine, 64)
        unit.rest_on(shelf)
    model.half()
    with GatheredParameters(model):
        return differing(model.state_dict(), wanted) == []


def test_cast_where_the_shards_rest(tmp_path: Path) -> None:
    assert all(run(cast_at_rest, tmp_path))
