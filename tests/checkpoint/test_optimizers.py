"""Whatever an optimizer keeps goes along: what is cut like the parameter, counts, lists, None; modules too."""

import os
import resource
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import worlds
from torch import Tensor, nn, optim

import refimpl
from refimpl import launch
from refimpl.checkpoint.errors import CheckpointError
from refimpl.deepspeed.checkpoint.ds_to_universal import main as to_universal
from refimpl.deepspeed.checkpoint.ds_to_universal import parse_arguments
from refimpl.optim.lion import Lion

PLAIN = {"foreach": False}
OPTIMIZERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "sgd": lambda p: optim.SGD(p, 0.01, **PLAIN),
    "momentum": lambda p: optim.SGD(p, 0.01, momentum=0.9, dampening=0.5, **PLAIN),
    "amsgrad": lambda p: optim.Adam(p, 0.01, amsgrad=True, **PLAIN),
    "adagrad": lambda p: optim.Adagrad(p, 0.01, **PLAIN),
    "nadam": lambda p: optim.NAdam(p, 0.01, **PLAIN),
    "rprop": lambda p: optim.Rprop(p, 0.01, **PLAIN),
    "asgd": lambda p: optim.ASGD(p, 0.01, **PLAIN),
    "rmsprop": lambda p: optim.RMSprop(p, 0.01, momentum=0.9, centered=True, **PLAIN),
    "lion": lambda p: Lion(p, 0.01),
    "lbfgs": lambda p: optim.LBFGS(p, 0.1, max_iter=1),
}


class Counting(nn.Module):
    """State that is no tensor, a parameter without elements, and one of no shape."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.scale = nn.Linear(7, 9), nn.Parameter(torch.tensor(1.5))
        self.none = nn.Parameter(torch.empty(0, 3))
        self.seen = 0

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return (self.layer(x) * self.scale + self.none.sum()).square().mean()

    def get_extra_state(self) -> dict[str, Any]:
        return {"seen": self.seen, "history": (torch.arange(self.seen), None)}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        assert torch.equal(state["history"][0], torch.arange(state["seen"]))
        self.seen = state["seen"]


def engine_of(kind: str, stage: int, **zero: bool) -> refimpl.Engine:
    model = Counting()
    zero_optimization = {"stage": stage} | zero
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero_optimization, "gradient_clipping": 0.0}
    return refimpl.initialize(model=model, optimizer=OPTIMIZERS[kind](model.parameters()), config=config)[0]


def train(engine: refimpl.Engine, steps: range) -> None:
    for step in steps:
        x = torch.randn(4, 7, generator=torch.Generator().manual_seed(10 * step + engine.group.rank))
        if type(engine.optimizer).__name__ == "LBFGS":

            def closure(x: Tensor = x) -> Tensor:
                engine.optimizer.zero_grad()
                loss = engine.module(x)
                engine.stage.backward(loss)
                return loss

            engine.optimizer.step(closure)
            continue
        engine.backward(engine(x))
        engine.step()


def cut(kind: str, stages: tuple[int, int], folder: Path) -> tuple[list[Any], list[Any]]:
    """Weights after six steps without and with an end after three."""
    engine = engine_of(kind, stages[0])
    train(engine, range(3))
    engine.save_checkpoint(folder)
    train(engine, range(3, 6))
    again = engine_of(kind, stages[1])
    again.load_checkpoint(folder)
    train(again, range(3, 6))
    ends = [e.stage.full_state_dict() or {} for e in (engine, again)]
    return tuple(
        [w.tolist() for w in end.values() if isinstance(w, Tensor)] + [end.get("_extra_state")] for end in ends
    )


@pytest.mark.parametrize("kind", list(OPTIMIZERS))
def test_it_goes_on_as_if_nothing_had_been(kind: str, tmp_path: Path) -> None:
    stages = (0, 0) if kind == "lbfgs" else (2, 1)
    for whole, resumed in worlds.run(cut, kind, stages, tmp_path, ranks=2):
        assert str(whole) == str(resumed)


def written(stage: int, folder: Path) -> list[Any]:
    """What a file of the whole weights has of `Counting`, by torch.save; as safetensors it is refused."""
    engine = engine_of("amsgrad", stage, stage3_gather_16bit_weights_on_model_save=True)
    train(engine, range(2))
    engine.save_16bit_model(folder, "whole.bin")
    with pytest.raises(CheckpointError, match=r"_extra_state is a dict, which safetensors cannot hold"):
        engine.save_16bit_model(folder, "whole.safetensors")
    return [str(torch.load(folder / "whole.bin")["_extra_state"]), str(engine.module.get_extra_state())]


@pytest.mark.parametrize("stage", [1, 3])
def test_what_a_module_keeps_beside_its_weights_is_in_the_whole_file(stage: int, tmp_path: Path) -> None:
    for there, here in worlds.run(written, stage, tmp_path, ranks=2):
        assert there == here


def test_deepspeeds_converter_has_nothing_to_convert(tmp_path: Path) -> None:
    engine = engine_of("amsgrad", 1)
    train(engine, range(2))
    engine.save_checkpoint(tmp_path, "step2")
    to_universal(SimpleNamespace(input_folder=tmp_path / "step2", output_folder=tmp_path / "step2_universal"))
    again = engine_of("amsgrad", 3)
    assert again.load_checkpoint(tmp_path, "step2_universal")[0] == str(tmp_path / "step2_universal")
    assert torch.equal(again.stage.full_parameter("layer.weight"), engine.stage.full_parameter("layer.weight"))
    assert (tmp_path / "latest").read_text() == "step2"
    words = f"--input_folder {tmp_path} --output_folder {tmp_path}/new/universal --num_extract_workers 4 --no_strict"
    to_universal(parse_arguments(words.split()))
    assert again.load_checkpoint(tmp_path / "new")[0] == str(tmp_path / "new/universal")
    with pytest.raises(CheckpointError, match="new/universal: is there already; move it away"):
        to_universal(parse_arguments(words.split()))
    with pytest.raises(CheckpointError, match="pass the folder of a checkpoint"):
        to_universal(SimpleNamespace(input_folder=tmp_path / "none", output_folder=tmp_path / "other"))


def test_another_optimizers_state_is_refused(tmp_path: Path) -> None:
    engine_of("amsgrad", 0).save_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match=r"optimizer Adam there, SGD here.*load_module_only=True"):
        engine_of("sgd", 0).load_checkpoint(tmp_path)


def full(folder: Path) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
    with pytest.raises(CheckpointError, match=r"universal\.refimpl-.*/.*: File too large; raise the limit"):
        to_universal(parse_arguments(["--input_folder", str(folder / "ck"), "--output_folder", f"{folder}/universal"]))
    assert os.listdir(folder) == ["ck"]


def test_a_copy_that_does_not_fit_is_one_error_and_nothing_stays(tmp_path: Path) -> None:
    engine_of("amsgrad", 0).save_checkpoint(tmp_path / "ck")
    launch.run(full, tmp_path, ranks=1)


def test_a_copy_clears_what_a_killed_one_has_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine_of("amsgrad", 0).save_checkpoint(tmp_path / "ck")
    words = parse_arguments(["--input_folder", f"{tmp_path}/ck", "--output_folder", f"{tmp_path}/universal"])

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", killed)
        with pytest.raises(KeyboardInterrupt):
            to_universal(words)
    assert len(os.listdir(tmp_path)) == 2
    to_universal(words)
    assert sorted(os.listdir(tmp_path)) == ["ck", "latest", "universal"]
