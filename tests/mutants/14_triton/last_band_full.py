"""The last band is taken to have GROUP rows.

task: grouped_tile
says: does not exist
"""

import triton
import triton.language as tl


@triton.jit
def grouped_tile(pid, tiles_m, tiles_n, GROUP: tl.constexpr):
    band = pid // (GROUP * tiles_n)
    rows = GROUP
    inside = pid % (GROUP * tiles_n)
    return band * GROUP + inside % rows, inside // rows
