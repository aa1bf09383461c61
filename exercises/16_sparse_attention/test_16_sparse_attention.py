"""Grades chapter 16's layouts, lists and reach: against refimpl's patterns, paths walked one by one, and their cost."""

import random
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from refimpl.grading.compare import Wrong, equal, require
from refimpl.grading.grade import on_ranks
from refimpl.grading.memory import untouched
from refimpl.grading.rank import Answer, case
from refimpl.grading.traffic import WatchedGroup
from refimpl.grading.work import Work
from refimpl.model.patterns import parts
from refimpl.model.patterns.fixed import FixedSparsityConfig
from refimpl.model.patterns.sliding import BigBirdSparsityConfig


def picture(layout: Tensor) -> list[str]:
    return ["".join(".#"[int(read)] for read in row) for row in layout.tolist()]


def same_layout(found: Tensor, expected: Tensor, known: dict[str, Tensor]) -> None:
    """`equal`, which names the first block that is read in vain or missed, with both drawn."""
    try:
        equal(found, expected, "the layout", known=known)
    except Wrong as error:
        if isinstance(found, Tensor) and found.shape == expected.shape:
            if error.headline.startswith("the layout: wrong values"):
                row, col = (found != expected).nonzero()[0].tolist()
                said = "reads block {}, and must not" if found[row, col] else "does not read block {}, and must"
                error.headline = f"the layout: row {row} {said.format(col)}"
            if len(expected) <= 16:
                rows = [f"{a}    {b}" for a, b in zip(picture(expected), picture(found), strict=True)]
                error.details = (*error.details, "expected, and found:", *rows)
        raise


@on_ranks(1)
def test_fixed_layout(answer: Answer, group: WatchedGroup) -> None:
    cuts = ((8, 4, False), (8, 4, True), (11, 4, True), (11, 4, False), (9, 4, False), (3, 5, False), (7, 1, True))
    for n, local, causal in cuts:
        case(f"n = {n}, local = {local}, causal = {causal}")
        word = "unidirectional" if causal else "bidirectional"
        right = FixedSparsityConfig(1, 1, num_local_blocks=local, attention=word).make_layout(n)[0].bool()
        stretch = parts.stretches(n, [local])
        last = parts.none(n) | (torch.arange(n) % local == local - 1) | (torch.arange(n) == n - 1)
        window = parts.window(n, 2 * local - 1)
        turned = stretch | last.t()
        firsts = stretch | (torch.arange(n) % local == 0)
        whole = stretch | (torch.arange(n) % local == local - 1)
        known = {
            "the representative is a stretch's last block, not its first": firsts.tril() if causal else firsts,
            "rows and columns are exchanged: all rows read a representative, it reads no more than they": (
                turned.tril() if causal else turned
            ),
            "only the own stretch is read: where are the other stretches' representatives?": (
                stretch.tril() if causal else stretch
            ),
            "a stretch is cut at multiples of `local`: yours is a window around each row": (
                (window | last).tril() if causal else window | last
            ),
            "with causal = False a row reads the representatives behind it too": stretch | last.tril(),
            "a last stretch that is cut short has a representative too: block n - 1": whole.tril() if causal else whole,
        }
        found = answer.fixed_layout(n, local, causal)
        if causal and isinstance(found, Tensor) and found.shape == (n, n):
            require(not bool(found.bool().triu(1).any()), "with causal = True a row reads blocks that come after it")
        same_layout(found, right, known)


