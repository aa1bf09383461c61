"""A pipeline behind DeepSpeed's calls trains as the data-parallel engine does, bit for bit; and what it refuses."""

import csv
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from worlds import run

import refimpl.deepspeed as deepspeed
from refimpl import launch
from refimpl.checkpoint.errors import CheckpointError
from refimpl.comm.group import Group
from refimpl.comm.mesh import Mesh
from refimpl.deepspeed.pipe import (
    LayerSpec,
    PipeDataParallelTopology,
    PipelineModule,
    PipeModelDataParallelTopology,
    ProcessTopology,
    TiedLayerSpec,
)
from refimpl.deepspeed.utils import safe_get_full_fp32_param
from refimpl.engine.initialize import initialize
from refimpl.engine.pipeline import PipelineEngine, PipelineError
from refimpl.parallel.conjugates import copy, reduce

WIDTH, STEPS, GAS = 64, 3, 3


def config(**more: Any) -> dict[str, Any]:
    """Clipping at 1.0 is the default."""
    optimizer = {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}}
    batch = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": GAS}
    return {**batch, "optimizer": optimizer, **more}


def layers() -> list[nn.Module]:
    torch.manual_seed(0)
    return [m for _ in range(4) for m in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]


def loss(out: Tensor, label: Tensor) -> Tensor:
    return F.mse_loss(out.float(), label.float()) * 100  # so large that it is clipped


def batches(replica: int, settings: dict[str, Any]) -> Any:
    """(inputs, labels) without end, of one replica; in fp32 where the engine casts them."""
    dtype, cast = dtype_of(settings), settings.get("fp16", {}).get("auto_cast", False)
    generator = torch.Generator().manual_seed(replica)
    while True:
        x, y = torch.randn(2, 2, WIDTH, generator=generator).to(dtype)
        yield (x.float(), y.float()) if cast else (x, y)


class WithLoss(nn.Sequential):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return loss(super().forward(x), y)


Found = tuple[dict[str, Tensor], list[float], float, int]


def dtype_of(settings: dict[str, Any]) -> torch.dtype:
    return torch.bfloat16 if "bf16" in settings else torch.float16 if "fp16" in settings else torch.float32


def by_data(settings: dict[str, Any]) -> Found:
    """Weights by name, losses, the last norm, skipped steps."""
    engine, *_ = initialize(model=WithLoss(*layers()), config=settings)
    data = batches(engine.group.rank, settings)
    losses = [engine.train_batch(data).item() for _ in range(STEPS)]
    state = {name: w.clone() for name, w in engine.module_state_dict().items()}
    return state, losses, engine.get_global_grad_norm() or 0.0, engine.skipped_steps


def by_pipeline(settings: dict[str, Any], stages: int, interval: int) -> Found:
    module = PipelineModule(layers(), stages, loss_fn=loss, activation_checkpoint_interval=interval)
    engine, *_ = initialize(model=module, config=settings)
    assert isinstance(engine, PipelineEngine)
    ends = engine.is_first_stage() or engine.is_last_stage()
    data = batches(engine.group.rank, settings) if ends else None
    losses = [engine.train_batch(data).item() for _ in range(STEPS)]
    state = {name: w.clone() for name, w in engine.module_state_dict().items()}
    return state, losses, engine.get_global_grad_norm() or 0.0, engine.skipped_steps


def by_pipeline_of_nothing_finite() -> list[str]:
    engine, *_ = initialize(model=PipelineModule(layers(), 2, loss_fn=loss), config=config())
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        engine.train_batch(iter([(torch.full((2, WIDTH), float("nan")), torch.zeros(2, WIDTH))] * GAS))
    assert engine.skipped_steps == 1
    return [str(each.message) for each in seen]


def test_a_stage_without_a_loss_has_none_that_is_not_finite() -> None:
    for rank, (told,) in enumerate(run(by_pipeline_of_nothing_finite, ranks=2)):
        assert f"the loss, or what a pipeline's stage gets in its place, of rank {rank} is not finite" in told


