"""`compression_training` of the JSON: every stage trains the same bits, from the step on that was asked for."""

import copy
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import worlds
from torch import nn

import refimpl
from refimpl.comm.group import Group
from refimpl.compress.weights.grid import on_grid
from refimpl.compress.weights.layers import Compressed
from refimpl.deepspeed.compression import convert_conv1d_to_linear, init_compression, redundancy_clean
from refimpl.deepspeed.compression.basic_layer import LinearLayer_Compress
from refimpl.deepspeed.compression.compress import student_initialization
from refimpl.engine.config import load_config
from refimpl.engine.configuration.keys import ConfigError, ConfigWarning
from refimpl.zero.init import Init


class Net(nn.Module):
    """An embedding, blocks whose middle can become smaller, and a head. 2 and 3 divide no size of them."""

    def __init__(self, blocks: int = 1) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 5)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 5)) for _ in range(blocks))
        self.head = nn.Linear(5, 11, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(x)
        return nn.functional.cross_entropy(self.head(x), (ids + 1) % 11)


def technique(groups: dict[str, Any], **shared: Any) -> dict[str, Any]:
    return {"shared_parameters": {"enabled": True, "schedule_offset": 0, **shared}, "different_groups": groups}


def group(words: list[str], related: list[list[str]] | None = None, **params: Any) -> dict[str, Any]:
    return {"params": params, "modules": words, **({"related_modules": related} if related else {})}


SECTION = {
    "weight_quantization": technique(
        {
            "few": group(["embed"], start_bits=2, target_bits=2),
            "more": group([r"blocks\.0\.2", "head"], start_bits=6, target_bits=4),
        },
        schedule_offset=1,
        fp16_mixed_quantize={"enabled": False, "quantize_change_ratio": 0.1},
    ),
    "activation_quantization": technique({"all": group(["*"], bits=8)}, quantization_type="asymmetric"),
    "sparse_pruning": technique({"s": group(["head"], dense_ratio=0.6)}, schedule_offset=2),
    "row_pruning": technique(
        {"r": group([r"blocks\.\d+\.0"], [[r"blocks\.\d+\.2"]], dense_ratio=0.5)}, method="topk", schedule_offset=1
    ),
}


def config(stage: int = 0, section: dict[str, Any] = SECTION, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.05, "weight_decay": 0.01}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "compression_training": section,
        **more,
    }


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randint(0, 11, (6,), generator=torch.Generator().manual_seed(10 * step + rank))


def net(settings: dict[str, Any], seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return init_compression(Net(), settings)


def train(
    settings: dict[str, Any], steps: range = range(4), folder: Path | None = None, last: Path | None = None
) -> Any:
    """Losses, and the whole weights. Rank r's start, scores too, is rank 0's."""
    rank = Group.world().rank
    engine, *_ = refimpl.initialize(model=net(settings, rank), config=settings)
    if folder is not None:
        engine.load_checkpoint(folder)
    losses = []
    for step in steps:
        loss = engine(batch(rank, step))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    if last is not None:
        engine.save_checkpoint(last)
    state = engine.module_state_dict()
    return losses, {name: value.clone() for name, value in state.items()}, [m.step for m in layers(engine.module)]


def layers(model: nn.Module) -> list[Compressed]:
    return [module for module in model.modules() if isinstance(module, Compressed)]


def one_process(settings: dict[str, Any], ranks: int, steps: int = 4) -> list[list[float]]:
    model = net(settings)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=0.05, fused=True), []
    for step in range(steps):
        for layer in layers(model):
            layer.step = step
        each = [model(batch(rank, step)) for rank in range(ranks)]
        gradients = [torch.autograd.grad(loss, list(model.parameters()), allow_unused=True) for loss in each]
        for parameter, of_ranks in zip(model.parameters(), zip(*gradients, strict=True), strict=True):
            parameter.grad = sum(torch.zeros_like(parameter) if g is None else g for g in of_ranks) / ranks
        optimizer.step()
        losses.append([loss.item() for loss in each])
    return losses


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_stage_trains_the_same_bits(ranks: int) -> None:
    first = worlds.run(train, config(0), ranks=ranks)
    right = one_process(config(0), ranks)
    for rank, (losses, _, steps) in enumerate(first):
        assert losses == [each[rank] for each in right]
        assert set(steps) == {4}
    for stage in (1, 2, 3):
        for (losses, weights, _), (expected, whole, _) in zip(
            worlds.run(train, config(stage), ranks=ranks), first, strict=True
        ):
            assert losses == expected
            assert all(torch.equal(weights[name], value) for name, value in whole.items())


