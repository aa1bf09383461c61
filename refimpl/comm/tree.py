"""A double binary tree: two trees that each reduce and spread half of the buffer, so that no rank only waits.

In one binary tree half of the ranks are leaves, which send their buffer once, while the others send three times as
much. Two trees, in which whoever is a leaf in one passes on in the other, share that out. 6 ranks:

    first tree, for the first half          second tree, for the second half
         0                                       5
         |                                       |
         4                                       1
       /   \\                                   /   \\
      2     5                                 3     0
     / \\                                     / \\
    1   3                                   4   2

Sums go up to the root, then the result down again, each half cut in pieces that follow one another, so that all levels
work at once. Sanders, Speck & Traeff 2009, "Two-tree algorithms for full bandwidth broadcast, reduction and scan",
Parallel Computing 35(12), for the idea; the trees are those of NCCL (src/graph/trees.cc): rank r's parent is found by
moving its lowest set bit up, the second tree is the first one mirrored, or shifted by a rank where their number is odd.

Traffic, of all ranks together: 2n(N-1), the ring's. A rank sends n/2 up in each tree, but as its root,
and n/2 down to each of its children: with two children in one tree and none in the other that is 2n.
Time (alpha: seconds a message, beta: seconds a byte, gamma: seconds a byte added; k pieces of each half, h levels of
edges below the root, ceil(log2 N)):

    all_reduce   2(h + k - 1) (alpha + n/k beta) + (h + k - 1) n/k gamma

Many small pieces make that 2n beta, but each costs an alpha: k = sqrt((h - 1) n beta / alpha) is best. For small n,
with k = 1, it is 2h messages where a ring takes 2(N-1).

Order of the sum: a rank adds its children's sums to its own numbers, the lower child's first: in the first tree of 6
ranks g0 + ((g4 + ((g2 + g1) + g3)) + g5). The two halves differ, all ranks get the same bits. In bf16 and fp16 each
addition rounds to the wire's dtype.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from refimpl.comm import checks
from refimpl.comm.collectives import Op, combine, divide
from refimpl.comm.group import Group
from refimpl.comm.work import Work


class Place(NamedTuple):
    """A rank's neighbours in one tree."""

    parent: int | None  # None at the root
    children: list[int]


def parent(rank: int, size: int) -> int | None:
    """In the first tree, whose root is 0. Of 8 ranks 4 is below it, 2 and 6 are below 4, the odd ones are leaves."""
    if rank == 0:
        return None
    bit = rank & -rank  # the lowest set bit: how high this rank stands
    above = (rank ^ bit) | (bit << 1)
    return above if above < size else rank ^ bit


def height(size: int) -> int:
    """Levels of edges of either tree."""
    return (size - 1).bit_length()


def place(rank: int, size: int) -> Place:
    """This rank's neighbours in the first tree."""
    return Place(parent(rank, size), [other for other in range(size) if parent(other, size) == rank])


def places(rank: int, size: int) -> tuple[Place, Place]:
    """This rank's neighbours in the first and in the second tree.

    The second is the first under other names. Even and odd ones must change places, for the leaves are odd: a mirror
    does it where `size` is even, a shift by one where it is odd.
    """
    known_as = (rank - 1) % size if size % 2 else size - 1 - rank
    above, below = place(known_as, size)

    def really(name: int) -> int:
        return (name + 1) % size if size % 2 else size - 1 - name

    return place(rank, size), Place(None if above is None else really(above), sorted(map(really, below)))


def all_reduce(group: Group, x: Tensor, op: Op = "sum", *, pieces: int = 1) -> None:
    """Replace x [n], contiguous, by its sum, mean or maximum over ranks. Any n.

    `pieces`: in how many each half is cut; equal on all ranks, at least 1.
    """
    checks.reduction("tree all_reduce", op, x, x)
    if pieces < 1:
        raise ValueError(f"tree all_reduce: pieces must be at least 1, not {pieces}")
    if group.size == 1:
        return
    halves = x.detach().view(-1).tensor_split(2)
    both = zip(places(group.rank, group.size), halves, strict=True)
    trees = [Tree(group, place, half.tensor_split(pieces), op) for place, half in both]
    # A leaf has something to send before it waits, and nobody waits for what it gets: first up, last down. The second
    # tree goes before the first: 3 ranks have one edge in both, where sender and receiver must agree on the order.
    trees.reverse()
    trees.sort(key=lambda tree: len(tree.place.children) > 0)
    for i in range(pieces):
        for tree in trees:
            tree.up(i)
    for i in range(pieces):
        for tree in reversed(trees):
            tree.down(i)
    for tree in trees:
        tree.finish()


class Tree:
    """One tree's half of the buffer, cut in pieces. All ranks go through the same steps, so messages meet in order."""

    def __init__(self, group: Group, place: Place, pieces: tuple[Tensor, ...], op: Op) -> None:
        self.group, self.place, self.pieces, self.op = group, place, pieces, op
        self.rising: dict[int, Work] = {}  # pieces on their way up: not to be overwritten before they are sent
        self.falling: list[Work] = []

    def up(self, i: int) -> None:
        """Piece i: add what the children have, and send it on."""
        piece = self.pieces[i]
        arriving = [torch.empty_like(piece) for _ in self.place.children]
        works = [
            self.group.recv(buffer, child, async_op=True, tag="tree up")
            for buffer, child in zip(arriving, self.place.children, strict=True)
        ]
        for work, buffer in zip(works, arriving, strict=True):
            work.wait()
            combine(piece, buffer, self.op)
        if self.place.parent is None:
            divide(piece, self.group.size, self.op)
        else:
            self.rising[i] = self.group.send(piece, self.place.parent, async_op=True, tag="tree up")

    def down(self, i: int) -> None:
        """Piece i: take the result from the parent, and send it to the children."""
        piece = self.pieces[i]
        if self.place.parent is not None:
            self.rising.pop(i).wait()
            self.group.recv(piece, self.place.parent, tag="tree down")
        self.falling += [self.group.send(piece, c, async_op=True, tag="tree down") for c in self.place.children]

    def finish(self) -> None:
        """Return when the children have all."""
        for work in self.falling:
            work.wait()
