"""What a stranger's attack on the axes found: refused by name, or right."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from test_axes import FEEDS, GAS, SHAPE, batch, settings
from torch import Tensor, nn
from worlds import run

from refimpl import launch
from refimpl.checkpoint.export import weights
from refimpl.checkpoint.find import given
from refimpl.checkpoint.folder import Folder
from refimpl.comm.group import Group
from refimpl.comm.mesh import Mesh
from refimpl.comm.process_group import of_rows
from refimpl.engine.initialize import initialize
from refimpl.model.gpt import GPT
from refimpl.zero.init import Init


def data(engine: Any, step: int, dp: int = 1) -> Any:
    return iter([batch(step, feed, micro) for micro in range(GAS) for feed in range(engine.axes.feed, FEEDS, dp)])


def losses(axes: dict[str, int], zero: dict[str, Any], groups: str = "") -> tuple[list[float], list[float], int]:
    """Of three steps; norms; skipped steps. groups: two parameter groups, of different rates, or most is frozen."""
    torch.manual_seed(0)
    model, given, optimizer = GPT(SHAPE), None, None
    if groups in ("two", "of an optimizer"):
        late = [p for name, p in model.named_parameters() if name.startswith("ln.") or ".2." in name]
        early = [p for p in model.parameters() if all(p is not other for other in late)]
        given = [{"params": early, "lr": 0.1}, {"params": late, "lr": 0.5}]
        if groups == "of an optimizer":
            optimizer, given = torch.optim.SGD(given), None
    elif groups == "frozen":
        for name, p in model.named_parameters():
            p.requires_grad_(".2." in name)
    elif groups == "plain":
        given = model.parameters()
    config = settings(axes, zero_optimization=zero)
    engine, *_ = initialize(model=model, optimizer=optimizer, model_parameters=given, config=config)
    found, norms = [], []
    for step in range(3):
        found.append(engine.train_batch(data(engine, step, axes.get("dp", 1))).item())
        norms.append(engine.get_global_grad_norm() or 0.0)
    return found, norms, engine.skipped_steps


@pytest.mark.parametrize(("axes", "stage"), [({"tp": 2}, 2), ({"tp": 2}, 3)])
def test_tensor_ranks_with_gradients_on_a_disk(axes: dict[str, int], stage: int, tmp_path: Path) -> None:
    ((expected, norms, _),) = run(losses, {}, {"stage": 0}, ranks=1)
    disk = {"stage": stage, "offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}}
    for found, found_norms, skipped in run(losses, axes, disk):
        assert skipped == 0
        assert found == pytest.approx(expected, rel=1e-4)
        assert found_norms == pytest.approx(norms, rel=1e-4)


@pytest.mark.parametrize("groups", ["two", "of an optimizer", "frozen", "plain"])
@pytest.mark.parametrize("axes", [{"tp": 2}, {"pp": 2}, {"cp": 2}], ids=str)
def test_parameter_groups_and_frozen_layers_are_those_of_the_whole_model(axes: dict[str, int], groups: str) -> None:
    ((expected, norms, _),) = run(losses, {}, {"stage": 1}, groups, ranks=1)
    for found, found_norms, _ in run(losses, axes, {"stage": 1}, groups):
        assert found == pytest.approx(expected, rel=1e-4)
        assert found_norms == pytest.approx(norms, rel=1e-4)


class Louder(GPT):
    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        return 3 * super().forward(tokens, targets)


def refused(what: str) -> None:
    axes = {"pp": 2} if what in ("subclass", "hook") else {"tp": 2}
    model: nn.Module = Louder(SHAPE) if what == "subclass" else GPT(SHAPE)
    optimizer = None
    if what == "hook":
        model.register_forward_hook(lambda *_: None)
    if what == "layer's hook":
        model.blocks[0].mlp.up.register_forward_hook(lambda *_: None)  # type: ignore[union-attr, index]
    if what == "optimizer":
        optimizer = torch.optim.AdamW(model.parameters())
        model(*batch(0, 0, 0)).backward()
        optimizer.step()
    if what == "zero.Init":
        with Init(Group.world()):
            model = GPT(SHAPE)
    config = settings(axes)
    if what == "steps" and Group.world().rank == 1:
        config["zero_optimization"] = {"stage": 0, "reduce_bucket_size": 7}
        config |= {"gradient_accumulation_steps": 2, "seq_parallel_communication_data_type": "bf16"}
    if what == "rate" and Group.world().rank == 1:
        config["optimizer"] = {"type": "SGD", "params": {"lr": 0.25}}
    if what == "compression" and Group.world().rank == 1:
        asked = {
            "shared_parameters": {"enabled": True, "schedule_offset": 4},
            "different_groups": {"all": {"params": {"start_bits": 8, "target_bits": 8}}},
        }
        config["compression_training"] = {"weight_quantization": asked}
    if what.startswith("clip"):
        config |= {"gradient_accumulation_steps": 1, "zero_optimization": {"stage": int(what[-1])}}
    if what == "axes" and Group.world().rank == 1:
        config["tensor_parallel"] = {"autotp_size": 1}
    engine, *_ = initialize(model=model, optimizer=optimizer, config=config)
    if what.startswith("clip"):
        engine.backward(engine(*batch(0, 0, 0)))
        nn.utils.clip_grad_norm_(engine.module.parameters(), 1.0)
    if what == "twice":
        initialize(model=engine.module, config=config)


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("subclass", "a Louder that is no chain of layers; give initialize a PipelineModule"),
        ("hook", "a GPT that has hooks, which its stages would not call"),
        ("layer's hook", r"blocks.0.mlp.up has hooks, which would see parts of its tensors"),
        (
            "optimizer",
            "optimizer: this AdamW has stepped, and has state of the whole model.s .*: make it",
        ),
        ("zero.Init", "was built in zero.Init, in shards, and layers are split and dealt out whole: build it without"),
        ("clip at stage 0", "would be of this rank's part of the model: set gradient_clipping"),
        ("clip at stage 1", "would be of this rank's part of the model: set gradient_clipping"),
        ("twice", "this GPT is cut already; build it anew"),
        (
            "steps",
            r"gradient_accumulation_steps differs between ranks: rank 0: 8, rank 1: 2.*\nseq_\w+ differs.*\n"
            r"zero_optimization\.reduce_bucket_size differs between ranks: rank 0: 500000000, rank 1: 7",
        ),
        ("rate", r"ConfigError: optimizer\.params\.lr differs between ranks: rank 0: 0\.5, rank 1: 0\.25; give all"),
        ("compression", r"compression_training\.weight_quantization\.\S+ differs between ranks: rank 0: "),
        ("axes", "the ranks ask for different axes"),
    ],
)
def test_what_is_refused(what: str, says: str) -> None:
    with pytest.raises(launch.RankError, match=says):
        run(refused, what)


def logits(axes: dict[str, int]) -> Tensor:
    torch.manual_seed(0)
    engine, *_ = initialize(model=GPT(SHAPE), config=settings(axes))
    with torch.no_grad():
        out: Tensor = engine(tokens=batch(0, 0, 0)[0])
    return out


@pytest.mark.parametrize("axes", [{"tp": 2}, {"cp": 2}, {"tp": 2, "cp": 2}], ids=str)
def test_logits_are_whole_on_every_rank(axes: dict[str, int]) -> None:
    (expected,) = run(logits, {}, ranks=1)
    for found in run(logits, axes, ranks=4 if len(axes) == 2 else 2):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


class Kept(nn.BatchNorm1d):
    """Keeps something beside its tensors, as layers in fp8 do."""

    beside = 0

    def get_extra_state(self) -> int:
        return self.beside

    def set_extra_state(self, state: int) -> None:
        self.beside = state


def rates_of_stages(folder: Path) -> tuple[list[float], list[float]]:
    """A stage's rates, before a save and after a load into the same layout."""
    from refimpl.parallel.pipeline.module import PipelineModule

    def made() -> Any:
        group = Group.world()
        module = PipelineModule([nn.Linear(8, 8), Kept(8)], group, nn.MSELoss(), partition="uniform")
        given = [{"params": list(module.parameters()), "lr": 0.01 * 10**group.rank}]
        config = {"train_batch_size": 2, "optimizer": {"type": "SGD", "params": {"lr": 1.0}}}
        return initialize(model=module, model_parameters=given, config=config)[0]

    first = made()
    for layer in first.module.children():
        layer.beside = 3
    first.save_checkpoint(folder)
    second = made()
    for group in second.stage.optimizer.param_groups:
        group["lr"] = 7.0
    second.load_checkpoint(folder)
    return first.get_lr(), second.get_lr()


