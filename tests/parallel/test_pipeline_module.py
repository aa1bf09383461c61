"""Models as chains of layers over ranks: cuts, names, ties, checkpointing, a GPT and a plain nn.Sequential."""

import gc
import weakref
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pipeline_models import same
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torchs_checkpoint
from worlds import run

from refimpl.comm.group import Group
from refimpl.model.gpt import GPT, GPTConfig
from refimpl.parallel.pipeline.gpt import gpt_layers, gpt_loss
from refimpl.parallel.pipeline.layers import LayerSpec, TiedLayerSpec
from refimpl.parallel.pipeline.module import PipelineModule
from refimpl.parallel.pipeline.partition import balanced

CONFIG = GPTConfig(vocab=13, context=6, width=8, layers=3, heads=2)
MICRO = 4
Grads = dict[str, Tensor | None]


def tokens() -> tuple[list[Tensor], list[Tensor]]:
    torch.manual_seed(5)
    ids = torch.randint(0, CONFIG.vocab, (2 * MICRO, 7))
    return list(ids[:, :-1].split(2)), list(ids[:, 1:].split(2))


def gpt() -> GPT:
    torch.manual_seed(1)
    return GPT(CONFIG)


def grads_of(module: nn.Module) -> Grads:
    return {name: p.grad for name, p in module.named_parameters()}


def trained_gpt(schedule: str, interval: int = 0, calls: int = 1) -> tuple[Grads, list[float], list[float]]:
    """Gradients by layer, losses of training and of evaluation."""
    module = PipelineModule(gpt_layers(gpt()), Group.world(), gpt_loss, schedule=schedule, checkpoint_interval=interval)
    for _ in range(calls):
        losses = module.forward_backward(*tokens())
    return grads_of(module), losses.tolist(), module.evaluate(*tokens()).tolist()


def untied() -> tuple[Grads, list[float]]:
    """One process whose head has a copy of the embedding: gradients by layer, those of the copies summed."""
    model = gpt()
    model.head.weight = nn.Parameter(model.wte.weight.detach().clone())
    layers = nn.Sequential(*gpt_layers(model))
    losses = []
    for x, y in zip(*tokens(), strict=True):
        losses.append(gpt_loss(layers(x), y))
        (losses[-1] / MICRO).backward()
    found = grads_of(layers)
    both = found["0.wte.weight"] + found[f"{CONFIG.layers + 1}.head.weight"]
    return {**found, "0.wte.weight": both, f"{CONFIG.layers + 1}.head.weight": both}, [x.item() for x in losses]


@pytest.mark.parametrize(("ranks", "schedule"), [(2, "gpipe"), (2, "zb-h1"), (3, "1f1b"), (4, "1f1b")])
def test_a_gpt_split_from_outside_has_the_gradients_of_one_process(ranks: int, schedule: str) -> None:
    expected, losses = untied()
    seen: set[str] = set()
    for grads, trained, evaluated in run(trained_gpt, schedule, ranks=ranks):
        assert trained == evaluated == losses
        assert same(grads, {name: expected[name] for name in grads}) == {}
        seen |= grads.keys()
    assert seen == expected.keys()


@pytest.mark.parametrize("schedule", ["zb-v", "dualpipe", "dualpipe-v", "interleaved"])
def test_two_stages_a_rank_add_ties_in_another_order(schedule: str) -> None:
    """In a V one rank has both ends and adds them as they come; two copies add by path: the last bits may differ."""
    expected, losses = untied()
    seen: set[str] = set()
    for grads, trained, _ in run(trained_gpt, schedule, ranks=2):
        assert trained == losses
        seen |= grads.keys()
        for name, grad in grads.items():
            torch.testing.assert_close(grad, expected[name], rtol=1e-5, atol=1e-7)
    assert len(seen) in (len(expected), len(expected) - 1), "one name for both places where one rank has them"


def test_the_model_itself_trains_so_but_for_the_order_of_a_ties_sum() -> None:
    model = gpt()
    for x, y in zip(*tokens(), strict=True):
        (model(x, y) / MICRO).backward()
    expected, _ = untied()
    torch.testing.assert_close(model.wte.weight.grad, expected["0.wte.weight"], rtol=1e-5, atol=1e-7)
    assert torch.equal(model.blocks[1].mlp.up.weight.grad, expected["2.mlp.up.weight"])


