"""DeepSpeed's launcher: GPUs that a machine has not are refused (all else: tests/deepspeed/test_launcher.py)."""

import pytest
import torch

from refimpl.ranks.launcher import parser, torchrun


@pytest.mark.parametrize("option", ["--include", "--exclude"])
def test_a_gpu_that_is_not_there_is_refused_and_not_trained_without(
    option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match=f"{option} 'localhost:1,2': this machine has 2 GPUs, 0 to 1"):
        torchrun(parser().parse_args([option, "localhost:1,2", "train.py"]))


def test_without_gpus_the_numbers_are_those_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", int)
    command, _ = torchrun(parser().parse_args(["--include", "localhost:0,1", "train.py"]))
    assert command[:2] == ["--nproc-per-node", "2"]