def test_a_stage_gets_its_own_settings_back_and_its_buffers_are_exported(tmp_path: Path) -> None:
    for rank, (before, after) in enumerate(run(rates_of_stages, tmp_path)):
        assert before == after == [pytest.approx(0.01 * 10**rank)]
    with Folder(*given(tmp_path)) as opened:
        found = dict(weights(opened, torch.bfloat16))
    nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).load_state_dict(found)
    assert found.pop("1.num_batches_tracked").dtype == torch.int64
    assert {w.dtype for w in found.values()} == {torch.bfloat16}
    model = nn.Sequential(nn.Linear(8, 8), kept := Kept(8))
    config = {"train_batch_size": 2, "optimizer": {"type": "SGD", "params": {"lr": 1.0}}}
    initialize(model=model, config=config)[0].load_checkpoint(tmp_path, load_module_only=True)
    assert kept.beside == 3, "of a stage that another rank had"


class Mpu:
    """Two sequences, each shared by two ranks, as Megatron-Core says it, or without the group that matters."""

    def __init__(self, core: bool) -> None:
        self.mesh, self.core = Mesh({"dp": 2, "cp": 2}), core
        if core:
            self.get_context_parallel_group = lambda: self.mesh.group("cp").handle
        else:
            self.get_sequence_parallel_group = lambda: self.mesh.group("cp").handle

    def get_data_parallel_group(self, with_context_parallel: bool = False) -> Any:
        return self.mesh.group(*(("dp", "cp") if with_context_parallel else ("dp",))).handle