@pytest.mark.parametrize(("schedule", "interval"), [("1f1b", 1), ("1f1b", 2), ("zb-h1", 1)])
def test_checkpointing_changes_no_bit(schedule: str, interval: int) -> None:
    for plain, again in zip(run(trained_gpt, schedule), run(trained_gpt, schedule, interval), strict=True):
        assert again[1:] == plain[1:]
        assert same(again[0], plain[0]) == {}


def test_gradients_add_up_over_calls() -> None:
    for once, twice in zip(run(trained_gpt, "1f1b"), run(trained_gpt, "1f1b", 0, 2), strict=True):
        for name, grad in once[0].items():
            assert grad is not None
            torch.testing.assert_close(twice[0][name], 2 * grad)


class Masked(nn.Linear):
    """Hands its mask on, as Megatron's layers do."""

    def forward(self, x: Any) -> Any:
        hidden, mask = x
        return super().forward(hidden).tanh() * mask, mask


def by_torchs_own(interval: int) -> Grads:
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4), lambda x: (x, torch.ones(4)), Masked(4, 4), Masked(4, 4), lambda x: x[0]]
    how = partial(torchs_checkpoint, use_reentrant=True)
    module = PipelineModule(
        layers, Group.world(), F.mse_loss, partition=[1, 0, 1, 1, 0], checkpoint_interval=interval, how=how,
        checkpointable=["Masked"],
    )  # fmt: skip
    module.forward_backward([torch.ones(2, 4)], [torch.zeros(2, 4)])
    return grads_of(module)


def test_a_checkpoint_that_sees_no_tensor_in_a_tuple() -> None:
    """torch's reentrant one returns gradients to its arguments alone: what comes before would learn nothing."""
    for plain, again in zip(run(by_torchs_own, 0), run(by_torchs_own, 1), strict=True):
        assert all(grad is not None for grad in again.values())
        assert same(again, plain) == {}


class Counts(nn.Linear):
    runs = 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        return super().forward(x)


def counted(interval: int) -> list[int]:
    """How often each layer here ran in a step of 2 micro-batches."""
    layers = [Counts(4, 4) for _ in range(4)]
    module = PipelineModule(layers, Group.world(), lambda x, y: (x - y).square().mean(), checkpoint_interval=interval)
    module.forward_backward([torch.ones(1, 4)] * 2, [torch.zeros(1, 4)] * 2)
    return [m.runs for m in module.modules() if isinstance(m, Counts)]


@pytest.mark.parametrize(("interval", "runs"), [(0, [2, 2]), (1, [4, 4]), (2, [4, 4])])
def test_checkpointed_layers_run_twice(interval: int, runs: list[int]) -> None:
    assert run(counted, interval) == [runs, runs]


# --- layers that change what they are given


