"""What is a node: which ranks are near each other, behind one slow link to all others.

Ranks are numbered node by node, so node k holds the ranks k*n to k*n + n-1 of n a node. torchrun and its like say n in
LOCAL_WORLD_SIZE; REFIMPL_RANKS_PER_NODE says otherwise, which makes several "nodes" of one machine. Whoever asks who is
near (a slow link, a collective in two levels, a shard inside a node) asks here, so that all mean the same.
"""

import os
from collections import Counter
from collections.abc import Iterable, Mapping

RANKS_PER_NODE = "REFIMPL_RANKS_PER_NODE"


def ranks_per_node(world_size: int, environ: Mapping[str, str] = os.environ) -> int:
    """Ranks of each node: REFIMPL_RANKS_PER_NODE if that is set, else LOCAL_WORLD_SIZE, else all of them.

    ValueError, which names the variable, if it is no number of ranks that divides `world_size`.
    """
    for name in (RANKS_PER_NODE, "LOCAL_WORLD_SIZE"):
        if said := environ.get(name, "").strip():
            count = int(said) if said.isdecimal() else 0
            if count < 1 or world_size % count:
                fit = ", ".join(str(n) for n in range(1, world_size + 1) if world_size % n == 0)
                raise ValueError(
                    f"{name}={said}: {world_size} ranks do not make whole nodes of so many; set {RANKS_PER_NODE} to "
                    f"one of {fit}"
                )
            return count
    return world_size


def refuse_uneven(world_size: int) -> None:
    """ValueError if REFIMPL_RANKS_PER_NODE is set, and is no such number: at once, also in a job where nobody asks."""
    if os.environ.get(RANKS_PER_NODE, "").strip():
        ranks_per_node(world_size)


def node_of(rank: int, world_size: int) -> int:
    """The node of a rank of the job. ValueError as `ranks_per_node`."""
    return rank // ranks_per_node(world_size)


def on_nodes(ranks: Iterable[int], world_size: int) -> dict[int, int]:
    """How many of these ranks of the job are on each node. ValueError as `ranks_per_node`."""
    return dict(Counter(node_of(rank, world_size) for rank in ranks))
