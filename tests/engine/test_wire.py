"""`communication_data_type`: the gradients' bytes on the wire are those of the dtype, in every stage and spelling."""

from typing import Any

import pytest
import torch
import worlds
from torch import Tensor, nn

import refimpl
from refimpl.engine.config import load_config

SPELLINGS = {
    torch.float32: ("fp32", "FP32", "float32", "float", "torch.float32"),
    torch.float16: ("fp16", "FP16", "float16", "half", "torch.float16"),
    torch.bfloat16: ("bf16", "BF16", "bfloat16", "torch.bfloat16"),
}


@pytest.mark.parametrize("dtype", SPELLINGS)
def test_every_spelling(dtype: torch.dtype) -> None:
    for spelling in SPELLINGS[dtype]:
        loaded = load_config({"train_batch_size": 2, "communication_data_type": spelling}, world_size=2)
        assert loaded.zero_config().communication_data_type is dtype, spelling


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(11, 7), nn.Linear(7, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).relu()).float().mean()


def bytes_by_stage(model: str, wires: list[str | None]) -> list[list[int]]:
    """Of the gradients, that this rank sends in a step: a list a stage, a number a wire."""
    found = []
    for stage in range(4):
        found.append([])
        for wire in wires:
            keys: dict[str, Any] = {"bf16": {"enabled": True}} if model == "bf16" else {}
            keys |= {"communication_data_type": wire} if wire else {}
            config = {"train_micro_batch_size_per_gpu": 3, "optimizer": {"type": "AdamW"}, **keys}
            torch.manual_seed(0)
            zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
            engine = refimpl.initialize(model=Net(), config=config | {"zero_optimization": zero})[0]
            x = torch.randn(3, 11, dtype=torch.bfloat16 if model == "bf16" else torch.float32)
            engine.backward(engine(x))
            engine.step()
            found[-1].append(engine.group.ledger.sent_bytes("tag")["gradients"])
            assert 0 < (engine.get_global_grad_norm() or 0) < 1e3
            engine.destroy()
    return found


@pytest.mark.parametrize(("model", "ranks"), [("fp32", 3), ("bf16", 2)])
def test_the_bytes_in_every_stage(model: str, ranks: int) -> None:
    for stages in worlds.run(bytes_by_stage, model, ["fp32", "bf16", "fp16", None], ranks=ranks):
        for fp32, bf16, fp16, unset in stages:
            assert fp32 == 2 * bf16 == 2 * fp16 > 0
            assert unset == (fp32 if model == "fp32" else bf16)


def bytes_of_sequences(ranks: int, keys: dict[str, str]) -> int:
    """Of the gradients, that this rank sends in a step in which `ranks` share each sequence."""
    config = {"train_micro_batch_size_per_gpu": 3, "optimizer": {"type": "AdamW"}, "sequence_parallel_size": ranks}
    engine = refimpl.initialize(model=Net(), config=config | keys)[0]
    engine.backward(engine(torch.ones(3, 11)))
    engine.step()
    return engine.group.ledger.sent_bytes("tag")["gradients"]


def test_ranks_that_share_sequences_may_have_a_wire_of_their_own() -> None:
    wires = {"communication_data_type": "fp32", "seq_parallel_communication_data_type": "bf16"}
    for keys, of_shared, of_alone in ((wires, 1, 2), ({"communication_data_type": "bf16"}, 1, 1), ({}, 2, 2)):
        # An all-reduce of a bucket of 92 elements, padded to 128: once out and once back for half of it.
        assert worlds.run(bytes_of_sequences, 2, keys, ranks=2) == [of_shared * 256] * 2
        assert worlds.run(bytes_of_sequences, 1, keys, ranks=2) == [of_alone * 256] * 2
