"""ZeRO-3's own promises: gathered before use and freed after, prefetched within a budget, named when ranks diverge."""

import copy
import weakref
from collections.abc import Callable
from dataclasses import replace
from types import MethodType
from typing import Any

import pytest
import torch
from test_stages import GPT_JOB, Scored
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from training import STAGES, Block, Job, Net, adamw, differing, oracle, tokens, train
from worlds import run

from refimpl.comm.group import Group
from refimpl.launch import RankError
from refimpl.model.gpt import GPT
from refimpl.plan.gathered import Budgets, Planned
from refimpl.zero.config import ZeroConfig
from refimpl.zero.gather.fetch import Fetch
from refimpl.zero.gather.owners import leaves
from refimpl.zero.gather.prefetch import Trace, next_ones, soon_again
from refimpl.zero.gather.units import resident
from refimpl.zero.zero3 import Zero3


def built(model: nn.Module, **config: Any) -> Zero3:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    return Zero3(model, optimizer, Group.world(), ZeroConfig(reduce_bucket_size=700, **config))


class Checkpointed(Net):
    """Every block is recomputed in backward."""

    reentrant = False

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        logits = self.head(self.norm(self.frozen(x)))
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.roll(-1, 1).flatten())


class Reentrant(Checkpointed):
    reentrant = True


class Outside(Net):
    """The head reads the embedding's weight from outside its module, and twice the same block is used."""

    def __init__(self) -> None:
        super().__init__()
        del self.head

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in [*self.blocks, self.blocks[0]]:
            x = block(x)
        logits = self.norm(self.frozen(x)) @ self.embed.weight.t()
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.roll(-1, 1).flatten())


class Layers(nn.Module):
    """It owns no parameter, and adds each layer's bias itself, in what is recomputed in backward, as in Megatron."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(13, 13) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(self.with_bias, x, layer, use_reentrant=False)
        return x

    @staticmethod
    def with_bias(x: Tensor, layer: nn.Module) -> Tensor:
        return (layer(x) + layer.bias).tanh()


class BiasOutside(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = Layers()

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.head(self.norm(self.frozen(self.blocks(self.embed(tokens)))))
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.roll(-1, 1).flatten())


class Adapted(Net):
    """Only small adapters are trained, as in LoRA: whole blocks are frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.adapters = nn.ModuleList(nn.Linear(13, 13) for _ in self.blocks)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block, adapter in zip(self.blocks, self.adapters, strict=True):
            x = block(x) + adapter(x)
        logits = self.head(self.norm(x))
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.roll(-1, 1).flatten())


class View(nn.Module):
    """Its output is a view, which the caller changes in place: autograd drops the hooks on it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(13, 26), nn.Linear(26, 13)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).square()).view(x.shape)


class InPlace(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(View() for _ in range(3))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x).mul_(2)
        logits = self.head(self.norm(self.frozen(x)))
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.roll(-1, 1).flatten())


class Positions(nn.Module):
    """Returns views of weights: of its own, as Whisper's positions, and of a child's, as SAM's prompt encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.nothing = nn.Parameter(torch.randn(9, 13)), nn.Embedding(1, 13)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        return self.weight[: tokens.shape[1]], self.nothing.weight.expand(tokens.shape[1], -1)


class Positioned(Net):
    def __init__(self) -> None:
        super().__init__()
        self.positions = Positions()

    def forward(self, tokens: Tensor) -> Tensor:
        places, nothing = self.positions(tokens)
        x = self.blocks[0](self.embed(tokens)) * places + nothing
        logits = self.head(self.norm(self.frozen(x)))
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.roll(-1, 1).flatten())