class Raised(nn.Module):
    def forward(self, value: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, count = value
        return x.add_(1), count.add_(1)


class Split(nn.Linear):
    def forward(self, value: Any) -> tuple[Tensor, Tensor]:
        x, count = value if isinstance(value, tuple) else (value, torch.zeros(1, dtype=torch.int64))
        return super().forward(x), count


def in_place() -> list[nn.Module]:
    torch.manual_seed(3)
    return [Split(5, 5), Raised(), Split(5, 5), Raised()]


def changed_in_place(partition: str, schedule: str) -> tuple[list[float], dict[str, Tensor]]:
    module = PipelineModule(
        in_place(), Group.world(), lambda out, y: F.mse_loss(out[0] * out[1], y), partition=partition,
        schedule=schedule, sample=torch.randn(4, 5),
    )  # fmt: skip
    torch.manual_seed(2)
    x, y = torch.randn(3, 4, 5), torch.randn(3, 4, 5)
    losses = module.forward_backward(list(x), list(y))
    return losses.tolist(), {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    ("partition", "schedule", "ranks"), [("uniform", "1f1b", 4), ("uniform", "zb-h1", 3), ("time", "1f1b", 2)]
)
def test_a_stage_may_begin_with_a_layer_that_writes_to_its_input(partition: str, schedule: str, ranks: int) -> None:
    """AlexNet's ReLUs do, and DeepSpeed lets them."""
    layers = in_place()
    torch.manual_seed(2)
    expected = []
    for x, y in zip(torch.randn(3, 4, 5), torch.randn(3, 4, 5), strict=True):
        out = nn.Sequential(*layers)(x)
        loss = F.mse_loss(out[0] * out[1], y)
        (loss / 3).backward()
        expected.append(loss.item())
    known = {f"{i}.{n}": p.grad for i, layer in enumerate(layers) for n, p in layer.named_parameters()}
    results = run(changed_in_place, partition, schedule, ranks=ranks)
    assert all(losses == expected for losses, _ in results)
    found = {name: grad for _, grads in results for name, grad in grads.items()}
    assert found.keys() == known.keys()
    assert all(torch.equal(found[name], known[name]) for name in known)


# --- layers that are built where they run


def double(x: Tensor) -> Tensor:
    return 2 * x


def specs() -> list[Any]:
    return [LayerSpec(nn.Linear, 5, 7), torch.tanh, LayerSpec(nn.Linear, 7, 3, bias=False), double,
            LayerSpec(nn.LayerNorm, 3), LayerSpec(nn.Linear, 3, 2)]  # fmt: skip


def built(partition: Any, sample: Tensor | None = None) -> tuple[list[int], dict[str, Tensor], list[float]]:
    """Bounds, this rank's weights, losses."""
    group = Group.world()
    module = PipelineModule(specs(), group, F.mse_loss, partition=partition, sample=sample, base_seed=40)
    torch.manual_seed(2)
    x, y = torch.randn(3, 4, 5), torch.randn(3, 4, 2)
    return module.bounds, dict(module.state_dict()), module.forward_backward(list(x), list(y)).tolist()


@pytest.mark.parametrize(
    ("partition", "weights"),
    [
        ("uniform", [1, 1, 1, 1, 1, 1]),
        ("parameters", [42, 0, 21, 0, 6, 8]),
        ("type:linear", [1, 0, 1, 0, 0, 1]),
        ("type:tanh|double", [0, 1, 0, 1, 0, 0]),
        ([0, 0, 5, 0, 1, 1], [0, 0, 5, 0, 1, 1]),
        ("time", None),
    ],
)
def test_ranks_together_are_the_sequential(partition: Any, weights: list[float] | None) -> None:
    """Built by layer with seeds of their own, whichever rank holds them."""
    layers = []
    for i, spec in enumerate(specs()):
        torch.manual_seed(40 + i)
        layers.append(spec.build() if isinstance(spec, LayerSpec) else spec)
    torch.manual_seed(2)
    x, y = torch.randn(3, 4, 5), torch.randn(3, 4, 2)

    def whole(h: Tensor) -> Tensor:
        for layer in layers:
            h = layer(h)
        return h

    results = run(built, partition, torch.randn(4, 5), ranks=3)
    together = {name: weight for _, weights, _ in results for name, weight in weights.items()}
    expected = {
        f"{i}.{n}": p for i, m in enumerate(layers) if isinstance(m, nn.Module) for n, p in m.named_parameters()
    }
    assert same(together, {n: p.detach() for n, p in expected.items()}) == {}
    assert together.keys() == expected.keys()
    assert len({tuple(found) for found, _, _ in results}) == 1, "all ranks cut alike"
    if weights:
        assert results[0][0] == balanced(weights, 3)
    for _, _, losses in results:
        assert losses == [F.mse_loss(whole(a), b).item() for a, b in zip(x, y, strict=True)]


def refused(partition: Any) -> None:
    PipelineModule(specs(), Group.world(), F.mse_loss, partition=partition)


@pytest.mark.parametrize(
    ("partition", "says"),
    [
        ("profile", "'profile': it must be uniform, parameters, time, type:PATTERN, or 6 weights"),
        ([1, 2], r"\[1, 2\]: it must be"),
        ("type:(", r"'type:\(': missing \)"),
        ("type:Conv", "no layer's type matches: Linear, tanh, double, LayerNorm"),
        ("time", "needs `sample`"),
    ],
)
def test_partitions_that_there_are_not(partition: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        refused(partition)


def test_a_chain_has_layers_and_an_interval_is_none_or_more() -> None:
    for layers, interval, says in (
        ([], 0, "a pipeline of no layers"),
        (specs(), -1, "interval -1: it must not"),
    ):
        with pytest.raises(ValueError, match=says):
            PipelineModule(layers, Group.world(), F.mse_loss, checkpoint_interval=interval)


def test_a_spec_is_no_function() -> None:
    with pytest.raises(ValueError, match=r"class of torch.nn.Module, not <built-in"):
        LayerSpec(torch.tanh)  # type: ignore[arg-type]
    assert repr(LayerSpec(nn.Linear, 2, 3, bias=False)) == "Linear(2, 3, bias=False)"


def test_a_spec_says_what_it_builds_if_asked(caplog: pytest.LogCaptureFixture) -> None:
    """gpt-neox builds its layers so, where it makes a plain chain of them."""
    with caplog.at_level("INFO", "refimpl"):
        LayerSpec(nn.Linear, 2, 3).build(log=False)
        assert LayerSpec(nn.Linear, 4, 5).build(log=True).out_features == 5
    assert [record.getMessage() for record in caplog.records] == ["building Linear(4, 5)"]


class Computes(nn.Linear):
    """Cannot be built without memory."""

    def __init__(self) -> None:
        super().__init__(5, 5)
        self.rate = torch.linspace(0, 1, 3)[1].item()
        self.to("cpu")


def test_layers_that_compute_while_they_are_built_are_counted_too() -> None:
    """And what is drawn for it is drawn again."""
    torch.manual_seed(0)
    module = PipelineModule([LayerSpec(Computes)], Group.world(), F.mse_loss)
    torch.manual_seed(0)
    assert torch.equal(module.get_parameter("0.weight"), Computes().weight)


def test_alone_it_is_the_model() -> None:
    module = PipelineModule(specs(), Group.world(), F.mse_loss)
    x, y = torch.randn(2, 5), torch.randn(2, 2)
    assert torch.equal(module.evaluate([x], [y])[0], F.mse_loss(module(x), y))


def half(_: int) -> None:
    PipelineModule(specs(), Group.world(), F.mse_loss)(torch.zeros(1, 5))


def test_half_a_model_is_not_called() -> None:
    with pytest.raises(RuntimeError, match="call forward_backward or evaluate on all ranks"):
        run(half, 0)


class Scaled(nn.Module):
    """A loss that learns, as one with a temperature does."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, out: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(self.scale * out, target)


def learned(schedule: str) -> tuple[Tensor | None, bool]:
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4) for _ in range(4)]
    module = PipelineModule(layers, Group.world(), Scaled(), schedule=schedule, partition="uniform")
    module.forward_backward(list(torch.ones(4, 2, 4)), list(torch.zeros(4, 2, 4)))
    module.eval()
    return dict(module.named_parameters()).get("loss.scale", Tensor()).grad, module.loss.training


def test_what_a_loss_learns_is_the_last_stages() -> None:
    """On other ranks it would stay as it was, and be what a checkpoint keeps."""
    torch.manual_seed(0)
    layers, scaled = [nn.Linear(4, 4) for _ in range(4)], Scaled()
    scaled(nn.Sequential(*layers)(torch.ones(2, 4)), torch.zeros(2, 4)).backward()
    for schedule, holders in (("1f1b", {1}), ("zb-v", {0}), ("dualpipe", {0, 1})):
        found = run(learned, schedule)
        assert {rank for rank, (grad, _) in enumerate(found) if grad is not None} == holders
        for grad, is_training in found:
            assert grad is None or torch.allclose(grad, scaled.scale.grad)
            assert not is_training


# --- ties


def logits(module: nn.Module, x: Tensor) -> Tensor:
    return F.linear(x, module.weight)


def tied_layers() -> list[Any]:
    return [TiedLayerSpec("words", nn.Embedding, 11, 4), LayerSpec(nn.Linear, 4, 4), LayerSpec(nn.Linear, 4, 4),
            TiedLayerSpec("words", nn.Embedding, 11, 4, forward_fn=logits)]  # fmt: skip


def tied_steps(schedule: str) -> tuple[list[tuple[int, ...]], Tensor | None, list[float], int]:
    """Who shares, the tied weight after three steps of AdamW, the losses, and copies of it on this rank."""
    group = Group.world()
    torch.manual_seed(group.rank)  # other weights on every rank, until they are copied
    module = PipelineModule(tied_layers(), group, gpt_loss, schedule=schedule, partition="uniform")
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    ids = torch.arange(24).view(4, 2, 3) % 11
    losses: list[float] = []
    for _ in range(3):
        losses += module.forward_backward(list(ids), list(ids)).tolist()
        optimizer.step()
        optimizer.zero_grad()
    weights = [w.clone() for n, w in module.state_dict().items() if n.startswith("tied")]
    return [ranks for ranks, _ in module.shared], weights[0] if weights else None, losses, len(weights)


@pytest.mark.parametrize(
    ("ranks", "schedule", "shared"),
    [
        (2, "1f1b", [(0, 1)]),
        (4, "zb-h1", [(0, 3)]),
        (2, "zb-v", []),
        (2, "dualpipe", [(0, 1)]),
        (2, "dualpipe-v", []),
        (2, "interleaved", [(0, 1)]),
    ],
)
def test_copies_of_a_tied_weight_stay_equal(ranks: int, schedule: str, shared: list[tuple[int, int]]) -> None:
    results = run(tied_steps, schedule, ranks=ranks)
    have = [r for r in results if r[1] is not None]
    assert len(have) == (2 if shared else 1)
    for who, weight, losses, copies in have:
        assert who == shared
        assert copies == 1
        assert weight is not None
        assert torch.equal(weight, have[0][1])
        assert losses == results[0][2]
    assert results[0][2][-1] < results[0][2][0]


class Words(nn.Embedding):
    """An embedding whose head adds a bias, and a scale that both use."""

    def __init__(self) -> None:
        super().__init__(11, 4)
        self.bias, self.scale = nn.Parameter(torch.randn(11)), nn.Parameter(torch.randn(4))

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * self.scale


class Head(Words):
    """Another class, which calls the tied weight otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = self._parameters.pop("weight")

    @property
    def weight(self) -> Any:
        return self.matrix


def biased_step(same: bool) -> tuple[dict[str, Tensor], Grads]:
    """Weights and gradients of this rank's; one class at both ends, or two."""
    torch.manual_seed(Group.world().rank)
    ends = [TiedLayerSpec("words", Words), TiedLayerSpec("words", Words, forward_fn=biased)]
    if not same:
        ends[1] = TiedLayerSpec("words", Head, forward_fn=biased, tied_weight_attr="matrix")
    layers = [ends[0], LayerSpec(nn.Linear, 4, 4), ends[1]]
    module = PipelineModule(layers, Group.world(), gpt_loss, partition="uniform")
    ids = torch.arange(12).view(2, 2, 3) % 11
    module.forward_backward(list(ids), list(ids))
    return {n: p.detach() for n, p in module.named_parameters()}, grads_of(module)


def biased(module: Any, x: Tensor) -> Tensor:
    return F.linear(x * module.scale, module.weight, module.bias)


@pytest.mark.parametrize("same", [True, False])
@pytest.mark.parametrize("ranks", [2, 3])
def test_what_stands_beside_a_tied_weight_is_one_parameter_too(ranks: int, same: bool) -> None:
    """Lost otherwise: each stage trained its own, and a checkpoint, which knows one name, kept the first's."""
    results = run(biased_step, same, ranks=ranks)
    (first, grads), (last, its_grads) = results[0], results[-1]
    weights = {name: p for params, _ in results for name, p in params.items()}
    words, middle = Words(), nn.Linear(4, 4)
    words.load_state_dict({n: first[f"tied_modules.words.{n}"] for n in ("weight", "bias", "scale")})
    middle.load_state_dict({n: weights[f"1.{n}"] for n in ("weight", "bias")})
    for ids in torch.arange(12).view(2, 2, 3) % 11:
        (gpt_loss(biased(words, middle(words(ids))), ids) / 2).backward()
    for name, p in words.named_parameters():
        there = f"tied_modules.words.{name if same or name != 'weight' else 'matrix'}"
        assert torch.equal(last[there], p)
        torch.testing.assert_close(grads[f"tied_modules.words.{name}"], p.grad)
        assert torch.equal(its_grads[there], grads[f"tied_modules.words.{name}"])


def crossed_specs() -> list[Any]:
    """Two weights of one shape, tied over the same two ranks, which meet them in opposite orders."""
    one, two = (TiedLayerSpec(key, nn.Linear, 3, 3, bias=False) for key in ("one", "two"))
    middle = [torch.tanh, LayerSpec(nn.Linear, 3, 3), LayerSpec(nn.Linear, 3, 3), torch.tanh]
    return [one, two, *middle, two, one]


def crossed_step() -> tuple[list[tuple[int, ...]], Grads]:
    """Who shares, and the gradients by name."""
    module = PipelineModule(crossed_specs(), Group.world(), F.mse_loss, partition="uniform", base_seed=3)
    module.forward_backward([torch.ones(3, 3), torch.eye(3)], [torch.zeros(3, 3)] * 2)
    return [ranks for ranks, params in module.shared for _ in params], grads_of(module)


def test_ties_that_cross_are_each_summed_with_its_own() -> None:
    results = run(crossed_step, ranks=4)
    assert [ranks for ranks, _ in results] == [[(0, 3)] * 2, [], [], [(0, 3)] * 2]
    layers = []
    for i, spec in enumerate(crossed_specs()):
        torch.manual_seed(3 + i)
        layers.append(spec.build() if isinstance(spec, LayerSpec) else spec)
    layers[6:] = [layers[1], layers[0]]
    for x in (torch.ones(3, 3), torch.eye(3)):
        h = x
        for layer in layers:
            h = layer(h)
        (F.mse_loss(h, torch.zeros_like(h)) / 2).backward()
    for _, grads in (results[0], results[3]):
        for i, key in enumerate(("one", "two")):
            torch.testing.assert_close(grads[f"tied_modules.{key}.weight"], layers[i].weight.grad)


class Two(nn.Module):
    """Uses two given layers."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def crossed() -> tuple[Grads, list[int]]:
    """Two weights shared in opposite orders by the ends, one by three stages, and one layer that is there twice."""
    torch.manual_seed(9)
    a, b, c = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)
    layers = [Two(a, b, c), c, Two(c, b, a)]
    module = PipelineModule(layers, Group.world(), F.mse_loss, partition="uniform")
    module.forward_backward([torch.ones(2, 3), torch.zeros(2, 3)], [torch.zeros(2, 3)] * 2)
    return grads_of(module), [len(ranks) for ranks, params in module.shared for _ in params]


def test_weights_shared_by_identity_in_any_order() -> None:
    torch.manual_seed(9)
    a, b, c = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)
    whole = nn.Sequential(Two(a, b, c), c, Two(c, b, a))
    for x in (torch.ones(2, 3), torch.zeros(2, 3)):
        (F.mse_loss(whole(x), torch.zeros(2, 3)) / 2).backward()
    expected = {n: p.grad for n, p in whole.named_parameters(remove_duplicate=False)}
    results = run(crossed, ranks=3)
    assert [sorted(sizes) for _, sizes in results] == [[2, 2, 2, 2, 3, 3], [3, 3], [2, 2, 2, 2, 3, 3]]
    for grads, _ in results:
        for name, grad in grads.items():
            torch.testing.assert_close(grad, expected[name])


def kept_alive() -> list[bool]:
    """Of three built layers, which are alive after the split."""
    layers = [nn.Linear(2, 2) for _ in range(3)]
    alive = [weakref.ref(layer) for layer in layers]
    module = PipelineModule(layers, Group.world(), F.mse_loss, partition="uniform")
    del layers
    gc.collect()
    assert len(module.bounds) == 4
    return [layer() is not None for layer in alive]


def test_layers_of_other_ranks_are_let_go() -> None:
    assert run(kept_alive, ranks=3) == [[i == rank for i in range(3)] for rank in range(3)]


def test_layers_that_are_built_with_a_seed_disturb_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of eight GPUs a rank has one: torch would ask all of them, and say so in ten lines."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.random, "_fork_rng_warned_already", False)
    PipelineModule([LayerSpec(nn.Linear, 2, 2)], Group(None), F.mse_loss, base_seed=1)