def test_training_goes_on_where_the_schedule_was(tmp_path: Path) -> None:
    section = {"weight_quantization": technique({"w": group(["*"], start_bits=8, target_bits=3)}, schedule_offset=1)}
    through = worlds.run(train, config(1, section), ranks=2)
    worlds.run(train, config(1, section), range(2), None, tmp_path, ranks=2)
    again = worlds.run(train, config(3, section), range(2, 4), tmp_path, ranks=2)
    for (losses, weights, steps), (expected, whole, _) in zip(again, through, strict=True):
        assert losses == expected[2:]
        assert set(steps) == {4}
        assert all(torch.equal(weights[name], value) for name, value in whole.items())


def test_offset_bits_and_overflow_count_updates() -> None:
    section = {"weight_quantization": technique({"w": group(["head"], start_bits=8, target_bits=4)}, schedule_offset=1)}
    engine, *_ = refimpl.initialize(model=net(config(0, section)), config=config(0, section))
    (layer,) = layers(engine.module)
    seen = []
    for step in range(4):
        weight, _ = layer.now()
        seen.append(next((b for b in range(3, 9) if torch.equal(weight, on_grid(layer.weight, b))), None))
        engine.backward(engine(batch(0, step)) * (float("inf") if step == 1 else 1))
        with pytest.warns(UserWarning, match="update is skipped") if step == 1 else nullcontext():
            engine.step()
    assert seen == [None, 8, 8, 7]  # step 1 was skipped, and repeats


def test_what_was_trained_is_what_comes_out_smaller() -> None:
    settings = config(1)
    engine, *_ = refimpl.initialize(model=net(settings), config=settings)
    for step in range(4):
        engine.backward(engine(batch(0, step)))
        engine.step()
    engine.eval()
    before = engine(batch(0, 9)).item()
    clean = redundancy_clean(engine, settings).module
    assert isinstance(clean.head, LinearLayer_Compress)
    for layer in layers(clean):
        assert set(layer.techniques) <= {"activation_quantization"}
    assert [tuple(m.weight.shape) for m in clean.blocks[0] if isinstance(m, nn.Linear)] == [(4, 5), (5, 4)]
    assert int((clean.head.weight != 0).sum()) == 33
    assert len(clean.embed.weight[3].unique()) <= 3
    assert all(
        p.untyped_storage().nbytes() == p.nbytes for p in clean.parameters()
    )  # no buffer of the stage's in a file
    # two of four bits are not reached after three steps of rounding, so the answer moves by a little
    assert clean(batch(0, 9)).item() == pytest.approx(before, rel=0.2)


