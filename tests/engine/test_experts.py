"""Mixtures in an engine: JSON's expert_parallel and DeepSpeed's marks, every stage, checkpoints at another ep."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from worlds import run

from refimpl import launch
from refimpl.engine.initialize import initialize
from refimpl.model.gates import Routing
from refimpl.model.gpt import GPT, GPTConfig
from refimpl.model.moe import mixtures

SHAPE = GPTConfig(vocab=31, context=8, width=16, layers=2, heads=2)
EXPERTS, BATCH, STEPS = 4, 12, 2
ON = {"enabled": True}


def model() -> GPT:
    torch.manual_seed(7)
    return mixtures(GPT(SHAPE), EXPERTS, Routing(k=2), every=2, balance=0, z=1e-3)  # a mean over tokens, on any rank


def settings(ep: int, stage: int, more: dict[str, Any] | None = None) -> dict[str, Any]:
    return {
        "train_batch_size": BATCH,
        "gradient_accumulation_steps": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "expert_parallel": {"enabled": True, "autoep_size": ep},
        **(more or {}),
    }


def batch(step: int, feeds: int, feed: int) -> Tensor:
    ids = torch.randint(31, (BATCH, SHAPE.context + 1), generator=torch.Generator().manual_seed(step))
    return ids.chunk(feeds)[feed]


def trained(
    ep: int, stage: int, folder: Path | None = None, first: int = 0, more: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Two steps, from a checkpoint if `first`, and one saved: the losses, the norms, the whole weights on rank 0."""
    engine, *_ = initialize(model=model(), config=settings(ep, stage, more))
    if first and folder is not None:
        engine.load_checkpoint(folder)
    losses, norms = [], []
    for step in range(first, first + STEPS):
        ids = batch(step, engine.axes.feeds, engine.axes.feed)
        loss = engine(ids[:, :-1], ids[:, 1:])
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
        norms.append(engine.stage.grad_norm)
    if folder is not None and not first:
        engine.save_checkpoint(folder)
    if folder is not None:
        engine.save_16bit_model(folder / f"ep{ep}", "weights.bin")
    return {"losses": losses, "norms": norms, "mine": {n for n, _ in engine.module.named_parameters()}}


def weights(folder: Path, ep: int) -> dict[str, Tensor]:
    found: dict[str, Tensor] = torch.load(folder / f"ep{ep}" / "weights.bin")
    return found


def test_every_stage_trains_experts_as_one_rank_does(tmp_path: Path) -> None:
    gather = {"stage3_gather_16bit_weights_on_model_save": True}
    (alone,) = run(trained, 1, 0, tmp_path / "one", ranks=1)
    expected = weights(tmp_path / "one", 1)
    for ranks, ep, stages in ((2, 2, range(4)), (4, 2, (1, 3)), (4, 4, (0, 2))):
        first: dict[str, Tensor] = {}
        for stage in stages:
            folder = tmp_path / f"{ranks} {ep} {stage}"
            zero = {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **gather}}
            found = run(trained, ep, stage, folder, 0, zero, ranks=ranks, timeout=200)
            torch.testing.assert_close(found[0]["norms"], alone["norms"], rtol=2e-5, atol=0)
            whole = weights(folder, ep)
            assert whole.keys() == expected.keys()
            first = first or whole
            assert all(torch.equal(whole[name], first[name]) for name in first), f"bits of stage {stage}"
            for name, w in expected.items():
                torch.testing.assert_close(whole[name], w, rtol=1e-4, atol=3e-5, msg=f"{name}, ep {ep}, stage {stage}")
            assert set().union(*(one["mine"] for one in found)) == alone["mine"]
            here, all_of_them = ([n for n in one["mine"] if ".experts." in n] for one in (found[0], alone))
            assert len(here) == len(all_of_them) // ep


@pytest.mark.parametrize(("ranks", "ep", "stage"), [(1, 1, 0), (2, 1, 1), (4, 4, 2), (4, 2, 3), (3, 1, 3)])
def test_a_checkpoint_goes_on_at_another_ep(ranks: int, ep: int, stage: int, tmp_path: Path) -> None:
    """Saved by 2 ranks that share the experts, in ZeRO-1."""
    run(trained, 2, 1, tmp_path, ranks=2)
    goes_on = run(trained, 2, 1, tmp_path, STEPS, ranks=2)
    here = run(trained, ep, stage, tmp_path, STEPS, ranks=ranks)
    torch.testing.assert_close(here[0]["norms"], goes_on[0]["norms"], rtol=2e-5, atol=0)


class Marked(nn.Module):
    """A stranger's layer: parameters that say they are an expert's."""

    def __init__(self, group_name: str | None) -> None:
        super().__init__()
        self.dense, self.expert = nn.Linear(4, 4), nn.Linear(4, 1)
        for p in self.expert.parameters():
            p.allreduce = False  # type: ignore[attr-defined]
            if group_name is not None:
                p.group_name = group_name  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.expert(self.dense(x)).mean()
        return out


def built(group_name: str | None, config: dict[str, Any]) -> None:
    initialize(model=Marked(group_name), config=config)


@pytest.mark.parametrize(
    ("group_name", "more", "says"),
    [
        (None, {}, r"expert.weight has allreduce = False.*group_name = None: it must be 'ep_size_N'"),
        ("ep_size_3", {}, r"ep_size 3: experts are dealt out to the 4 data-parallel ranks, so it must be one of 1, 2"),
        ("ep_size_2", {"zero_optimization": {"stage": 1, "mics_shard_size": 2}}, r"mics_shard_size"),
        (
            "ep_size_2",
            {"expert_parallel": ON | {"autoep_size": 2}},
            r"autoep_size = 2: expert .Linear.: its experts are neither",
        ),
        ("ep_size_2", {"expert_parallel": ON | {"expert_tensor_parallel_size": 2}}, r"experts are dealt out whole"),
    ],
)
def test_what_cannot_be(group_name: str | None, more: dict[str, Any], says: str) -> None:
    with pytest.raises(launch.RankError, match=says):
        run(built, group_name, {k: v for k, v in settings(1, 0).items() if k != "expert_parallel"} | more, ranks=4)