@pytest.mark.parametrize(
    ("more", "stages", "replicas"),
    [
        ({}, 3, 1),
        ({"zero_optimization": {"stage": 1}}, 2, 2),
        ({"zero_optimization": {"stage": 1}, "bf16": {"enabled": True}}, 2, 2),
        ({"fp16": {"enabled": True, "initial_scale_power": 14, "hysteresis": 1, "auto_cast": True}}, 2, 1),
    ],
)
def test_it_trains_as_the_data_parallel_engine(more: dict[str, Any], stages: int, replicas: int) -> None:
    (expected, losses, norm, skipped), *_ = run(by_data, config(**more), ranks=replicas)
    seen: set[str] = set()
    for weights, found, found_norm, found_skipped in run(
        by_pipeline, config(**more), stages, 1, ranks=stages * replicas
    ):
        assert found == pytest.approx(losses, rel=1e-6), "the mean over micro-batches is taken in another order"
        assert found_norm == pytest.approx(norm, rel=1e-6)
        assert found_skipped == skipped
        for name, weight in weights.items():
            assert torch.equal(weight, expected[name]), name
        seen |= weights.keys()
    assert seen == expected.keys()
    assert (skipped > 0) == ("fp16" in more), "so large a scale overflows at first"
    assert "fp16" in more or norm > 1


class CutByHand(PipelineModule):
    """As in diffusion-pipe, which also counts frozen weights, by a `_count_layer_params` of its own."""

    def _partition_layers(self, method: str | Any = "uniform") -> None:
        assert callable(self.loss_fn)
        if method == "manual":
            self.parts = [0, 3, len(self._layer_specs)]
            stage = self._topo.get_coord(self.global_rank).pipe
            self._set_bounds(start=self.parts[stage], stop=self.parts[stage + 1])
        else:
            super()._partition_layers(method)

    def _count_layer_params(self) -> list[int]:
        return [1, *[0] * 6, 1]


def by_pipeline_of_a_script() -> tuple[dict[str, Tensor], float, list[int], list[int]]:
    """The script cuts the layers, and makes the optimizer with the engine at hand."""
    module = CutByHand(layers(), 2, loss_fn=loss, partition_method="manual")
    engine, *_ = initialize(model=module, config={k: v for k, v in config().items() if k != "optimizer"})
    assert engine.optimizer is None
    engine._configure_optimizer(lambda ps: torch.optim.SGD(ps, lr=0.01), list(module.parameters()))
    data = batches(engine.group.rank, {})
    for _ in range(STEPS):
        engine.train_batch(data)
    with pytest.raises(ValueError, match="has an optimizer already"):
        engine._configure_optimizer(torch.optim.SGD, list(module.parameters()))
    counted = CutByHand(layers(), 2, loss_fn=loss, partition_method="parameters").parts
    return dict(engine.module_state_dict()), float(engine.get_global_grad_norm() or 0), module.parts, counted


def test_a_script_cuts_the_layers_and_makes_the_optimizer_afterwards() -> None:
    """The norm, by which gradients are clipped, is of both stages, and their mean of all micro-batches."""
    optimizer = {"type": "SGD", "params": {"lr": 0.01}}
    ((expected, _, norm, _),) = run(by_data, config(optimizer=optimizer), ranks=1)
    found = run(by_pipeline_of_a_script, ranks=2)
    for weights, own, parts, counted in found:
        assert (parts, counted) == ([0, 3, 8], [0, 7, 8])
        assert own == pytest.approx(norm, rel=1e-6)
        assert own > 1
        for name, weight in weights.items():
            assert torch.equal(weight, expected[name]), name
    assert {name for weights, *_ in found for name in weights} == expected.keys()


# --- the example that DeepSpeed's users start from: training data to initialize, train_batch without arguments