def adamw_trained(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


@pytest.mark.parametrize("stage", list(STAGES))
@pytest.mark.parametrize("make", [Checkpointed, Reentrant, Outside, BiasOutside, Adapted, InPlace, Positioned])
def test_awkward_models_keep_their_bits(stage: str, make: Callable[[], nn.Module]) -> None:
    job = Job(make=make, optimizer=adamw_trained, steps=4)
    assert differing(run(train, stage, job, ranks=3)[0].weights, oracle(3, job)) == []


@pytest.mark.parametrize(
    "config",
    [
        {"leaf_modules": ("Block",)},
        {"leaf_modules": ("blocks.1", "up", nn.LayerNorm)},
        {"gather_blocks": True},
        {"module_granularity_threshold": 600},
        {"unit_size": 700},
        {"unit_size": 10**6, "prefetch_bucket_size": 0},
        {"param_persistence_threshold": 100},
        {"param_persistence_threshold": 600, "model_persistence_threshold": 1000},
        {"max_reuse_distance": 1_000_000},
        {"prefetch_bucket_size": 0},
        {"prefetch_bucket_size": 1500, "max_live_parameters": 2500},
        {"check_order": False},
        {"overlap_comm": False},
    ],
    ids=str,
)
def test_no_knob_changes_a_bit(config: dict[str, Any]) -> None:
    job = Job(steps=4, config={"reduce_bucket_size": 700} | config)
    assert differing(run(train, "zero3", job, ranks=3)[0].weights, oracle(3, job)) == []


def times_gathered(**config: Any) -> float:
    """Bytes of the last step's gathers, in units of the parameters' (N-1)/N."""
    job = replace(GPT_JOB, steps=2, config={"leaf_modules": ("Block",)} | config)
    out = run(train, "zero3", job, ranks=2)[0]
    return out.sent_by_tag["parameters"] / (out.layout.padded * 4 / 2)


def test_what_stays_gathered_is_not_sent_again() -> None:
    assert times_gathered() == 2
    assert times_gathered(max_reuse_distance=10**9) == 1, "backward finds what forward gathered"
    near, further = (times_gathered(max_reuse_distance=d, prefetch_bucket_size=0) for d in (1, 1000))
    assert 2 > near > further > 1, "the last layers alone, which are used again after little else"
    assert times_gathered(param_persistence_threshold=10**9) == 1, "gathered once, after the step"


def units_with(**config: Any) -> list[str]:
    return [u.name for u in built(Net(), **config).units]


def test_small_parameters_stay_whole_up_to_a_total() -> None:
    params = [nn.Parameter(torch.zeros(n)) for n in (60, 101, 60, 60, 30)]
    chosen = resident(params, ZeroConfig(param_persistence_threshold=100, model_persistence_threshold=150))
    assert [p in chosen for p in params] == [True, False, True, False, True]


def test_leaf_modules_are_gathered_whole() -> None:
    """By class, class name, end of a path, or because the parts are small: a Block has 4 modules."""
    each = run(units_with, ranks=1)[0]
    assert "blocks.0.up" in each
    blocks = [name for name in each if not name.startswith("blocks.")]
    assert sorted(run(units_with_blocks, Block, ranks=1)[0]) == sorted([*blocks, "blocks.0", "blocks.1", "blocks.2"])
    assert run(units_with_repeated, ranks=1) == run(units_with_blocks, Block, ranks=1), "what the ModuleList repeats"
    for leaf in ("Block", "blocks.0"):
        assert "blocks.0" in run(units_with_blocks, leaf, ranks=1)[0]
    assert "blocks.1.up" in run(units_with_blocks, "blocks.0", ranks=1)[0]
    fine = sum(p.numel() for p in Block(13).parameters()) // 4 + 1
    assert "blocks.0" in run(units_fine, fine, ranks=1)[0]
    assert "blocks.0" not in run(units_fine, fine - 1, ranks=1)[0]


def units_with_blocks(leaf: Any) -> list[str]:
    return units_with(leaf_modules=(leaf,))


def units_with_repeated() -> list[str]:
    return units_with(gather_blocks=True)


def test_neighbours_are_gathered_as_one_up_to_a_size() -> None:
    """Of one module, without parts of their own; trained and frozen ones, and optimizer groups, stay apart."""
    of_a_block = sum(p.numel() for p in Block(13).parameters())
    assert set(run(units_up_to, of_a_block, ranks=1)[0]) == {
        *(f"blocks.{i}.up to blocks.{i}.down" for i in range(3)),  # matrices
        *(f"blocks.{i}.norm to blocks.{i}.down" for i in range(3)),  # vectors, which have no weight decay
        "frozen", "unused", "unused to norm", "the model",  # whose embedding the head is tied to
    }  # fmt: skip
    assert "blocks.0.up" in run(units_up_to, of_a_block - 1, ranks=1)[0]
    assert run(units_up_to, 0, ranks=1)[0] == run(units_up_to, 1, ranks=1)[0]


def units_up_to(size: int) -> list[str]:
    model = Net()
    return [u.name for u in Zero3(model, adamw(model), Group.world(), ZeroConfig(unit_size=size)).units]


class Row(nn.Module):
    """Layers in a row, then one that is used twice, with another between."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(13, 13) for _ in range(4)))
        self.again = nn.ModuleList(nn.Linear(13, 13) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers(x)
        return self.layers[0](self.again[1](self.again[0](x))).square().mean()  # type: ignore[no-any-return]


def gathers_of_a_row(unit_size: int, prefetch: int, frozen: bool) -> list[tuple[int, int, int]]:
    """All-gathers of a step, bytes, and what is still whole after it, step by step."""
    model, found = Row(), list[tuple[int, int, int]]()
    model.layers.requires_grad_(not frozen)
    stage = built(model, unit_size=unit_size, prefetch_bucket_size=prefetch)
    ledger = stage.group.ledger
    for _ in range(3):
        ledger.reset()
        stage.backward(model(torch.ones(2, 13, requires_grad=True)))
        sent = ledger.calls("tag")["parameters"], ledger.sent_bytes("tag")["parameters"]
        found.append((*sent, sum(not u.is_free for u in stage.units)))
        stage.step()
    return found


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("prefetch", [0, 10**6])
def test_joined_units_are_gathered_once_for_a_run_of_modules(prefetch: int, frozen: bool) -> None:
    """Forward: the row, the two, the row once more. Backward: the same in reverse, from the first step on.

    What is trained stays in backward until its last gradient is there, and is gathered once.
    """
    joined, alone = (run(gathers_of_a_row, size, prefetch, frozen, ranks=2)[0] for size in (10**6, 0))
    assert [calls for calls, _, _ in joined] == [3 + (3 if frozen else 2)] * 3
    assert [calls for calls, _, _ in alone] == [7 + (7 if frozen else 6)] * 3
    assert [left for _, _, left in joined] == [0] * 3
    row, two = 4 * (176 + 16), 2 * (176 + 16)  # 169 and 13 elements, each from a multiple of 8; multiples of 2 * 64
    assert [sent for _, sent, _ in joined] == [4 / 2 * ((4 if frozen else 3) * row + 2 * two)] * 3


class Neighbour(nn.Module):
    """Reads the weight of one of two that share a unit behind both, which is still there; the last layer stays."""

    def __init__(self) -> None:
        super().__init__()
        self.row = nn.ModuleList(nn.Linear(13, 13, bias=False) for _ in range(2))
        self.embed, self.last = nn.Embedding(29, 13), nn.Linear(13, 2, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.row[0](self.embed(tokens)).tanh() @ self.row[1].weight
        return self.last(x).square().mean()  # type: ignore[no-any-return]


def test_a_weight_that_is_read_behind_its_neighbour_is_there_in_backward() -> None:
    """The unit of both was freed later, unseen, and backward ended in "out of bounds for storage of size 0"."""
    job = Job(make=Neighbour, steps=2, config={"unit_size": 10**6, "param_persistence_threshold": 30})
    assert differing(run(train, "zero3", job, ranks=2)[0].weights, oracle(2, job)) == []


def hooks_on_one_input() -> list[int]:
    """Of a picture that is itself improved, by a network that is frozen but for its last layer; step by step."""
    model = nn.Sequential(nn.Linear(13, 13), nn.Identity(), nn.Linear(13, 1))
    model[0].requires_grad_(False)
    stage, picture, found = built(model), torch.ones(2, 13, requires_grad=True), list[int]()
    for _ in range(3):
        stage.backward(model(picture).square().mean())
        stage.step()
        found.append(len(picture._backward_hooks or ()))
    return found


def test_a_tensor_that_outlives_the_step_keeps_no_hook() -> None:
    """It had one more after each, all of which the next backward ran."""
    assert run(hooks_on_one_input) == [[0, 0, 0]] * 2


@pytest.mark.parametrize(("on_gpu", "asked", "expected"), [(True, None, 3), (True, False, 0), (False, None, 0)])
def test_blocks_are_gathered_whole_on_a_gpu(on_gpu: bool, asked: bool | None, expected: int) -> None:
    assert len(leaves(Net(), ZeroConfig(gather_blocks=asked), on_gpu)) == expected


def units_fine(threshold: int) -> list[str]:
    return units_with(module_granularity_threshold=threshold)


def order_of_gathers(prefetch: int, live: int = 10**9) -> tuple[list[tuple[str, str]], list[str]]:
    model = Scored()
    stage = built(model, leaf_modules=("Block",), prefetch_bucket_size=prefetch, max_live_parameters=live)
    seen: list[tuple[str, str]] = []
    for unit in stage.units:
        start = unit.start

        def spied(unit: Any = unit, start: Callable[[], None] = start) -> None:
            if unit.is_free:
                seen.append(("gather", unit.name))
            start()

        unit.start = spied  # type: ignore[method-assign]
    for step in range(3):
        seen.clear()
        handles = [
            m.register_forward_pre_hook(lambda m, _: seen.append(("run", stage.fetch.names[id(m)])), prepend=False)
            for m in model.modules()
            if type(m).__name__ == "Block"
        ]
        stage.backward(model(tokens(step, stage.group.rank)))
        stage.step()
        for handle in handles:
            handle.remove()
    return seen, [u.name for u in stage.units]


def test_prefetch_follows_the_recorded_order() -> None:
    ahead, _ = run(order_of_gathers, 10**9, ranks=2)[0]
    behind, units = run(order_of_gathers, 0, ranks=2)[0]
    first, second = [name for name in units if "block" in name or "h." in name][:2]
    assert ahead.index(("gather", second)) < ahead.index(("run", first))
    assert behind.index(("gather", second)) > behind.index(("run", first))


def test_prefetch_keeps_to_the_live_budget() -> None:
    """With room for one unit at most, nothing is gathered before its turn."""
    assert run(order_of_gathers, 10**9, 1, ranks=2)[0][0] == run(order_of_gathers, 0, ranks=2)[0][0]


def test_budgets_may_be_filled_to_the_last_element() -> None:
    units: Any = [Planned(4, 4) for _ in range(5)]
    trace = Trace()
    for unit in units:
        trace.visit(unit, "forward")
    trace.restart()
    trace.visit(units[0], "forward")
    for budgets, ahead in (
        (Budgets(8, 100), 2), (Budgets(7, 100), 1), (Budgets(100, 12), 2), (Budgets(100, 11), 1), (Budgets(0, 100), 0),
    ):  # fmt: skip
        assert next_ones(trace, units[:1], units[:1], budgets) == units[1 : 1 + ahead]
    units[1].is_free = False  # whole anyway, so nothing to be gathered till the third is used
    assert [soon_again(trace, units[3], Budgets(max_reuse_distance=n)) for n in (0, 4, 5)] == [False, False, True]


def test_a_unit_larger_than_the_budget_is_prefetched_alone() -> None:
    seen, units = run(order_of_gathers, 1, ranks=2)[0]
    first, second = [name for name in units if "block" in name or "h." in name][:2]
    assert seen.index(("gather", second)) < seen.index(("run", first))


def test_a_dropped_hook_does_not_matter() -> None:
    """What autograd saved of the parameters asks for them."""
    model = InPlace()
    stage = built(model, leaf_modules=(View,))
    noticed: list[str] = []
    before = stage.fetch.before_backward

    def spied(fetch: Fetch, module: nn.Module, *_: Any) -> None:
        noticed.append(fetch.names[id(module)])
        before(module)

    stage.fetch.before_backward = MethodType(spied, stage.fetch)  # type: ignore[method-assign]
    stage.backward(model(tokens(0, 0)))
    assert "norm" in noticed
    assert "blocks.0" not in noticed, "the hook is there after all: this model proves nothing"
    used = [unit.name for unit, during in stage.path.trace.order if during == "backward"]
    assert used.index("norm") < used.index("blocks.2") < used.index("blocks.0")


def most_gathered() -> tuple[int, int, int]:
    model = Scored()
    stage = built(model, leaf_modules=("Block",), prefetch_bucket_size=0)
    live: list[int] = []
    for module in model.modules():
        module.register_forward_pre_hook(lambda *_: live.append(sum(u.padded for u in stage.units if not u.is_free)))
    stage.backward(model(tokens(0, stage.group.rank)))
    after = sum(u.padded for u in stage.units if not u.is_free)
    sizes = {u.name: u.padded for u in stage.units}
    block = max(size for name, size in sizes.items() if name.split(".")[-1].isdigit())
    return max(live), after, sum(sizes.values()) - block


def test_only_what_is_in_use_is_whole() -> None:
    most, after, all_but_one_block = run(most_gathered, ranks=2)[0]
    assert most <= all_but_one_block
    assert after == 0


def blocks_of(stage: Any) -> list[Any]:
    return [u for u in stage.units if u.name.split(".")[-1].isdigit()]


def most_blocks_whole(ahead: int) -> int:
    """While a Block computes, forward or backward, with room for so many on their way; once the order is known."""
    block = max(u.padded for u in blocks_of(built(Scored(), leaf_modules=("Block",))))
    model = Scored()
    model.gpt = GPT(replace(model.gpt.config, layers=4))
    stage = built(model, leaf_modules=("Block",), prefetch_bucket_size=ahead * block)
    blocks, need = blocks_of(stage), stage.fetch.need
    live: list[int] = []

    def watched(*args: Any) -> None:
        need(*args)
        live.append(sum(not u.is_free for u in blocks))

    stage.fetch.need = watched  # nothing is gathered elsewhere
    for step in range(3):
        live.clear()
        stage.backward(model(tokens(step, stage.group.rank)))
        stage.step()
    return max(live)


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_as_many_blocks_are_whole_as_are_ahead_and_one(ahead: int) -> None:
    assert run(most_blocks_whole, ahead, ranks=2) == [1 + ahead] * 2


def most_gathered_for_full_state() -> tuple[int, int]:
    model = Scored()
    stage = built(model, leaf_modules=("Block",))
    live: list[int] = []
    for unit in stage.units:
        wait = unit.wait

        def spied(wait: Callable[[], None] = wait) -> None:
            wait()
            live.append(sum(u.padded for u in stage.units if not u.is_free))

        unit.wait = spied  # type: ignore[method-assign]
    stage.full_state_dict()
    return max(live), max(u.padded for u in stage.units)


def test_full_state_dict_gathers_one_unit_at_a_time() -> None:
    most, largest = run(most_gathered_for_full_state, ranks=2)[0]
    assert most == largest


class Forked(nn.Module):
    """Two experts of equal size, so that gathering the wrong one would go unnoticed."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, which: int) -> Tensor:
        return (self.first if which == 0 else self.second)(x).square().mean()


def fork(diverge_at: int) -> None:
    model = Forked()
    stage = built(model)
    for step in range(4):
        which = stage.group.rank if step == diverge_at else step % 2
        stage.backward(model(torch.ones(2, 8), which))
        stage.step()


@pytest.mark.parametrize("step", [0, 2])
def test_ranks_that_diverge_are_named(step: int) -> None:
    with pytest.raises(RankError, match=r"(?s)different paths.*rank 0: forward of first.*rank 1: forward of second"):
        run(fork, step, ranks=2)


def test_a_path_that_changes_on_all_ranks_is_fine() -> None:
    run(fork, -1, ranks=2)


def evaluate_between() -> None:
    model = Net()
    stage = built(model)
    for step in range(3):
        with torch.no_grad():
            before = model(tokens(step, 0))
        assert torch.equal(before, model(tokens(step, 0)).detach())
        stage.backward(model(tokens(step, stage.group.rank)))
        stage.step()


def test_evaluation_between_steps() -> None:
    run(evaluate_between, ranks=2)


def state_round_trip(stage_name: str) -> bool:
    def one(seed: int) -> Any:
        torch.manual_seed(seed)
        model = Net()
        return model, STAGES[stage_name](model, adamw_trained(model), Group.world())  # type: ignore[call-arg]

    def advance(model: nn.Module, stage: Any, steps: range) -> None:
        for step in steps:
            stage.backward(model(tokens(step, stage.group.rank)))
            stage.step()

    model, stage = one(0)
    advance(model, stage, range(2))
    saved = copy.deepcopy(stage.state_dict())
    twin, resumed = one(0)
    resumed.load_state_dict(saved)
    advance(model, stage, range(2, 4))
    advance(twin, resumed, range(2, 4))
    a, b = stage.full_state_dict(), resumed.full_state_dict()
    return stage.group.rank != 0 or differing(a, b) == []


@pytest.mark.parametrize("stage", list(STAGES))
def test_state_dict_resumes_bit_for_bit(stage: str) -> None:
    assert all(run(state_round_trip, stage, ranks=2))


def test_of_what_a_leaf_modules_second_run_gets_nothing_stays() -> None:
    """A hook on a tensor that begins a graph, which holds that tensor's node, would keep it for good, and its memory.

    On a GPU blocks are leaf modules: there each step would leave the inputs of all of them.
    """
    model, inputs = Checkpointed(), list[weakref.ref[Tensor]]()
    model.reentrant = True  # then the second run gets leaves
    stage = Zero3(model, torch.optim.SGD(model.parameters(), 0.1), Group(None), ZeroConfig(gather_blocks=True))
    for block in model.blocks:
        block.register_forward_pre_hook(lambda _, args: inputs.append(weakref.ref(args[0])))
    for _ in range(2):
        stage.backward(model(torch.arange(6).view(2, 3)))
        stage.step()
    assert len(inputs) == 4 * len(model.blocks), "each block runs twice a step"
    assert [there() for there in inputs] == [None] * len(inputs)


class Counted(Net):
    """Its head's layer norm counts what it saw; its hash is of the count too, as a torchmetrics Metric's."""

    class Norm(nn.LayerNorm):
        seen = 0

        def __hash__(self) -> int:
            return hash((id(self), self.seen))

        def forward(self, x: Tensor) -> Tensor:
            self.seen += 1
            return super().forward(x)

    def __init__(self) -> None:
        super().__init__()
        self.norm = self.Norm(13)


@pytest.mark.parametrize("gather_blocks", [False, True])
def test_the_hash_of_a_module_may_change(gather_blocks: bool) -> None:
    trained = []
    for made in (Net, Counted):
        torch.manual_seed(0)
        model = made()
        stage = Zero3(
            model, torch.optim.SGD(model.parameters(), 0.1), Group(None), ZeroConfig(gather_blocks=gather_blocks)
        )
        for step in range(2):
            stage.backward(model(tokens(step, 0)))
            stage.step()
        trained.append(stage.full_state_dict())
    assert differing(*trained) == []