@on_ranks(1)
def test_bigbird_layout(answer: Answer, group: WatchedGroup) -> None:
    for n, width, first, each in ((12, 3, 1, 1), (12, 5, 2, 0), (9, 1, 0, 3), (4, 3, 1, 4), (13, 7, 1, 2)):
        case(f"n = {n}, width = {width}, first = {first}, each = {each}")
        right = BigBirdSparsityConfig(1, 1, False, each, width, first, seed=n).make_layout(n)[0].bool()
        near = parts.window(n, width)
        ends = [(0, first)]
        once = parts.none(n)
        once[:, random.Random(n).sample(range(n), each)] = True
        chance = parts.drawn(n, each, random.Random(n))
        begin = (torch.arange(n) - width // 2).clamp(0, max(0, n - width))[:, None]
        moved = (torch.arange(n) >= begin) & (torch.arange(n) < begin + width)
        globally = parts.columns(n, ends) | parts.rows(n, ends)
        known = {
            "global blocks must also read everything: their rows are missing": near | parts.columns(n, ends) | chance,
            "global blocks must also be read by every row: their columns are missing": near
            | parts.rows(n, ends)
            | chance,
            "the window is wider than `width` in all: width // 2 on each side": right | parts.window(n, 2 * width + 1),
            "the window is wider than `width` in all: width // 2 on each side.": right | parts.window(n, width + 2),
            "the window is narrower than `width`: width // 2 on each side, and one's own": (
                globally | parts.window(n, max(1, width - 2)) | chance
            ),
            "the window is cut at either end, not moved inwards there": right | moved,
            "the window is cut at either end, and does not go on at the other": right | around(n, width),
            "random blocks are missing, or not drawn by rng.sample(range(n), each) row after row": (near | globally),
            "the same random blocks for all rows: draw row after row": (near | globally | once),
        }
        found = answer.bigbird_layout(n, width, first, each, random.Random(n))
        rest = near | globally
        if isinstance(found, Tensor) and found.shape == rest.shape and bool((found >= rest).all()):
            few = int((found & ~rest).sum(1).max()) <= each
            other = "other random blocks: rng.sample(range(n), each) for each row, global ones too, 0 first"
            known[other if few else "a row reads more than its window, the global blocks and `each` random ones"] = (
                found
            )
        same_layout(found, right, known)


def around(n: int, width: int) -> Tensor:
    """A window on a circle."""
    return sum((torch.eye(n).roll(d, 1) for d in range(-(width // 2), width // 2 + 1)), torch.zeros(n, n)) > 0


def walked(layout: Tensor) -> Tensor:
    """Breadth first, a block at a time."""
    n = len(layout)
    reads = [row.nonzero().flatten().tolist() for row in layout]
    layers = torch.full((n, n), -1)
    for start in range(n):
        layers[start, start], now = 0, [start]
        while now:
            found = [c for r in now for c in reads[r]]
            depth = int(layers[start, now[0]]) + 1
            now = []
            for c in found:
                if layers[start, c] < 0:
                    layers[start, c] = depth
                    now.append(c)
    return layers


def by_many_ways(ways: int) -> Tensor:
    """The first block reads `ways` others, and each of them the last: as many paths, too many for 8 bits."""
    layout = parts.none(ways + 2)
    layout[0, 1:-1] = layout[1:-1, -1] = True
    return layout


def all_and_a_line(number: int, line: int) -> Tensor:
    """So many blocks that all read each other, the last of them a line of more: too many ways to count in fp32."""
    layout = parts.none(number + line)
    layout[:number, :number] = True
    layout[range(number - 1, number + line - 1), range(number, number + line)] = True
    return layout


def by_powers(layout: Tensor) -> Tensor:
    """The layers, where ways are counted in fp32: what is infinite is lost in the next product."""
    layers = torch.full_like(layout, -1, dtype=torch.int64).fill_diagonal_(0)
    ways = layout.float()
    for count in range(1, len(layout)):
        layers[(ways > 0) & (layers < 0)] = count
        ways = ways @ layout.float()
    return layers


@on_ranks(1)
def test_layers_to_see(answer: Answer, group: WatchedGroup) -> None:
    torch.manual_seed(0)
    layouts = {
        "a window of 3": parts.window(9, 3),
        "a causal window": parts.window(9, 5, ahead=False),
        "two separate stretches": parts.stretches(6, [3]),
        "rows that do not read themselves": parts.strided(7, 3) & ~torch.eye(7, dtype=torch.bool),
        "nothing": parts.none(3),
        "15 blocks at random": torch.rand(15, 15) < 0.12,
        "one block": torch.ones(1, 1, dtype=torch.bool),
        "a line of 40": torch.eye(40, dtype=torch.bool).roll(1, 1).triu(1),
        "256 ways from the first block to the last": by_many_ways(256),
        "32 blocks that all read each other, and a line of 40: 1e45 ways to its end": all_and_a_line(32, 40),
    }
    for name, layout in layouts.items():
        case(name)
        right = walked(layout)
        known = {
            "[r, c] and [c, r] are exchanged: row r takes from the blocks that row r reads": walked(layout.T),
            "ways from block to block are counted, until their number is infinite: keep whether there is one": (
                by_powers(layout)
            ),
            "only one layer is counted: what a block reads has heard of others before": torch.where(
                right > 1, -1, right
            ),
        }
        with untouched(layout=layout):
            found = answer.layers_to_see(layout)
        most = int(torch.as_tensor(found).max())
        if isinstance(found, Tensor) and found.shape == right.shape:
            known["a block knows itself after 0 layers, before any layer"] = torch.where(right == 0, found, right)
            known["all are one too many: a block knows itself after 0 layers"] = right + (right >= 0)
            known["what is never seen is -1"] = torch.where(right < 0, found, right)
        known[f"it ends after {most} layers: go on until nothing new is heard"] = torch.where(right > most, -1, right)
        equal(found, right, f"layers ({name})", known=known)


class Rounding(TorchDispatchMode):
    """The largest number that a float of 32 bits or fewer has held."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.largest = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            held = isinstance(x, Tensor) and x.layout == torch.strided and x.numel()  # none that is sparse
            if held and x.is_floating_point() and x.itemsize < 8:
                self.largest = max(self.largest, float(x.max()))
        return result


def by_head(layout: Tensor) -> Tensor:
    return torch.cat([torch.zeros(1, dtype=torch.int64), layout.sum(2).cumsum(1).flatten()])


@on_ranks(1)
def test_block_lists(answer: Answer, group: WatchedGroup) -> None:
    torch.manual_seed(1)
    for heads, n, share in ((1, 4, 0.5), (3, 7, 0.3), (2, 5, 0.0), (2, 6, 1.0), (4, 150, 0.4)):
        case(f"{heads} heads of {n} x {n} blocks, {share:.0%} of them read")
        layout = torch.rand(heads, n, n) < share
        starts = [0]
        blocks: list[int] = []
        for row in layout.flatten(0, 1):
            blocks += row.nonzero().flatten().tolist()
            starts.append(len(blocks))
        with untouched(layout=layout), Work() as work, Rounding() as rounding:
            found = answer.block_lists(layout)
        require(isinstance(found, tuple) and len(found) == 2, "return (starts, blocks)")
        by_keys = layout.transpose(1, 2)
        known = {
            "these are lists of the columns: which rows read each of them": by_keys.nonzero()[:, -1],
            "blocks are numbered over rows or heads: they must be column numbers, 0 .. n - 1": (
                layout.flatten(0, 1).flatten().nonzero().flatten()
            ),
            "a row's blocks are in descending order: ascending is asked": n - 1 - layout.flip(-1).nonzero()[:, -1],
            "each head's columns are moved by n: they must be column numbers, 0 .. n - 1": (
                layout.nonzero()[:, 2] + n * layout.nonzero()[:, 0]
            ),
        }
        require(
            isinstance(found[0], Tensor) and len(found[0]) == heads * n + 1,
            "starts must have an entry for each row of each head, and one more: the number of blocks",
        )
        together = layout.any(0).sum(-1).repeat(heads).cumsum(0)
        anew = {
            "all heads have one layout here, what any of them reads: each head has its own": torch.cat(
                [torch.zeros(1, dtype=torch.int64), together]
            ),
            "they begin anew with each head: one list holds the blocks of all": by_head(layout),
            "they are counted in 16 bits, which end at 32,767": torch.tensor(starts).to(torch.int16).long(),
        }
        equal(found[0], torch.tensor(starts), "starts", known=anew)
        equal(found[1], torch.tensor(blocks, dtype=torch.int64), "blocks", known=known)
        low = f"a float has held {rounding.largest:g}, more than the {n} of a row: fp32 counts to 2^24 only"
        require(rounding.largest <= n, low, "A layout may have more blocks than that: count in whole numbers.")
        require(
            work.calls < 60,
            f"{work.calls:,} operations for {heads * n} rows: a loop over rows; sum, cumsum and nonzero need none",
        )
