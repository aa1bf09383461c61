"""The knobs of the ZeRO chapters: their theory is the layout and the memory of the real stages."""

import pytest
import torch

from refimpl.comm.group import Group
from refimpl.launch import run
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
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda _: meter.sample() and None)  # type: ignore[no-untyped-call]
    for _ in range(2):
        stage.backward(model(tokens, tokens))
        memory = meter.now()
        stage.step()
    most = {name: meter.peak[name] for name in ("gathered", "buckets")}
    return memory | most, sorted((b.numel, b.padded) for b in stage.buckets)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("ranks", [2, 3])
def test_the_theory_is_that_of_the_real_stage(strategy: Strategy, ranks: int) -> None:
    counted, sizes = run(kept, strategy, ranks=ranks)[0]
    assert sorted(bucket_sizes(strategy, ranks, BUCKET, CONFIG)) == sizes
    theory = rank_bytes(strategy, ranks, BUCKET, CONFIG)
    for name in ("parameters", "gradients", "optimizer", "master weights"):
        assert theory[name] == counted[name], name
    for name in ("gathered", "buckets"):
        assert counted[name] <= theory[f"{name}, at most"], name


def test_knobs_have_a_picture_and_its_numbers_as_text() -> None:
    knobs = memory_knobs(CONFIG, ranks=(4, 2), bucket_size=(BUCKET, 10_000))
    assert list(knobs.table["bucket size"].unique()) == [BUCKET, 10_000]
    assert set(knobs.table["ranks"]) == {4}
    assert png(bars(CONFIG, STRATEGIES, 2, BUCKET)).startswith(b"\x89PNG")
