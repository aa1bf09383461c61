"""`sparse_attention` of the JSON: which blocks the engine's model reads, on every rank; and what is refused."""

from typing import Any

import pytest
import torch
import worlds
from torch import nn

import refimpl
from refimpl.comm.group import Group
from refimpl.deepspeed.ops.sparse_attention import SparseSelfAttention
from refimpl.launch import RankError
from refimpl.model.gpt import GPT, GPTConfig
from refimpl.model.patterns.named import pattern_named
from refimpl.model.sparse_swap import SparseGPTAttention, make_sparse

BIGBIRD = {"mode": "bigbird", "block": 8, "num_random_blocks": 1, "num_sliding_window_blocks": 1}


def model(seed: int = 0) -> GPT:
    torch.manual_seed(seed)
    return GPT(GPTConfig(vocab=40, context=64, width=16, layers=2, heads=4))


def config(sparse: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
        "sparse_attention": sparse,
        **more,
    }


def data(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(0, 40, (2, 61), generator=torch.Generator().manual_seed(rank))
    return tokens[:, :-1], tokens[:, 1:]


def train(sparse: dict[str, Any], layout: dict[str, Any]) -> tuple[list[float], list[torch.Tensor]]:
    group = Group.world()
    torch.manual_seed(group.rank)  # what a rank drew before must not choose its blocks
    engine, *_ = refimpl.initialize(model=model(), config=config(sparse, **layout))
    replica = group.rank // 2 if layout.get("tensor_parallel") else group.rank
    losses = []
    for _ in range(2):
        loss = engine(*data(replica))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    swapped = [m for m in engine.module.modules() if isinstance(m, SparseGPTAttention)]
    return losses, [m.attend.plan(0, 8).read for m in swapped]


def oracle(sparse: dict[str, Any], ranks: int) -> list[list[float]]:
    plain = model()
    make_sparse(plain, lambda heads: pattern_named(sparse["mode"], heads, {**sparse, "seed": 0}))
    optimizer, losses = torch.optim.SGD(plain.parameters(), lr=0.5), []
    for _ in range(2):
        each = [plain(*data(rank)) for rank in range(ranks)]
        (sum(each) / ranks).backward()  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
        losses.append([loss.item() for loss in each])
    return losses


@pytest.mark.parametrize("stage", [1, 3])
def test_all_ranks_read_the_same_blocks_and_train_as_one_process(stage: int) -> None:
    results = worlds.run(train, BIGBIRD, {"zero_optimization": {"stage": stage}})
    right = oracle(BIGBIRD, 2)
    for rank, (losses, reads) in enumerate(results):
        assert losses == pytest.approx([each[rank] for each in right], abs=1e-5)
        assert len(reads) == 2
        assert all(torch.equal(read, results[0][1][0]) for read in reads)
        assert 0 < int(reads[0].sum()) < 36


def test_tensor_ranks_share_the_layout() -> None:
    layout = {"tensor_parallel": {"autotp_size": 2}}
    losses = [losses for losses, _ in worlds.run(train, BIGBIRD, layout)]
    right = [each[0] for each in oracle(BIGBIRD, 1)]
    assert losses[0] == pytest.approx(right, abs=1e-5)
    own = {**BIGBIRD, "different_layout_per_head": True}
    with pytest.raises(RankError, match="tensor ranks have some heads each"):
        worlds.run(train, own, layout)
    with pytest.raises(RankError, match="no rank has the sequence's other blocks"):
        worlds.run(train, BIGBIRD, {"sequence_parallel_size": 2})


def refused(sparse: dict[str, Any], plain: nn.Module) -> str:
    try:
        refimpl.initialize(model=plain, config=config(sparse))
    except ValueError as error:
        return str(error)
    return "taken"


def test_what_cannot_be_is_refused_with_the_keys_name() -> None:
    cases = [
        ({"mode": "sparse"}, model(), "sparse_attention.mode"),
        ({"mode": "fixed", "num_local": 3}, model(), "num_local_blocks"),
        ({"mode": "fixed", "num_local_blocks": 4, "num_global_blocks": 3}, model(), "must divide num_local_blocks"),
        ({"mode": "fixed"}, nn.Linear(2, 2), "neither made of refimpl's GPT blocks"),
    ]
    for sparse, plain, says in cases:
        (said,) = worlds.run(refused, sparse, plain, ranks=1)
        assert says in said


def test_layers_that_the_author_built_by_the_section_stay() -> None:
    """DeepSpeed's bing_bert: its model reads the section, the engine gets the same file."""
    own = nn.ModuleDict({"attend": SparseSelfAttention(pattern_named("bigbird", 4, BIGBIRD), max_seq_length=64)})
    own["out"] = nn.Linear(2, 2)
    assert worlds.run(refused, BIGBIRD, own, ranks=1) == ["taken"]
