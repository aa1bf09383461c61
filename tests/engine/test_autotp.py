"""tensor_parallel.autotp_size on models that the engine has never seen, against one process."""

import importlib.util
from pathlib import Path
from typing import Any

import autotp_models as models
import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import Dataset
from worlds import run

from refimpl import launch
from refimpl.engine.initialize import initialize
from refimpl.parallel.swap import whole_state_dict

hf = pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers (the hf extra)")
STEPS = 3


class Texts(Dataset[dict[str, Tensor]]):
    """16 sequences of 8 tokens, as keyword arguments."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __len__(self) -> int:
        return 16

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {self.name: torch.randint(models.VOCAB, (8,), generator=torch.Generator().manual_seed(i))}


Found = tuple[dict[str, Tensor], list[float], list[float]]


ADAMW = {"type": "AdamW", "params": {"lr": 0.01, "eps": 1e-3}}  # of a gradient that is 0 but for rounding: nothing


def trained(
    name: str, tp: int, folder: Path | None = None, optimizer: dict[str, Any] | None = None, partition: Any = None
) -> Found:
    """The whole weights, losses and norms. The loss is the mean square of what the model says, whatever that is."""
    torch.manual_seed(0)
    model: nn.Module = getattr(models, name)()
    known = next(iter(getattr(model, "dummy_inputs", None) or models.tokens()))
    config = {
        "train_batch_size": 4, "gradient_clipping": 0.5, "zero_optimization": {"stage": 1},
        "optimizer": optimizer or {"type": "SGD", "params": {"lr": 0.1}},
        "tensor_parallel": {"autotp_size": tp, "partition_config": partition},
    }  # fmt: skip
    engine, _, loader, _ = initialize(model=model, training_data=Texts(known), config=config)
    losses, norms = [], []
    for _, batch in zip(range(STEPS), loader, strict=False):
        loss = next(x for x in tree_leaves(engine(**batch)) if isinstance(x, Tensor)).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        norms.append(engine.get_global_grad_norm() or 0.0)
    if folder is not None:
        engine.save_16bit_model(folder, "whole.safetensors")
    return {k: w.clone() for k, w in whole_state_dict(engine.module).items()}, losses, norms


def same_as_alone(
    name: str, tp: int, folder: Path | None = None, optimizer: dict[str, Any] | None = None, partition: Any = None
) -> dict[str, Tensor]:
    ((expected, losses, norms),) = run(trained, name, 1, None, optimizer, ranks=1)
    for weights, found, found_norms in run(trained, name, tp, folder, optimizer, partition, ranks=tp):
        assert found == pytest.approx(losses, rel=1e-5)
        assert found_norms == pytest.approx(norms, rel=1e-4)
        for key, w in expected.items():
            torch.testing.assert_close(weights[key], w, rtol=1e-4, atol=1e-5, msg=key)
    return expected


@pytest.mark.parametrize("tp", [2, 3])
def test_a_strangers_model_is_cut_by_what_its_data_shows(tp: int, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    expected = same_as_alone("stranger", tp, tmp_path)
    together = load_file(tmp_path / "whole.safetensors")
    assert together.keys() == expected.keys()
    for key, w in expected.items():
        torch.testing.assert_close(together[key], w, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["one_key", "shared_keys", "joined", "joined_one"])
def test_heads_of_keys_that_several_ranks_have_count_once(name: str, tmp_path: Path) -> None:
    """In the norm that clips, in what is saved, and in three steps of AdamW."""
    from safetensors.torch import load_file

    expected = same_as_alone(name, 4, tmp_path, ADAMW)
    for key, w in load_file(tmp_path / "whole.safetensors").items():
        torch.testing.assert_close(w, expected[key], rtol=1e-4, atol=1e-5)


def carried_on(
    name: str, tp: int, stage: int, load: Path | None, save: Path, steps: int
) -> tuple[dict[str, Tensor], list[float]]:
    """The whole weights, and the losses of so many steps after what was loaded."""
    torch.manual_seed(0)
    model = getattr(models, name)()
    config = {"train_batch_size": 4, "optimizer": ADAMW, "tensor_parallel": {"autotp_size": tp}}
    config |= {"gradient_clipping": 0.1, "zero_optimization": {"stage": stage}}
    engine, *_ = initialize(model=model, training_data=Texts("ids"), config=config)
    if load is not None:
        engine.load_checkpoint(load)
    losses = []
    for step in range(engine.global_steps, engine.global_steps + steps):
        ids = torch.randint(models.VOCAB, (4, 6), generator=torch.Generator().manual_seed(step))
        loss = engine(ids)["said"][0].square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.save_checkpoint(save)
    return {k: w.clone() for k, w in whole_state_dict(engine.module).items()}, losses


@pytest.mark.parametrize("name", ["shared_keys", "joined"])
def test_a_checkpoint_of_copied_heads_goes_on_at_other_degrees(name: str, tmp_path: Path) -> None:
    """Their AdamW too: 4 tensor ranks, then 1, then 2 beside 2 that are data-parallel in ZeRO-3; and one process."""
    ((whole, losses),) = run(carried_on, name, 1, 0, None, tmp_path / "alone", 6, ranks=1)
    found, before = list[float](), None
    for tp, ranks, stage in ((4, 4, 1), (1, 1, 0), (2, 4, 3)):
        weights, some = run(carried_on, name, tp, stage, before, tmp_path / str(tp), 2, ranks=ranks)[0]
        found, before = found + some, tmp_path / str(tp)
    assert found == pytest.approx(losses, rel=1e-4)
    for key, w in whole.items():
        torch.testing.assert_close(weights[key], w, rtol=1e-3, atol=1e-5, msg=key)


@hf
@pytest.mark.parametrize("name", ["llama_grouped", "qwen2"])
def test_transformers_models(name: str) -> None:
    same_as_alone(name, 2)


def columns(model: nn.Module) -> list[str]:
    return [name for name, layer in model.named_modules() if type(layer).__name__ == "ColumnParallelLinear"]


def by_config(patterns: list[dict[str, Any]]) -> list[str]:
    """Which layers are cut by columns, or what initialize says."""
    torch.manual_seed(0)
    config = {
        "train_batch_size": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "tensor_parallel": {"autotp_size": 2, "partition_config": {"layer_specs": patterns}},
    }  # fmt: skip
    model = models.stranger()
    initialize(model=model, training_data=Texts(next(iter(models.tokens()))), config=config)
    return columns(model)


def test_deepspeeds_partition_config_chooses_the_layers() -> None:
    specs = [
        {"patterns": [r"stack\.\d\.b\.one\.weight$"], "partition_type": "column"},
        {"patterns": [r"stack\.\d\.b\.two\.weight$"], "partition_type": "row"},
    ]
    for found in run(by_config, specs):
        assert found == [f"stack.{i}.b.one" for i in range(3)]
    with pytest.raises(launch.RankError, match=r"tensor_parallel.partition_config: .*no layer matches"):
        run(by_config, [{"patterns": ["nowhere"], "partition_type": "row"}])


@pytest.mark.parametrize("partition", [{"layer_specs": [{"patterns": [".*"], "partition_type": "skip"}]}, {}])
def test_a_partition_config_that_skips_all_cuts_nothing_and_an_empty_one_is_found_out(partition: Any) -> None:
    same_as_alone("stranger", 2, partition=partition)
    cut = run(by_config, partition.get("layer_specs", []))
    assert cut[0] == cut[1]
    assert bool(cut[0]) == (not partition)


def other_batches() -> list[str]:
    """What the first call says where each rank has read a sample of its own; and whether the next one, alike, runs."""
    config = {"train_batch_size": 2, "optimizer": {"type": "SGD"}, "tensor_parallel": {"autotp_size": 2}}
    engine, *_ = initialize(model=models.stranger(), training_data=Texts("ids"), config=config)
    said = []
    for ids in (Texts("ids")[engine.global_rank]["ids"][None], Texts("ids")[0]["ids"][None]):
        try:
            engine(ids)
        except ValueError as error:
            said.append(str(error))
    return said


def test_tensor_ranks_that_are_given_other_batches_are_refused() -> None:
    """A sampler that deals samples out to all ranks; what these would add up would be of no text."""
    for said in run(other_batches):
        (only,) = said
        assert only.startswith("Stranger: argument 0 of rank 1 is not that of rank 0")
        assert "num_replicas=engine.dp_world_size and rank=engine.axes.feed" in only


def unknown() -> None:
    config = {"train_batch_size": 2, "optimizer": {"type": "SGD"}, "tensor_parallel": {"autotp_size": 2}}
    initialize(model=nn.Sequential(nn.Conv1d(6, 4, 1), nn.Linear(5, 3)), config=config)


def test_a_model_of_which_nothing_is_known_is_refused() -> None:
    with pytest.raises(launch.RankError, match=r"autotp_size: Sequential has no dummy_inputs, and no guess at its arg"):
        run(unknown)
