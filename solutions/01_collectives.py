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
    rank, ranks = group.rank, group.size
    chunks = x.chunk(ranks)
    # Chunk c starts at rank c + 1, and is complete when it reaches rank c.
    partial = chunks[rank - 1].clone()
    for step in range(1, ranks):
        mine = chunks[(rank - 1 - step) % ranks]
        arriving = torch.empty_like(mine)
        sending = group.send(partial, (rank + 1) % ranks, async_op=True)
        group.recv(arriving, (rank - 1) % ranks)
        sending.wait()
        partial = arriving + mine
    return partial


def ring_all_gather(group: Group, x: Tensor) -> Tensor:
    """x [s] on every rank -> [N*s]: all of them, in rank order, on every rank.

    To the right only, N - 1 messages of s elements. Example: [11] on rank 0 and [22] on rank 1
    -> [11, 22] on both.
    """
    rank, ranks = group.rank, group.size
    whole = torch.empty(ranks * x.numel(), dtype=x.dtype)
    chunks = whole.chunk(ranks)
    chunks[rank].copy_(x)
    for step in range(ranks - 1):
        sending = group.send(chunks[(rank - step) % ranks], (rank + 1) % ranks, async_op=True)
        group.recv(chunks[(rank - step - 1) % ranks], (rank - 1) % ranks)
        sending.wait()
    return whole


def ring_all_reduce(group: Group, x: Tensor) -> None:
    """Replace x [n] by its sum over ranks, in place; the same bits on every rank.

    n is any number, also smaller than N or no multiple of it. To the right only, 2(N - 1)
    messages of n/N elements, rounded up or down: 2n(N - 1)/N elements in all.
    """
    rank, ranks = group.rank, group.size
    chunks = x.tensor_split(ranks)  # views of x; their sizes differ by one at most
    for step in range(2 * (ranks - 1)):
        target = chunks[(rank - step - 1) % ranks]
        arriving = torch.empty_like(target)
        sending = group.send(chunks[(rank - step) % ranks], (rank + 1) % ranks, async_op=True)
        group.recv(arriving, (rank - 1) % ranks)
        sending.wait()
        if step < ranks - 1:
            target.add_(arriving)  # a partial sum grows
        else:
            target.copy_(arriving)  # a complete sum travels on


def tree_broadcast(group: Group, x: Tensor, root: int = 0) -> None:
    """Fill x on every rank with the x of rank `root`, in ceil(log2 N) rounds.

    In a round a rank sends or receives one message; who has x already sends it on. N - 1
    messages of n elements in all. Example with 4 ranks and root 0: round 0: 0 -> 1; round 1: 0
    -> 2 and 1 -> 3. A ring would need 3 rounds.
    """
    place = (group.rank - root) % group.size  # as if the root were 0
    distance = 1  # how many have x
    while distance < group.size:
        if place < distance and place + distance < group.size:
            group.send(x, (place + distance + root) % group.size)
        elif distance <= place < 2 * distance:
            group.recv(x, (place - distance + root) % group.size)
        distance *= 2


def fit_alpha_beta(sizes: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """The least-squares line seconds = alpha + beta * size through measurements of one message.

    alpha: seconds a message costs before its first byte; beta: seconds a byte. Sizes are bytes,
    up to 1e9.
    Example: sizes [0, 1e6, 2e6], seconds [1e-4, 3e-4, 5e-4] -> (1e-4, 2e-10).
    """
    count = len(sizes)
    mean_size, mean_time = sum(sizes) / count, sum(seconds) / count
    rise = sum((n - mean_size) * (t - mean_time) for n, t in zip(sizes, seconds, strict=True))
    run = sum((n - mean_size) ** 2 for n in sizes)
    beta = rise / run
    return mean_time - beta * mean_size, beta


def ring_all_reduce_seconds(nbytes: float, ranks: int, alpha: float, beta: float) -> float:
    """How long `ring_all_reduce` of nbytes takes on `ranks` ranks, if a message of b bytes
    takes alpha + b beta.

    All ranks send at once, each one message a step; adding costs nothing. One rank needs no
    message.
    """
    steps = 2 * (ranks - 1)
    return steps * (alpha + nbytes / ranks * beta)


HINTS = {
    "ring_reduce_scatter": [
        "Give each chunk a starting rank, so that in every step all ranks send different chunks.",
        "Chunk c must end at rank c after N - 1 steps to the right. So it starts at rank c + 1.",
        "In step t = 1, 2, ... rank r receives chunk r - 1 - t, adds its own copy, and sends the sum in step t + 1.",
        "If every rank waits for its send, none comes to its recv: send with async_op=True, recv, then wait.",
    ],
    "ring_all_gather": [
        "Make room for N chunks, and put your own into place `rank`.",
        "In each step send on what arrived in the step before; the first step sends your own chunk.",
        "In step t = 0, 1, ..., rank r sends chunk r - t and receives chunk r - t - 1, both modulo N.",
    ],
    "ring_all_reduce": [
        "It is a reduce-scatter followed by an all-gather over the same chunks.",
        "x.tensor_split(N) gives N views of x whose sizes differ by one at most; writing to a view writes to x.",
        "One loop does: in step t rank r sends chunk r - t and receives r - t - 1. For N - 1 steps what arrives is "
        "added, for N - 1 more it replaces.",
    ],
    "tree_broadcast": [
        "After each round twice as many ranks have x.",
        "Rename the ranks so that the root is 0: place = (rank - root) % N.",
        "In the round in which the first d places have x, place p < d sends to p + d, if there is such a rank.",
    ],
    "fit_alpha_beta": [
        "The slope of a least-squares line is the covariance of size and time over the variance of size.",
        "The line goes through the point (mean size, mean time): that gives alpha.",
        "Compute in Python floats or fp64: squares of 1e9 leave fp32 no digits for alpha.",
    ],
    "ring_all_reduce_seconds": [
        "How many messages follow one after the other? A reduce-scatter is N - 1 steps, and an all-gather too.",
        "How many bytes has each message? Not nbytes.",
    ],
}