def as_the_example(folder: Path) -> tuple[list[float], float, int, tuple[bool, bool], bool]:
    torch.manual_seed(0)
    net = [LayerSpec(nn.Conv2d, 3, 8, 3), LayerSpec(nn.ReLU, inplace=True), lambda x: x.flatten(1),
           LayerSpec(nn.Linear, 8 * 36, 16), LayerSpec(nn.Linear, 16, 4)]  # fmt: skip
    module = deepspeed.PipelineModule(
        layers=net, loss_fn=nn.CrossEntropyLoss(), topology=PipeDataParallelTopology(num_pp=2, num_dp=2),
        partition_method="type:linear|conv", seed_layers=True,
    )  # fmt: skip
    y = torch.randint(4, (64,))
    data = torch.utils.data.TensorDataset(torch.rand(64, 3, 8, 8) + y.view(-1, 1, 1, 1), y)
    engine, _, loader, _ = deepspeed.initialize(
        model=module, model_parameters=[p for p in module.parameters() if p.requires_grad], training_data=data,
        config=config(train_micro_batch_size_per_gpu=4, zero_optimization={"stage": 1},
                      pipeline={"activation_checkpoint_interval": 2},
                      csv_monitor={"enabled": True, "output_path": str(folder), "job_name": "job"}),
    )  # fmt: skip
    assert module.checkpoint_interval == 2
    engine.eval()
    losses = [engine.train_batch().item() for _ in range(20)]
    assert module.training
    assert engine.group.ledger.calls(by="tag")["gradients"] == 1  # of the last batch
    kept = list(loader)
    before = engine.eval_batch(iter(kept)).item()
    engine.set_dataloader(kept)
    again = engine.eval_batch().item()
    outputs = engine.eval_batch(iter(kept), compute_loss=False, num_micro_batches=3)
    shapes = None if outputs is None else [tuple(out.shape) for out in outputs]
    assert (shapes == [(4, 4)] * 3) == engine.is_last_stage()
    return (
        losses,
        before,
        engine.tput_timer.global_step_count,
        (engine.is_first_stage(), engine.is_last_stage()),
        before == again,
    )


def test_the_pipeline_example_learns(tmp_path: Path) -> None:
    results = run(as_the_example, tmp_path, ranks=4)
    rows = list(csv.reader((tmp_path / "job" / "Train_Samples_train_loss.csv").read_text().splitlines()))
    assert [float(value) for _, value in rows[1:]] == pytest.approx(results[0][0], rel=1e-6)
    assert [ends for *_, ends, _ in results] == [(True, False)] * 2 + [(False, True)] * 2
    for losses, evaluated, steps, _, again in results:
        assert (losses, evaluated) == (results[0][0], results[0][1]), "every rank knows every loss"
        assert losses[-1] < 0.8 * losses[0]
        assert steps == 20
        assert again


def batch_fn_and_shapes() -> list[float]:
    """Losses with data that is no pair, and with sequences of another length after a reset."""
    engine, *_ = initialize(model=PipelineModule(layers(), 2, loss_fn=loss), config=config())
    engine.set_batch_fn(lambda item: (item["x"], item["x"]))
    losses = []
    for rows in (2, 5):
        engine.set_dataiterator(iter([{"x": torch.ones(rows, WIDTH)}] * GAS))
        losses.append(engine.train_batch().item())
        engine.reset_activation_shape()
    return losses


def test_a_batch_function_and_other_shapes() -> None:
    first, second = run(batch_fn_and_shapes)
    assert first == second
    assert len(first) == 2


class Counting:
    """A schedule as Megatron's: its `step` asks how many samples an update was made of."""

    def __init__(self) -> None:
        self.samples = 0

    def step(self, increment: int, token_num: int | None = None) -> None:
        self.samples += increment

    def state_dict(self) -> dict[str, int]:
        return vars(self)