def by_mpu(core: bool) -> tuple[int, int, int]:
    config = {"train_batch_size": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    engine, *_ = initialize(model=nn.Linear(4, 4), mpu=Mpu(core), config=config)
    return engine.axes.feeds, engine.axes.feed, engine.group.size


def test_sequence_ranks_of_an_mpu() -> None:
    assert run(by_mpu, True, ranks=4) == [(2, 0, 4), (2, 0, 4), (2, 1, 4), (2, 1, 4)]
    with pytest.raises(launch.RankError, match="shares sequences and has no get_sequence_data_parallel_group"):
        run(by_mpu, False, ranks=4)


WRONG = {
    "a number": "get_data_parallel_group of Megatron is -100 on rank",
    "no function": "get_data_parallel_group of Megatron is 'dp' on rank",
    "everybody": r"on rank 0 of 4 that the same part of the model is on ranks \[0, 1, 2, 3\], and the other parts",
    "the same twice": r"on ranks \[0, 1\], and the other parts of this replica on \[0, 1\]: that is no mesh",
    "one disagrees": r"on rank 0 of 4 that the same part of the model is on ranks \[0\]",
    "no parts": r"on ranks \[0, 2\], and the other parts of this replica on \[0\]: that is no mesh",
}


def wrong(kind: str) -> None:
    mesh = Mesh({"dp": 2, "tp": 2})
    tp, dp, rows = mesh.group("tp").handle, mesh.group("dp").handle, of_rows([[rank] for rank in range(4)])
    data = {
        "a number": lambda: -100,  # torch's answer to who is not in a group
        "no function": "dp",
        "everybody": lambda: mesh.world.handle,
        "the same twice": lambda: tp,
        "one disagrees": lambda: rows if mesh.world.rank == 0 else dp,
        "no parts": lambda: dp,
    }
    model = {} if kind == "no parts" else {"get_model_parallel_group": lambda: tp}
    mpu = type("Megatron", (), {})()
    vars(mpu).update(get_data_parallel_group=data[kind], **model)
    initialize(model=nn.Linear(4, 4), mpu=mpu, config={"train_micro_batch_size_per_gpu": 1})


@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_mpu_is_refused_by_what_is_wrong(kind: str) -> None:
    with pytest.raises(launch.RankError, match=WRONG[kind]):
        run(wrong, kind, ranks=4)


class Sequences(Mpu):
    """DeepSpeed's parallel_state_sp: all that it answers of the model's axis is the sequence's by another name."""

    def __init__(self) -> None:
        super().__init__(core=False)
        self.get_model_parallel_group = self.get_sequence_parallel_group

    def get_sequence_data_parallel_group(self) -> Any:
        return self.mesh.group("dp", "cp").handle


def clipped(stage: int, shared: bool) -> tuple[float, list[float]]:
    """The norm of two steps over two texts of 6 tokens; a layer that looks at each token alone."""
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0.1, "zero_optimization": {"stage": stage},
        "gradient_accumulation_steps": 1 if shared else 2, "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
    }  # fmt: skip
    model = nn.Sequential(nn.Linear(3, 5), nn.GELU(), nn.Linear(5, 3))
    engine, *_ = initialize(model=model, config=config, mpu=Sequences() if shared else None)
    texts = torch.randn(2, 6, 3, generator=torch.Generator().manual_seed(1))
    losses = []
    for _ in range(2):
        mine = [texts[engine.axes.feed].chunk(2)[engine.axes.context.rank]] if shared else texts
        for x in mine:
            loss = engine(x).square().mean()
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    return engine.get_global_grad_norm() or 0.0, losses


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_sequence_ranks_that_an_mpu_calls_model_ranks_too_count_every_gradient_once(stage: int) -> None:
    ((norm, losses),) = run(clipped, 0, False, ranks=1)
    found = run(clipped, stage, True, ranks=4)
    assert [seen for seen, _ in found] == [pytest.approx(norm, rel=1e-5)] * 4
    steps = [sum(each[step] for _, each in found) / 4 for step in range(2)]
    assert steps == pytest.approx([sum(losses[:2]) / 2, sum(losses[2:]) / 2], rel=1e-5)


def test_the_name_checkpoint_is_the_function_whatever_was_imported() -> None:
    code = (
        "import refimpl.checkpoint.tree, refimpl; from refimpl import checkpoint, initialize; "
        "checkpoint(print, refimpl.checkpoint is checkpoint)"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said == "True\n"
