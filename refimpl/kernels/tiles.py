"""How a matrix [M, N] whose rows are reduced is dealt out to programs: in tiles of whole rows.

A program of few elements leaves the memory idle while it starts and ends, one of many needs more registers than there
are. 16 elements a thread and at least 4096 a program keep enough loads on their way: a multiprocessor of an H100 must
have some 18 KB of them (3.3 TB/s x 0.7 microseconds / 132) for the memory never to wait. Little's law; Volkov 2010,
"Better performance at lower occupancy".
"""

from dataclasses import dataclass

from refimpl.kernels.language import INTERPRETED

ELEMENTS = 4096  # of a program, when rows are short
ELEMENTS_INTERPRETED = 1 << 16  # a program costs milliseconds there, whatever its size


@dataclass(frozen=True)
class Tile:
    """`rows` x `block` elements for `warps` warps. Not `whole`: a row is longer, and gone through by blocks."""

    rows: int
    block: int
    warps: int
    whole: bool


def next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def tile(size: int, longest: int, elements_a_thread: int = 16) -> Tile:
    """For rows of `size` elements; a row of more than `longest` is gone through in blocks."""
    whole = size <= longest
    block = max(next_power_of_2(size), 16) if whole else min(longest, 4096)
    rows = max(1, (ELEMENTS_INTERPRETED if INTERPRETED else ELEMENTS) // block)
    warps = min(max(rows * block // (32 * elements_a_thread), 4), 16)
    return Tile(rows, block, warps, whole)