def as_megatron() -> tuple[int, list[float]]:
    """The samples its schedule was told of; losses of data that its batch function alone has."""
    optimizer = torch.optim.SGD((module := PipelineModule(layers(), 2, loss_fn=loss)).parameters(), lr=0.1)
    schedule = Counting()
    settings = {key: value for key, value in config().items() if key != "optimizer"}
    engine, *_ = initialize(model=module, optimizer=optimizer, lr_scheduler=schedule, config=settings)
    engine.set_batch_fn(lambda item: (torch.ones(2, WIDTH), torch.zeros(2, WIDTH)) if item is None else item)
    losses = [engine.train_batch().item(), engine.eval_batch(None).item()]
    return schedule.samples, losses


def test_a_pipeline_as_megatron_drives_it() -> None:
    (samples, losses), other = run(as_megatron)
    assert (samples, losses) == (2 * GAS, other[1])
    assert losses[1] < losses[0]


def begun_from_layer_files(folder: Path) -> tuple[list[bool], str]:
    """As llama's pipeline trainers do, whose converters write a file a layer by hand."""
    deepspeed.init_distributed()
    specs = [LayerSpec(nn.Linear, 2, 2), LayerSpec(nn.Tanh), *(TiedLayerSpec("t", nn.Linear, 2, 2) for _ in range(2))]
    settings = config(bf16={"enabled": True}, zero_optimization={"stage": 1})
    engine, *_ = deepspeed.initialize(model=PipelineModule(specs, 2, loss_fn=loss), config=settings)
    path, client_state = engine.load_checkpoint(folder, load_module_only=True, load_optimizer_states=False)
    assert (path, client_state) == (str(folder / "step1"), {})
    masters = {name: safe_get_full_fp32_param(p) for name, p in engine.module.named_parameters()}
    same = [bool((p == (8 if "tied" in name else 7)).all()) for name, p in masters.items()]
    with pytest.raises(CheckpointError, match="no such file"):
        engine.load_checkpoint(folder)
    with pytest.raises(CheckpointError, match="load_checkpoint: 'a/b' is no tag"):
        engine.load_checkpoint(folder, tag="a/b", load_module_only=True)
    with pytest.raises(CheckpointError) as error:
        engine.load_checkpoint(folder, tag="step2", load_module_only=True)
    return same, str(error.value)


def test_a_pipeline_begins_from_deepspeeds_files_of_layers(tmp_path: Path) -> None:
    def write(tag: str, layer: str, value: int, width: int = 2) -> None:
        (tmp_path / tag).mkdir(exist_ok=True)
        weights = {"weight": torch.full((width, 2), value), "bias": torch.full((2,), value)}
        torch.save(weights, tmp_path / tag / f"layer_{layer}-model_00-model_states.pt")

    for layer, value in {"00": 7, "02": 8, "3": 8}.items():  # one is not padded, as some write it
        write("step1", layer, value)
    (tmp_path / "latest").write_text("step1")
    write("step2", "00", 7, width=3)
    for rank, (same, says) in enumerate(run(begun_from_layer_files, tmp_path, ranks=2)):
        assert same == [True] * len(same)
        assert same
        wrong = r"0\.weight is \(3, 2\) in .*, and \(2, 2\) in the model"
        assert re.search(wrong, says), (rank, says)


def logits_and_an_end() -> tuple[float, list[float], Any, str]:
    """A loss, the losses of each logits, which rank has them, and what an iterator that ends says."""
    engine, *_ = initialize(model=PipelineModule(layers(), 2, loss_fn=loss), config=config())
    feeds = batches(0, {})
    data = [next(feeds) for _ in range(2 * GAS - 1)]
    found, said = engine.eval_batch(iter(data), return_logits=True)
    outputs, last = engine.eval_batch(iter(data), return_logits=True, compute_loss=False)
    assert (last is None) == (said is None) or torch.equal(last, said)
    each = [] if outputs is None else [loss(out, y).item() for out, (_, y) in zip(outputs, data, strict=False)]
    engine.micro_batches = 2  # as scripts do around an evaluation
    assert engine.eval_batch(iter(data)) == engine.eval_batch(iter(data), num_micro_batches=2) != found
    with pytest.raises(ValueError, match="micro_batches is 2, and a step has 3: write that back"):
        engine.train_batch(iter(data))
    engine.micro_batches = GAS
    data_iter = iter(data)
    engine.train_batch(data_iter)
    with pytest.raises(StopIteration) as ended:
        engine.train_batch(data_iter)
    return found.item(), each, None if said is None else loss(said, data[GAS - 1][1]).item(), str(ended.value)


