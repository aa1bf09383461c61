"""What ZeRO-3 sends between nodes, and keeps, with ZeRO++ and MiCS: n nodes of P ranks each, N = n P.

For one unit of Pd padded elements of b bytes, S = Pd / N of them a rank, w8 and w4 the bytes of a wire in blocks of 256
(`wire_bytes`), a rank sends to ranks of other nodes, each time:

                            flat               two-level                with zero_quantized_weights
    gather of parameters    S b (N - P)        S b (n - 1)              w8(S) in the place of S b
    ... of a fresh second shard inside the node: 0
    gradients               S b (N - P)        S b (n - 1)              zero_quantized_gradients: w4(S) (n - 1)

Wang et al. 2023, arXiv:2306.10209. Measured, not only derived: tests/zero/test_plus.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass

BLOCK = 256  # numbers a scale


def wire_bytes(n: int, bits: int) -> int:
    """Bytes of n numbers in blocks: codes, and 4 of scale for each block."""
    return -(-n * bits // 8) + 4 * -(-n // BLOCK)


@dataclass(frozen=True)
class Crossing:
    """Bytes that one rank sends to ranks of other nodes in a step with one micro-batch."""

    forward: int
    backward: int
    gradients: int

    @property
    def total(self) -> int:
        return self.forward + self.backward + self.gradients


def crossing(
    padded: Sequence[int],
    nodes: int,
    places: int,
    itemsize: int = 2,
    *,
    quantized_weights: bool = False,
    second_shard: bool = False,
    quantized_gradients: bool = False,
    two_level: bool = False,
    two_level_sums: bool = False,
) -> Crossing:
    """`padded`: elements of each unit, all of which are trained; `itemsize`: bytes of one. A node: `places` ranks.

    `second_shard`: among `places` ranks, or fewer that share a node. `two_level`: gathers by mics_hierarchical_...;
    with `two_level_sums` sums too, which is REFIMPL_COLLECTIVES=two-level. ValueError if a unit is not cut evenly.
    """
    ranks = nodes * places
    if any(size % ranks for size in padded):
        raise ValueError(f"units of {list(padded)} elements are not cut evenly over {ranks} ranks")
    shards = [size // ranks for size in padded]
    between, each = nodes - 1, ranks - places  # messages of a shard's size, in two levels and flat
    gather = (between if two_level else each) * sum(
        wire_bytes(s, 8) if quantized_weights else s * itemsize for s in shards
    )
    reduction = (
        between * sum(wire_bytes(s, 4) for s in shards)
        if quantized_gradients
        else (between if two_level_sums else each) * sum(s * itemsize for s in shards)
    )
    return Crossing(gather, 0 if second_shard else gather, reduction)


def second_shard_bytes(padded: Sequence[int], partition_size: int, itemsize: int) -> int:
    """Bytes that a rank's second shards take, with `zero_hpz_partition_size` = partition_size > 1."""
    return sum(size // partition_size * itemsize for size in padded)