def sharded(settings: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    with Init():
        model = Net()
    init_compression(model, settings)
    engine, *_ = refimpl.initialize(model=model, config=settings)
    loss = engine(batch(Group.world().rank, 0))
    with pytest.raises(NotImplementedError, match=r"redundancy_clean: the weights are in shards .*save_16bit_model"):
        redundancy_clean(engine, settings)
    return loss.item(), engine.module.state_dict()["head.sparse_pruning_mask"].clone()


def test_a_model_built_in_shards_has_the_same_masks() -> None:
    section = {"sparse_pruning": technique({"s": group(["head"], dense_ratio=0.6)})}
    model = net(config(0, section))
    for layer in layers(model):
        layer.step = 0
    for rank, (loss, mask) in enumerate(worlds.run(sharded, config(3, section), ranks=2)):
        assert torch.equal(mask, model.head.sparse_pruning_mask)
        assert loss == pytest.approx(model(batch(rank, 0)).item(), abs=1e-6)


def test_a_model_that_was_not_made_ready_is_not_trained() -> None:
    engine, *_ = refimpl.initialize(model=Net(), config=config())
    loss = engine(batch(0, 0))  # a teacher, say
    engine.backward(loss)
    with pytest.raises(ConfigError, match=r"call init_compression\(model, config\) before initialize"):
        engine.step()
    rounded = config(0, {name: SECTION[name] for name in ("weight_quantization", "activation_quantization")})
    with pytest.raises(ConfigError, match=r"groups\.r: topk learns scores: call init_compression before initialize"):
        init_compression(engine, config())
    with pytest.raises(ConfigError, match=r"embed was not made ready: call init_compression before"):
        redundancy_clean(engine, rounded)
    init_compression(engine, rounded)  # as GPT-2's example does
    assert engine(batch(0, 0)).item() != loss.item()


def test_layers_that_nobody_would_switch_on_are_told() -> None:
    with pytest.warns(ConfigWarning, match="configuration given to initialize has none: nothing is rounded or masked"):
        refimpl.initialize(model=net(config()), config=config(0, {}))
    model = redundancy_clean(net(config()), config())
    refimpl.initialize(model=model, config=config(0, {}))  # rounds its inputs for good


def test_a_student_begins_with_its_teachers_layers() -> None:
    section = {
        "layer_reduction": {
            "enabled": True,
            "keep_number_layer": 2,
            "module_name_prefix": "blocks",
            "teacher_layer": [1, 3],
            "other_module_name": ["embed"],
        }
    }
    teacher, student = Net(4), Net(2)
    head = student.head.weight.detach().clone()
    with pytest.raises(ValueError, match="needs teacher_model"):
        init_compression(student, config(0, section))
    init_compression(student, config(0, section), teacher_model=teacher)
    for mine, theirs in (("blocks.0.0", "blocks.1.0"), ("blocks.1.2", "blocks.3.2"), ("embed", "embed")):
        assert torch.equal(student.get_submodule(mine).weight, teacher.get_submodule(theirs).weight)
    assert torch.equal(student.head.weight, head)
    assert not layers(student)
    student_initialization(other := Net(2), teacher, config(0, section))
    assert torch.equal(other.blocks[1][0].weight, teacher.blocks[3][0].weight)


def cut() -> None:
    settings = config(tensor_parallel={"autotp_size": 2})
    with pytest.raises(ConfigError, match="autotp_size: not with compression_training"):
        refimpl.initialize(model=net(settings), config=settings)


def test_layers_that_tensor_ranks_would_replace_are_not_lost_in_silence() -> None:
    worlds.run(cut, ranks=2)


def test_conv1d_becomes_linear() -> None:
    class Conv1D(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.randn(3, 5)), nn.Parameter(torch.randn(5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.addmm(self.bias, x, self.weight)

    model, x = nn.ModuleDict({"a": (conv := Conv1D()), "b": conv}), torch.randn(2, 3)
    before = model["a"](x)
    assert isinstance(convert_conv1d_to_linear(model, Conv1D)["a"], nn.Linear)
    assert torch.allclose(model["a"](x), before)
    assert model["b"] is model["a"]


Q, S = "weight_quantization", "sparse_pruning"
WRONG: list[tuple[dict[str, Any], str]] = [
    ({Q: technique({"w": group(["*"], start_bits=2, target_bits=4)})}, "start_bits 2 is less than target_bits 4"),
    ({Q: technique({"w": group(["*"], start_bits=8)})}, r"w\.params\.target_bits: Field required"),
    ({Q: technique({"w": group(["*"], start_bits=8, target_bit=8)})}, "w.params.target_bit: unknown key; did you mean"),
    ({Q: technique({})}, "enabled, and has no group"),
    (
        {Q: technique({"w": group(["*"], start_bits=8, target_bits=1)}, quantization_type="asymmetric")},
        "w: 1 and 2 bits",
    ),
    (
        {Q: technique({"w": group(["*"], start_bits=8, target_bits=8)}, quantize_group=2)},
        "did you mean quantize_groups",
    ),
    ({S: technique({"s": group(["*"], dense_ratio=1.5)})}, "dense_ratio"),
    ({S: technique({"s": group(["*"], dense_ratio=0.5)}, method="snip_momentum")}, "neural_compressor"),
    ({"row_pruning": technique({"r": group(["a", "b"], [["c"]], dense_ratio=0.5)})}, "2 modules have 1 lists"),
    ({"head_pruning": technique({"h": group(["*"], dense_ratio=0.5)}, method="topk")}, "num_heads: Field required"),
    ({"layer_reduction": {"enabled": True, "keep_number_layer": 2, "teacher_layer": [1]}}, "keep_number_layer is 2"),
]


@pytest.mark.parametrize(("section", "said"), WRONG)
def test_what_is_wrong_in_the_section_is_named(section: dict[str, Any], said: str) -> None:
    for read in (
        lambda: load_config(config(0, section), world_size=1),
        lambda: init_compression(Net(), config(0, section)),
    ):
        with pytest.raises(ConfigError, match=said):
            read()


UNFIT: list[tuple[dict[str, Any], str]] = [
    ({S: technique({"s": group(["head", "hea"], dense_ratio=0.5)})}, "groups.s: head is in s already"),
    ({"row_pruning": technique({"r": group(["embed"], dense_ratio=0.5)})}, "embed finds embed, a Embedding, which row"),
    ({Q: technique({"w": group(["head"], start_bits=8, target_bits=8)}, quantize_groups=4)}, r"4 does not divide head"),
    ({"head_pruning": technique({"h": group(["head"], dense_ratio=0.5)}, num_heads=2)}, "num_heads 2 does not divide"),
    (
        {"row_pruning": technique({"r": group([r"blocks\.0\.0"], [["blocks"]], dense_ratio=0.5)})},
        r"groups\.r: 1 layers are pruned, 2 are related: \['blocks\.0\.0', 'blocks\.0\.2'\]",
    ),
    ({S: technique({"s": group(["(head"], dense_ratio=0.5)})}, r"'\(head' is no regular expression"),
]


@pytest.mark.parametrize(("section", "said"), UNFIT)
def test_what_does_not_fit_the_model_leaves_it_as_it_is(section: dict[str, Any], said: str) -> None:
    model = Net()
    with pytest.raises(ConfigError, match=said):
        init_compression(model, config(0, section))
    assert not layers(model)


def test_every_technique_that_is_enabled_is_read() -> None:
    section = load_config(config(), world_size=1).compression_training
    assert [name for name in SECTION if section[name] is None] == []
    assert section.weight_quantization.different_groups["more"].params.target_bits == 4
    assert section.sparse_pruning.shared_parameters.schedule_offset == 2


def test_what_finds_no_layer_and_what_has_no_effect_is_told() -> None:
    section = {S: technique({"s": group(["attention"], dense_ratio=0.5)}, block_pattern="4x1")}
    with pytest.warns(ConfigWarning, match="attention finds no layer that can be compressed") as told:
        init_compression(Net(), config(0, section))
    assert told[0].filename == __file__
    with pytest.warns(ConfigWarning, match=r"groups\.s: modules is empty, so that it is for no layer"):
        init_compression(Net(), config(0, {S: technique({"s": group([], dense_ratio=0.5)})}))
    with pytest.warns(ConfigWarning, match=r"block_pattern = '4x1': read with snip_momentum alone"):
        load_config(config(0, section), world_size=1)
    off = {S: {"shared_parameters": {"enabled": False, "method": "snip_momentum", "block_pattern": "4x1"}}}
    assert not load_config(config(0, off), world_size=1).compression_training.active
    assert not layers(init_compression(Net(), config(0, off)))
    model = init_compression(Net(), config())
    with pytest.raises(ConfigError, match="has it already: init_compression was called before"):
        init_compression(model, config())


def test_a_tied_weight_is_in_one_layer_of_a_technique() -> None:
    model = Net()
    model.head.weight = model.embed.weight
    section = {
        Q: technique(
            {"w": group(["embed"], start_bits=8, target_bits=8), "v": group(["*"], start_bits=8, target_bits=8)}
        )
    }
    section[Q]["different_groups"]["v"]["modules"] = ["head"]
    with pytest.raises(ConfigError, match=r"groups\.v: embed and head have one weight: name one of them"):
        init_compression(model, config(0, section))
    assert not layers(model)


def test_a_layer_has_each_of_its_names_and_not_what_torch_compile_adds() -> None:
    model = Net(2)
    model.tail = model.blocks[1]
    section = {S: technique({"s": group([r"^tail\.0", "^head", r"^blocks\.1\.0"], dense_ratio=0.5)})}
    with pytest.raises(ConfigError, match=r"blocks\.1\.0 is in s already"):
        init_compression(model, config(0, section))
    section[S]["different_groups"]["s"]["modules"].pop()
    model.head = torch.compile(model.head, backend="eager")
    init_compression(torch.compile(model, backend="eager"), config(0, section))
    assert [name for name, m in model.named_modules() if isinstance(m, Compressed)] == ["blocks.1.0", "head._orig_mod"]


def test_a_model_that_cannot_be_cut_is_left_as_it_is() -> None:
    """Of three rows two are left, which no other three parts can leave; and a size that is no multiple."""
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(2, 3), nn.Linear(3, 4), nn.Linear(4, 2))
    for related, said in (("2", "2, a Linear with 2"), ("3", "3, a CompressedLinear with 4")):
        layers = {"a": group(["^0"], [["2"]], dense_ratio=0.5), "b": group(["^1"], [[related]], dense_ratio=0.5)}
        settings = config(0, {Q: technique({"w": group(["^3"], start_bits=4, target_bits=4)})})
        settings["compression_training"]["row_pruning"] = technique(layers)
        ready = init_compression(copy.deepcopy(model), settings)
        before = {name: value.clone() for name, value in ready.state_dict().items()}
        with pytest.raises(ConfigError, match=rf"groups\.b: 1 has 3 parts, and {said} there, cannot"):
            redundancy_clean(ready, settings)
        assert all(torch.equal(value, before.pop(name)) for name, value in ready.state_dict().items())
        assert not before


def test_an_encoder_layer_of_torch_takes_no_shortcut_around_its_masks() -> None:
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    section = {S: technique({"s": group(["linear1", "linear2"], dense_ratio=0.5)})}
    engine, *_ = refimpl.initialize(model=init_compression(model, config(0, section)), config=config(0, section))
    x = torch.randn(2, 3, 8)
    masked = engine(x)
    with torch.no_grad():
        assert torch.allclose(engine.eval()(x), masked, atol=1e-6)
    assert not torch.allclose(redundancy_clean(model, config(0, section))(x), x)


def test_an_engine_goes_on_around_a_cleaned_model() -> None:
    assert worlds.run(cleaned, ranks=2) == [True, True]


def cleaned() -> bool:
    section = {
        "row_pruning": technique({"r": group([r"blocks\.0\.0"], [[r"blocks\.0\.2"]], dense_ratio=0.5)}, method="l1")
    }
    engine, *_ = refimpl.initialize(model=net(config(1, section)), config=config(1, section))
    before = engine(batch(0, 0)).item()
    redundancy_clean(engine, config(1, section))
    return bool(abs(engine(batch(0, 0)).item() - before) < 1e-6)