def test_logits_are_the_last_stages_and_data_that_ends_says_where() -> None:
    (mean, none, nothing, end), (_, each, last, _) = run(logits_and_an_end)
    assert (none, nothing, end) == ([], None, "the data ended after 2 of a batch's 3 micro-batches")
    assert mean == pytest.approx(sum(each) / GAS, rel=1e-6)
    assert last == each[-1]


def an_end() -> tuple[float, str]:
    """A script's last step of an epoch, and the first one of the next."""
    engine, *_ = initialize(model=PipelineModule(layers(), 3, loss_fn=loss), config=config())
    feeds = batches(0, {})
    data_iter = iter([next(feeds) for _ in range(2 * GAS - 1)])
    engine.train_batch(data_iter)
    with pytest.raises(StopIteration) as ended:
        engine.train_batch(data_iter)
    return engine.train_batch(feeds).item(), str(ended.value)


def test_an_iterator_ends_on_all_ranks_also_where_its_data_is_not_used() -> None:
    found = run(an_end, ranks=3)
    assert found == [(found[0][0], "the data ended after 2 of a batch's 3 micro-batches")] * 3


def norm_after_a_failure(fails: bool) -> float | None:
    """Of the batch behind one whose second micro-batch has labels that are wrong."""
    engine, *_ = initialize(model=PipelineModule(layers(), 1, loss_fn=loss), config=config())
    feeds = batches(engine.group.rank, {})
    data = [next(feeds) for _ in range(GAS)]
    if fails:
        with pytest.raises(RuntimeError, match="must match the size"):
            engine.train_batch(iter([data[0], (data[1][0], data[1][1][:, :5]), data[2]]))
    engine.train_batch(iter(data))
    assert (engine.global_samples, engine.micro_steps) == (12, GAS)
    return engine.get_global_grad_norm()


def test_of_a_batch_that_fails_nothing_is_left_to_the_next() -> None:
    assert run(norm_after_a_failure, True) == run(norm_after_a_failure, False)


# --- a topology with a model axis, whose layers their author has split


class Halves(nn.Module):
    """x + tanh(norm(x) A) B, the columns of A and the rows of B dealt out over a group; alone it is all of it."""

    def __init__(self, seed: int, group: Group) -> None:
        super().__init__()
        self.group, part = group, WIDTH // group.size
        generator = torch.Generator().manual_seed(seed)
        into, out = torch.randn(2, WIDTH, WIDTH, generator=generator) / 8
        mine = slice(group.rank * part, (group.rank + 1) * part)
        self.norm = nn.LayerNorm(WIDTH)
        self.into, self.out = nn.Parameter(into[:, mine].clone()), nn.Parameter(out[mine].clone())
        for p in (self.into, self.out):
            p.tensor_model_parallel = True  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + reduce((copy(self.norm(x), self.group) @ self.into).tanh() @ self.out, self.group)
        return y


