"""A timeline shows each gather beside the block that computed meanwhile, and no other."""

import matplotlib.pyplot as plt

from refimpl.measure.ledger import Ledger
from refimpl.notebook.timeline import Bar, bars_of, draw, hidden


def step(prefetched: bool) -> list[Bar]:
    """Two blocks' forward and the backward of one; the second gather runs under the first block, or before its own."""
    ledger = Ledger()
    ledger.end(ledger.start("all_gather", 4, "parameters"))
    ledger.mark("begin forward 0")
    ahead = ledger.start("all_gather", 4, "parameters") if prefetched else None
    ledger.mark("end forward 0")
    ledger.end(ahead if ahead is not None else ledger.start("all_gather", 4, "parameters"))
    ledger.mark("begin forward 1")
    ledger.mark("end forward 1")
    ledger.mark("begin backward 1")
    ledger.mark("grad blocks.1.first")
    ledger.mark("grad blocks.1.last")
    ledger.end(ledger.start("reduce_scatter", 4, "gradients"))
    return bars_of(ledger.events)


def test_a_gather_is_hidden_only_while_a_block_computes():
    assert (hidden(step(prefetched=False)), hidden(step(prefetched=True))) == (0, 1)


def test_bars_have_the_order_of_the_events():
    first, block, gather, *rest = step(prefetched=True)
    assert (first, block, gather) == (Bar("gather", "", 0, 1), Bar("forward", "0", 2, 4), Bar("gather", "", 3, 5))
    assert [bar[:2] for bar in rest] == [("forward", "1"), ("backward", "1"), ("reduce", "")]
    assert rest[1].last - rest[1].first == 1  # until the last gradient, which alone counts


def test_each_timeline_is_drawn_with_all_its_bars():
    timelines = {"no prefetch": step(prefetched=False), "prefetch": step(prefetched=True)}
    figure = draw(timelines)
    plt.close(figure)
    assert [axis.get_title() for axis in figure.axes] == list(timelines)
    assert [len(axis.patches) for axis in figure.axes] == [len(bars) for bars in timelines.values()]
