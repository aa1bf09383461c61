"""The row is found by the pid itself, and not by its number in the band.

task: grouped_tile
says: bands of GROUP rows, by columns in each
"""

import triton
import triton.language as tl


@triton.jit
def grouped_tile(pid, tiles_m, tiles_n, GROUP: tl.constexpr):
    band = pid // (GROUP * tiles_n)
    rows = min(tiles_m - band * GROUP, GROUP)
    inside = pid % (GROUP * tiles_n)
    return band * GROUP + pid % rows, inside // rows