def over_a_topology(pp: int, mp: int, dp: int) -> tuple[list[float], float, Tensor]:
    """Losses, the last norm, and the last layer's norm's weight, where it is."""
    group = Mesh({"pipe": pp, "data": dp, "model": mp}).group("model")
    topology = PipeModelDataParallelTopology(num_pp=pp, num_mp=mp, num_dp=dp)
    specs = [LayerSpec(Halves, seed, group) for seed in range(4)]
    module = PipelineModule(specs, topology=topology, loss_fn=loss, partition_method="uniform")
    settings = config(gradient_accumulation_steps=4 // dp, zero_optimization={"stage": 1})
    engine, *_ = initialize(model=module, config=settings)
    losses = []
    for step in range(STEPS):
        pairs = []
        for micro in range(engine.axes.feed, 4, dp):
            generator = torch.Generator().manual_seed(10 * step + micro)
            pairs.append(tuple(torch.randn(2, 2, WIDTH, generator=generator)))
        losses.append(engine.train_batch(iter(pairs)).item())
    weights = engine.module_state_dict()
    return losses, engine.get_global_grad_norm() or 0.0, weights.get("3.norm.weight", torch.zeros(0))


@pytest.mark.parametrize("layout", [(2, 2, 1), (1, 2, 2)])
def test_a_model_axis_whose_layers_are_split_by_their_author(layout: tuple[int, int, int]) -> None:
    ((losses, norm, weight),) = run(over_a_topology, 1, 1, 1, ranks=1)
    for found, found_norm, found_weight in run(over_a_topology, *layout, ranks=4):
        assert found == pytest.approx(losses, rel=1e-5)
        assert found_norm == pytest.approx(norm, rel=1e-5)
        if len(found_weight):
            torch.testing.assert_close(found_weight, weight, rtol=1e-4, atol=1e-5)
    assert norm > 1, "it is clipped, by the norm of all parts"


# --- what is refused


def refused(what: str) -> None:
    stages = {"stages": 3, "none": 0}.get(what, 2)
    if what == "axis":
        PipelineModule(layers(), topology=ProcessTopology(["pipe", "slice"], [1, 2]))
    stage = 2 if what == "zero" else 0
    losses = {
        "loss": None, "detached": lambda out, label: loss(out.detach(), label),
        "pair": lambda out, label: (loss(out, label), out),
    }  # fmt: skip
    module = PipelineModule(layers(), stages, loss_fn=losses.get(what, loss))
    engine, *_ = initialize(model=module, config=config(zero_optimization={"stage": stage}))
    data = iter([torch.ones(1)] * GAS if what == "pairs" else [(torch.ones(2, WIDTH),) * 2] * GAS)
    calls = {
        "forward": lambda: engine(torch.ones(2, WIDTH)), "backward": lambda: engine.backward(torch.ones(())),
        "step": engine.step,
        "no data": engine.train_batch, "reduced": lambda: engine.eval_batch(data, reduce_output=None),
    }  # fmt: skip
    calls.get(what, lambda: engine.train_batch(data))()


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("stages", "num_stages 3 does not divide the job's 2 ranks"),
        ("axis", "the axis 'slice' of the topology: ranks are laid out on pipe, data, model"),
        ("zero", "ZeRO stage 2 with a pipeline: .* use stage 0 or 1"),
        ("forward", "trained by train_batch"),
        ("backward", "there is no backward"),
        ("step", "there is no step"),
        ("no data", r"no data: pass data_iter=..., set_dataloader"),
        ("none", "num_stages 0 does not divide the job's 2 ranks"),
        ("reduced", "reduce_output None of a loss: only 'avg'"),
        ("pairs", r"must be pairs \(inputs, labels\), not Tensor: set_batch_fn"),
        ("loss", r"the loss must be a scalar, not a tensor of shape \(2, 64\)"),
        ("pair", "the loss must be a scalar tensor, nothing beside it: got tuple"),
        ("detached", "the loss has no gradient, so that nothing would be trained"),
    ],
)
def test_what_a_pipeline_refuses(what: str, says: str) -> None:
    with pytest.raises(launch.RankError, match=says):
        run(refused, what)


def test_no_instruction_is_replaced() -> None:
    """Nobody would call the other one. Modules are reached by their dots alone, as sd-scripts reaches its builder."""
    deepspeed.ops.op_builder.CPUAdamBuilder().load()
    with pytest.raises(NotImplementedError, match=r"_INSTRUCTION_MAP\[ReduceGrads\]: .* leave them out"):
        PipelineEngine._INSTRUCTION_MAP[deepspeed.runtime.pipe.schedule.ReduceGrads] = lambda engine: None


