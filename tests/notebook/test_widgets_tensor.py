"""The knobs of chapter 11: their theory is what the real layers keep and send."""

import pytest
import torch
from kept import counted as kept_for_backward
from worlds import run

from refimpl.comm.group import Group
from refimpl.model.gpt import GPT, GPTConfig
from refimpl.notebook.widgets import png
from refimpl.notebook.widgets_tensor import WAYS, Way, bars, kept_bytes, layer_knobs, layer_parameters, sent_bytes
from refimpl.parallel.styles import gpt_plan
from refimpl.parallel.swap import parallelize

CONFIG = GPTConfig(vocab=64, context=16, width=64, layers=1, heads=4)
BATCH = 3


def counted(sequence: bool) -> tuple[int, int, int]:
    """Parameters of the block on this rank, bytes that autograd keeps of it, bytes sent for activations."""
    group = Group.world()
    model = parallelize(GPT(CONFIG), gpt_plan(CONFIG.heads, CONFIG.vocab), group, sequence=sequence)
    block = model.get_submodule("blocks.0")
    x = torch.randn(BATCH, CONFIG.context // (group.size if sequence else 1), CONFIG.width, requires_grad=True)
    group.ledger.reset()
    with kept_for_backward(block.parameters) as kept:
        block(x).sum().backward()
    return sum(p.numel() for p in block.parameters()), kept.peak, group.ledger.sent_bytes("tag")["tensor"]


@pytest.mark.parametrize("way", WAYS[:2])
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_theory_is_what_real_layers_keep_and_send(way: Way, ranks: int) -> None:
    parameters, kept, sent = run(counted, way == "sequence", ranks=ranks)[0]
    assert parameters == layer_parameters(CONFIG.width, ranks)
    assert kept == sum(kept_bytes(CONFIG, BATCH, ranks, way, itemsize=4).values())
    assert sent == sent_bytes(CONFIG, BATCH, ranks, way, itemsize=4)


def test_gathering_again_keeps_an_nth_of_everything_and_sends_two_gathers_more() -> None:
    whole = sum(kept_bytes(CONFIG, BATCH, 1).values())
    assert sum(kept_bytes(CONFIG, BATCH, 4, "sequence, gathered again").values()) == whole // 4
    more = sent_bytes(CONFIG, BATCH, 4, "sequence, gathered again") / sent_bytes(CONFIG, BATCH, 4, "sequence")
    assert more == 10 / 8


def test_knobs_have_a_picture_and_its_numbers_as_text() -> None:
    knobs = layer_knobs(hidden=(256, 512), tokens=(64,), ranks=(2, 1))
    assert list(knobs.table["way"]) == ["tensor", *WAYS]
    assert png(bars(256, 64, 2, "sequence")).startswith(b"\x89PNG")
