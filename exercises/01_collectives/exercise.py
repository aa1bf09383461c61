"""Chapter 01, collectives: build them from send and recv, and predict what they cost.

`group` is a refimpl Group: `group.rank`, `group.size`, and

    group.send(x, to, async_op=True) -> work     # work.wait(): the send is over, x may change
    group.recv(x, source)                        # fills x; returns when it is there

Everything must travel through `group`, so that its ledger can count the bytes, in the dtype
that x has. In a ring each rank has one message to the right and one from the left under way at
a time.
Letters in shapes: N ranks, s elements a chunk, n elements in all.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from refimpl.comm.group import Group


def ring_reduce_scatter(group: Group, x: Tensor) -> Tensor:
    """x [N*s] on every rank -> [s]: chunk `rank` of the sum over ranks, in memory of its own.

    x must keep its values. Each rank sends to its right neighbour (rank + 1) and receives from
    its left only: N - 1 messages of one chunk, s (N - 1) elements in all. Example with 2 ranks:
    x = [1, 2] on rank 0 and [10, 20] on rank 1 -> [11] and [22].
    """
    raise NotImplementedError("ring_reduce_scatter")


def ring_all_gather(group: Group, x: Tensor) -> Tensor:
    """x [s] on every rank -> [N*s]: all of them, in rank order, on every rank.

    To the right only, N - 1 messages of s elements. Example: [11] on rank 0 and [22] on rank 1
    -> [11, 22] on both.
    """
    raise NotImplementedError("ring_all_gather")


def ring_all_reduce(group: Group, x: Tensor) -> None:
    """Replace x [n] by its sum over ranks, in place; the same bits on every rank.

    n is any number, also smaller than N or no multiple of it. To the right only, 2(N - 1)
    messages of n/N elements, rounded up or down: 2n(N - 1)/N elements in all.
    """
    raise NotImplementedError("ring_all_reduce")


def tree_broadcast(group: Group, x: Tensor, root: int = 0) -> None:
    """Fill x on every rank with the x of rank `root`, in ceil(log2 N) rounds.

    In a round a rank sends or receives one message; who has x already sends it on. N - 1
    messages of n elements in all. Example with 4 ranks and root 0: round 0: 0 -> 1; round 1: 0
    -> 2 and 1 -> 3. A ring would need 3 rounds.
    """
    raise NotImplementedError("tree_broadcast")


def fit_alpha_beta(sizes: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """The least-squares line seconds = alpha + beta * size through measurements of one message.

    alpha: seconds a message costs before its first byte; beta: seconds a byte. Sizes are bytes,
    up to 1e9.
    Example: sizes [0, 1e6, 2e6], seconds [1e-4, 3e-4, 5e-4] -> (1e-4, 2e-10).
    """
    raise NotImplementedError("fit_alpha_beta")


def ring_all_reduce_seconds(nbytes: float, ranks: int, alpha: float, beta: float) -> float:
    """How long `ring_all_reduce` of nbytes takes on `ranks` ranks, if a message of b bytes
    takes alpha + b beta.

    All ranks send at once, each one message a step; adding costs nothing. One rank needs no
    message.
    """
    raise NotImplementedError("ring_all_reduce_seconds")
