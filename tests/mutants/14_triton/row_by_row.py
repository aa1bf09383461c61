"""GROUP is not used.

task: grouped_tile
says: row by row, ungrouped
"""

import triton
import triton.language as tl


@triton.jit
def grouped_tile(pid, tiles_m, tiles_n, GROUP: tl.constexpr):
    return pid // tiles_n, pid % tiles_n
