"""DeepSpeed's DualPipeV trains as the data-parallel engine does, bit for bit; its ties, checkpoints and refusals."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_pipeline_engine import STEPS, Found, batches, by_data, config, layers, loss
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from worlds import run

import refimpl.deepspeed as deepspeed
from refimpl import launch
from refimpl.deepspeed.pipe import DualPipeVModule, LayerSpec, PipelineModule, TiedLayerSpec


def settings(stages: int, **more: Any) -> dict[str, Any]:
    return config(**{"gradient_accumulation_steps": 2 * stages, **more})


def trained(engine: Any, data: Any) -> Found:
    losses = [engine.train_batch(data).item() for _ in range(STEPS)]
    state = {name: w.clone() for name, w in engine.module_state_dict().items()}
    return state, losses, engine.get_global_grad_norm() or 0.0, engine.skipped_steps


def by_v(how: dict[str, Any], stages: int, interval: int) -> Found:
    module = DualPipeVModule(
        layers(), stages, loss_fn=loss, partition_method="uniform", activation_checkpoint_interval=interval
    )
    engine, *_ = deepspeed.initialize(model=module, config=how)
    assert type(engine) is deepspeed.DualPipeVEngine
    assert engine.is_first_stage() == engine.is_last_stage() == (engine.stage_id == 0)
    return trained(engine, batches(engine.group.rank, how) if engine.is_first_stage() else None)


@pytest.mark.parametrize(
    ("more", "stages", "replicas", "interval"),
    [
        ({"zero_optimization": {"stage": 1}, "bf16": {"enabled": True}}, 2, 2, 0),
        ({}, 3, 1, 1),
        ({"zero_optimization": {"stage": 1}}, 4, 1, 0),
    ],
)
def test_it_trains_as_the_data_parallel_engine(more: dict[str, Any], stages: int, replicas: int, interval: int) -> None:
    (expected, losses, norm, skipped), *_ = run(by_data, settings(stages, **more), ranks=replicas)
    seen: set[str] = set()
    for weights, *found in run(by_v, settings(stages, **more), stages, interval, ranks=stages * replicas):
        assert found == [losses, pytest.approx(norm, rel=1e-6), skipped]
        for name, weight in weights.items():
            assert torch.equal(weight, expected[name]), name
        seen |= weights.keys()
    assert seen == expected.keys()


def head(module: nn.Embedding, x: tuple[Tensor, Tensor]) -> Tensor:
    return F.linear(x[0], module.weight)


class Masked(nn.Linear):
    """Hands on a mask of booleans, and a length of its own."""

    def forward(self, x: Any) -> tuple[Tensor, Tensor]:
        hidden, mask = x if isinstance(x, tuple) else (x, torch.arange(x.shape[1]) > 0)
        return (super().forward(hidden).tanh() + hidden) * mask[:, None], mask


def entropy(out: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(out.flatten(0, 1), labels.flatten())


def sequences() -> Any:
    """Each of another length."""
    generator = torch.Generator().manual_seed(3)
    while True:
        for length in (5, 2, 7):
            ids = torch.randint(11, (2, length), generator=generator)
            yield ids, ids.roll(1, 1)


def tied(folder: Path, kind: type[PipelineModule], stages: int, of: type[PipelineModule] | None = None) -> Found:
    """A tied language model that is saved after three steps, or goes on from where one `of` a kind was."""
    torch.manual_seed(0)
    specs = [
        TiedLayerSpec("words", nn.Embedding, 11, 8), *(LayerSpec(Masked, 8, 8) for _ in range(4)),
        TiedLayerSpec("words", nn.Embedding, 11, 8, forward_fn=head),
    ]  # fmt: skip
    net = kind(
        specs, stages, loss_fn=entropy, seed_layers=True, partition_method="uniform", dynamic_shape=True,
        activation_checkpoint_interval=1, activation_checkpoint_func=partial(checkpoint, use_reentrant=True),
        checkpointable_layers=["Masked"],
    )  # fmt: skip
    engine, *_ = deepspeed.initialize(model=net, config=settings(2, zero_optimization={"stage": 1}))
    assert [ranks for ranks, _ in net.shared] == ([(0, 1)] if stages == 2 and kind is PipelineModule else [])
    if of is not None:
        assert engine.load_checkpoint(folder / of.__name__)[0] is not None
        assert engine.global_steps == STEPS
    found = trained(engine, sequences())
    if of is None:
        engine.save_checkpoint(folder / kind.__name__)
    assert engine.eval_batch(sequences(), num_micro_batches=1) > 0
    outputs, logits = engine.eval_batch(sequences(), return_logits=True, compute_loss=False)
    assert (logits is not None) == (outputs is not None) == engine.is_last_stage()
    return found


def test_a_tied_model_learns_and_goes_on_in_either_kind_of_pipeline(tmp_path: Path) -> None:
    """With reentrant checkpoints, masks of booleans and lengths that change. DeepSpeed refuses the latter two."""
    ((_, losses, _, _),) = run(tied, tmp_path, PipelineModule, 1, ranks=1)
    assert losses[-1] < losses[0]
    for found in run(tied, tmp_path, DualPipeVModule, 2):
        assert found[1] == pytest.approx(losses, rel=1e-6)
    ((_, losses, _, _),) = run(tied, tmp_path, PipelineModule, 1, PipelineModule, ranks=1)
    for kind in (DualPipeVModule, PipelineModule):
        for found in run(tied, tmp_path, kind, 2, DualPipeVModule):
            assert found[1] == pytest.approx(losses, rel=1e-5)


def begun(folder: Path, kind: type[PipelineModule]) -> dict[str, Tensor]:
    specs = [
        TiedLayerSpec("words", nn.Embedding, 3, 2), *(LayerSpec(nn.Linear, 2, 2) for _ in range(2)),
        TiedLayerSpec("words", nn.Embedding, 3, 2, forward_fn=head),
    ]  # fmt: skip
    net = kind(specs, 2, loss_fn=entropy, partition_method="uniform")
    engine, *_ = deepspeed.initialize(model=net, config=settings(2))
    engine.load_checkpoint(folder, load_module_only=True)
    return {name: p.detach().clone() for name, p in net.named_parameters()}


def test_deepspeeds_files_of_layers_as_it_writes_them_without_a_model_axis(tmp_path: Path) -> None:
    """None for a layer whose function is its own: what it ties lies with the first of its key."""
    (tmp_path / "latest").write_text("step1")
    (tmp_path / "step1").mkdir()
    for i, layer in enumerate((nn.Embedding(3, 2), nn.Linear(2, 2), nn.Linear(2, 2))):
        nn.init.constant_(layer.weight, i)
        torch.save(layer.state_dict(), tmp_path / "step1" / f"layer_{i:02d}-model_states.pt")
    places = {"tied_modules.words.weight": 0, "1.weight": 1, "2.weight": 2}
    for kind in (PipelineModule, DualPipeVModule):
        found = run(begun, tmp_path, kind)
        for name, p in (item for weights in found for item in weights.items() if "bias" not in item[0]):
            assert torch.equal(p, torch.full_like(p, places[name])), name
        assert {name for weights in found for name in weights} > places.keys()


def asked() -> dict[str, Any]:
    net = DualPipeVModule(layers(), 2, loss_fn=loss, partition_method="uniform")
    engine, *_ = deepspeed.initialize(model=net, config=settings(2))
    table = net.pipeline(4).table
    assert not table.splits
    with pytest.raises(ValueError, match="gradient_accumulation_steps = 3: DualPipeV"):
        engine.set_train_batch_size(6)
    assert (engine.num_stages, engine.micro_batches) == (2, 4)
    return {"parts": net.parts, "owners": [net.stage_owner(i) for i in range(8)], "holds": net.stages,
            "stages": (net.num_stages, net.num_pipeline_stages()), "name": table.name}  # fmt: skip


def test_what_a_module_is_asked() -> None:
    for rank, answers in enumerate(run(asked)):
        assert answers == {
            "parts": [0, 2, 4, 6, 8], "owners": [0, 0, 1, 1, 1, 1, 0, 0], "holds": [rank, 3 - rank], "stages": (4, 2),
            "name": "dualpipe-v",
        }  # fmt: skip


def with_few_micro_batches() -> None:
    net = DualPipeVModule(layers(), 2, loss_fn=loss)
    deepspeed.initialize(model=net, config=settings(2, gradient_accumulation_steps=3))


def test_too_few_micro_batches_are_refused() -> None:
    says = r"rank \d: gradient_accumulation_steps = 3: DualPipeV over 2 ranks needs 4 .* use PipelineModule"
    with pytest.raises(launch.RankError, match=says):
        run(with_few_micro_batches)


def test_the_paths_that_scripts_import_from() -> None:
    paths = deepspeed.runtime.pipe.dualpipev
    assert deepspeed.DualPipeVModule is deepspeed.pipe.DualPipeVModule is paths.DualPipeVModule is DualPipeVModule
    assert deepspeed.DualPipeVEngine is paths.DualPipeVEngine
    assert issubclass(deepspeed.DualPipeVEngine, deepspeed.PipelineEngine)