def test_the_paths_that_scripts_import_from() -> None:
    assert deepspeed.runtime.pipe.topology.PipeDataParallelTopology is PipeDataParallelTopology
    assert deepspeed.runtime.pipe.module.TiedLayerSpec is deepspeed.pipe.TiedLayerSpec
    assert deepspeed.runtime.pipe.PipelineModule is deepspeed.PipelineModule is PipelineModule
    assert deepspeed.runtime.pipe.engine.PipelineEngine is PipelineEngine


def questions() -> dict[str, Any]:
    module = PipelineModule(layers(), 2, loss_fn=loss, partition_method="uniform", checkpointable_layers=["Linear"])
    module.set_checkpoint_interval(2)
    assert module.activation_checkpoint_interval == 2
    with pytest.raises(ValueError, match="no layer 8: the model has 8"):
        module.stage_owner(8)
    with pytest.raises(ValueError, match="must not be negative"):
        module.set_checkpoint_interval(-1)
    owners = [module.stage_owner(i) for i in range(8)]
    x = out = torch.ones(2, WIDTH)
    for part in module.forward_funcs:  # as GPT-NeoX makes a plain model of a pipeline's layers
        out = module.activation_checkpoint_func(part, out)
    assert torch.equal(out, module.stage(module.stages[0], x))
    assert not torch.equal(out, x)
    return {"owners": owners, "parts": module.parts, "stages": (module.num_stages, module.num_pipeline_stages()),
            "ranks": module.topology().get_axis_comm_lists("pipe"), "interval": module.checkpoint_interval}  # fmt: skip


def test_what_a_module_is_asked() -> None:
    for answers in run(questions, ranks=4):
        assert answers == {
            "owners": [0] * 4 + [1] * 4, "parts": [0, 4, 8], "stages": (2, 2), "ranks": [[0, 2], [1, 3]], "interval": 2,
        }  # fmt: skip


class Shown(nn.Linear):
    """Remembers what it was called with."""

    def forward(self, x: Tensor) -> Tensor:
        self.seen = [*getattr(self, "seen", []), *x[:, 0].tolist()]
        return super().forward(x)


def grid_and_order() -> tuple[int, int, int, list[float]]:
    data = [(torch.full((4,), float(i)), torch.zeros(4)) for i in range(8)]
    module = PipelineModule([Shown(4, 4), nn.Linear(4, 4)], 2, loss_fn=F.mse_loss)
    engine, *_ = initialize(model=module, config=config(gradient_accumulation_steps=2), training_data=data)
    engine.set_has_attention_mask(True)
    engine.train_batch()
    grid = engine.grid
    assert (engine.stage_id, engine.num_stages, engine.is_pipe_parallel) == (grid.get_stage_id(), 2, True)
    assert engine.get_pipeline_parallel_rank() == grid.get_stage_id()
    assert module.loss_fn is F.mse_loss
    seen = [x for m in module.modules() if isinstance(m, Shown) for x in m.seen]
    return grid.get_data_parallel_rank(), grid.get_stage_id(), grid.get_pipe_parallel_world_size(), seen


def test_an_engine_knows_its_grid_and_reads_the_data_in_order() -> None:
    """As DeepSpeed: samples of a micro-batch that stand together in the dataset may have a shape of their own."""
    found = run(grid_and_order, ranks=4)
    assert [(data, stage, stages) for data, stage, stages, _ in found] == [(0, 0, 2), (1, 0, 2), (0, 1, 2), (1, 1, 2)]
    assert [seen for *_, seen in found] == [[0, 2, 4, 6], [1, 3, 5, 7], [], []]


def test_a_pipeline_error_is_one_class() -> None:
    assert issubclass(PipelineError, RuntimeError)
    with pytest.raises(ValueError, match="num_stages or topology"):
        PipelineModule(layers())
