"""The knobs of the ZeRO chapters: their theory is the layout and the memory of the real stages."""

import pytest
import torch
from worlds import run

from refimpl.comm.group import Group
from refimpl.measure.memory import MemoryMeter
from refimpl.model.gpt import GPT, GPTConfig
from refimpl.notebook.widgets import png
from refimpl.notebook.widgets_zero import bars, bucket_sizes, memory_knobs, rank_bytes
from refimpl.plan.formulas import STRATEGIES, Strategy
from refimpl.zero.config import ZeroConfig
from refimpl.zero.ddp import DDP
from refimpl.zero.stage import Stage
from refimpl.zero.zero1 import Zero1
from refimpl.zero.zero2 import Zero2
from refimpl.zero.zero3 import Zero3

STAGES: dict[Strategy, type[Stage]] = {"ddp": DDP, "zero1": Zero1, "zero2": Zero2, "zero3": Zero3}
CONFIG = GPTConfig(vocab=64, context=16, width=64, layers=3, heads=2)
BUCKET = 40_000


def kept(strategy: Strategy) -> tuple[dict[str, int], list[tuple[int, int]]]:
    group, model = Group.world(), GPT(CONFIG).to(torch.bfloat16)
    config = ZeroConfig(reduce_bucket_size=BUCKET, prefetch_bucket_size=BUCKET, leaf_modules=("Block",))
    stage = STAGES[strategy](model, torch.optim.AdamW(model.parameters()), group, config)  # type: ignore[call-arg]
    tokens = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(group.rank))
    meter = MemoryMeter(stage.tensors)
    moving = MemoryMeter(lambda: {name: stage.tensors()[name] for name in ("gathered", "gradients", "buckets")})
    peak = {"gathered": 0, "gradients and buckets": 0}

    def sample(_: object) -> None:
        now = moving.now()
        both = now["gradients"] + now["buckets"]  # a gradient is now the one, now the other
        peak.update(gathered=max(peak["gathered"], now["gathered"]))
        peak["gradients and buckets"] = max(peak["gradients and buckets"], both)

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(sample)  # type: ignore[no-untyped-call]
    for _ in range(2):
        stage.backward(model(tokens, tokens))
        memory = meter.now()
        stage.step()
    return memory | peak, sorted((b.numel, b.padded) for b in stage.buckets)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("ranks", [2, 3])
def test_the_theory_is_that_of_the_real_stage(strategy: Strategy, ranks: int) -> None:
    counted, sizes = run(kept, strategy, ranks=ranks)[0]
    assert sorted(bucket_sizes(strategy, ranks, BUCKET, CONFIG)) == sizes
    theory = rank_bytes(strategy, ranks, BUCKET, CONFIG)
    for name in ("parameters", "gradients", "optimizer", "master weights"):
        assert theory[name] == counted[name], name
    assert counted["gathered"] <= theory["gathered, at most"]
    assert counted["gradients and buckets"] <= theory["gradients"] + theory["buckets, at most"]


def test_knobs_have_a_picture_and_its_numbers_as_text() -> None:
    knobs = memory_knobs(CONFIG, ranks=(4, 2), bucket_size=(BUCKET, 10_000))
    assert list(knobs.table["bucket size"].unique()) == [BUCKET, 10_000]
    assert set(knobs.table["ranks"]) == {4}
    assert png(bars(CONFIG, STRATEGIES, 2, BUCKET)).startswith(b"\x89PNG")
