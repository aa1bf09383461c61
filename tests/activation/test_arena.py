"""The arena: whatever is cut, dropped, viewed, written and moved, no live tensor ever changes; no byte is lost."""

import gc
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from torch import Tensor

from refimpl.activation.arena import ALIGN, Arena, ArenaFull, Contiguous
from refimpl.activation.checkpoint import Checkpoint
from refimpl.activation.home import Partitioned
from refimpl.comm.group import Group

SIZE = 64 * ALIGN
KINDS = [torch.float32, torch.float64, torch.uint8, torch.bfloat16]


class Life(RuleBasedStateMachine):
    """Tensors and views of them come, are written to and go, in any order; `expected` is what each must hold."""

    def __init__(self) -> None:
        super().__init__()
        self.arena = Arena(SIZE)
        self.live: list[tuple[Tensor, Tensor]] = []  # tensor, its expected values
        self.next = 0

    def values(self, tensor: Tensor) -> Tensor:
        self.next += 1
        return torch.arange(self.next, self.next + tensor.numel()).remainder(200).view(tensor.shape).to(tensor.dtype)

    @rule(rows=st.integers(0, 12), columns=st.integers(1, 40), kind=st.sampled_from(KINDS))
    def cut(self, rows: int, columns: int, kind: torch.dtype) -> None:
        try:
            tensor = self.arena.empty((rows, columns), kind)
        except ArenaFull:
            assert self.arena.largest_gap < max(ALIGN, rows * columns * kind.itemsize)
            return
        expected = self.values(tensor)
        self.live.append((tensor.copy_(expected), expected))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def drop(self, data: Any) -> None:
        del self.live[data.draw(st.integers(0, len(self.live) - 1))]

    @precondition(lambda self: self.live)
    @rule(data=st.data(), how=st.sampled_from(["slice", "transpose", "detach", "flat"]))
    def view(self, data: Any, how: str) -> None:
        tensor, expected = data.draw(st.sampled_from(self.live))
        cuts = {
            "slice": lambda t: t[1:],
            "transpose": Tensor.t,
            "detach": Tensor.detach,
            "flat": lambda t: t.unsqueeze(0),
        }
        if tensor.ndim == 2:
            self.live.append((cuts[how](tensor), cuts[how](expected)))  # the view's expected values are a view as well

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def write(self, data: Any) -> None:
        tensor, expected = data.draw(st.sampled_from(self.live))
        expected.copy_(self.values(expected))
        tensor.copy_(expected)

    @rule()
    def defragment(self) -> None:
        pinned = self.arena.pinned
        self.arena.defragment()
        if not pinned:
            assert len(self.arena.gaps()) <= 1

    @invariant()
    def no_live_tensor_changes(self) -> None:
        for tensor, expected in self.live:
            assert torch.equal(tensor, expected)

    @invariant()
    def the_block_is_covered_once(self) -> None:
        ends = [0, *(piece.end for piece in self.arena.pieces)]
        assert all(piece.offset >= end for piece, end in zip(self.arena.pieces, ends, strict=False))
        assert self.arena.free_bytes + sum(piece.size for piece in self.arena.pieces) == SIZE
        block = self.arena.block.data_ptr()
        inside = [t for t, _ in self.live if t.numel()]
        assert all(block <= t.data_ptr() < block + SIZE for t in inside)

    def teardown(self) -> None:
        self.live.clear()
        gc.collect()
        assert self.arena.gaps() == [(0, SIZE)]


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=40, stateful_step_count=40)


def test_gaps_close_when_they_must() -> None:
    arena = Arena(4 * ALIGN)
    parts = [arena.empty((ALIGN,), torch.uint8).fill_(i) for i in range(4)]
    del parts[2], parts[0]
    assert (arena.free_bytes, arena.largest_gap) == (2 * ALIGN, ALIGN)
    large = arena.empty((2 * ALIGN,), torch.uint8)
    assert large.data_ptr() == arena.block.data_ptr() + 2 * ALIGN
    assert arena.moved_bytes == 2 * ALIGN
    assert [int(part[0]) for part in parts] == [1, 3]


def test_a_view_pins_its_piece() -> None:
    arena = Arena(4 * ALIGN)
    parts = [arena.empty((ALIGN,), torch.uint8).fill_(i) for i in range(4)]
    view = parts[1][3:]
    del parts[2], parts[0]
    with pytest.raises(ArenaFull, match=r"128 are free, the largest gap has 64, and 1 of 2 tensors cannot move"):
        arena.empty((3 * ALIGN,), torch.uint8)  # not even if all could move
    with pytest.raises(ArenaFull, match="1 of 2 tensors cannot move, because views of them are alive"):
        arena.empty((2 * ALIGN,), torch.uint8)
    del view
    assert arena.empty((2 * ALIGN,), torch.uint8).numel() == 2 * ALIGN


def test_what_autograd_saved_of_it_keeps_a_piece_alive() -> None:
    arena = Arena(2 * ALIGN)
    x = arena.empty((4,), torch.float32).fill_(0.5).requires_grad_()
    y = x.detach().requires_grad_().sin()
    del x
    assert len(arena.pieces) == 1
    y.sum().backward()
    del y
    assert arena.pieces == []


def run(how: Checkpoint | None, layers: int) -> list[Tensor]:
    torch.manual_seed(0)
    weight, x = torch.randn(6, 6, requires_grad=True), torch.randn(5, 6, requires_grad=True)

    def layer(y: Tensor) -> Tensor:
        """y [6, 5], transposed in memory: what the first run can view, the second can."""
        return torch.tanh(y.mT.view(30).view(5, 6) @ weight)

    y = x
    for _ in range(layers):
        y = layer(y.mT) if how is None else how(layer, y.mT)
    y.square().sum().backward()
    return [x.grad, weight.grad]  # type: ignore[list-item]


@pytest.mark.parametrize("partitioned", [False, True])
def test_as_a_home_of_checkpoints(partitioned: bool) -> None:
    """Same bits; one block for all inputs, empty again after backward; one input more is refused by its key."""
    home = Contiguous(4)
    how = Checkpoint(Partitioned(Group(None), then=home) if partitioned else home)
    for _ in range(2):
        assert all(map(torch.equal, run(how, 4), run(None, 4)))
    (arena,) = home.arenas.values()
    assert arena.size == 4 * 2 * ALIGN  # 120 bytes each, rounded up
    assert arena.pieces == []
    with pytest.raises(ArenaFull, match=r"number_checkpoints is 4, and more inputs \(5, 6\) than that wait"):
        run(how, 5)
