"""The knobs of chapter 14: what a blocked matrix product loads, and what a tile takes of a multiprocessor.

A program makes a tile of BM x BN, BK of K at a time. All of a [M, K] is loaded N / BN times, all of b M / BM times:

    operations a byte = 2 M N K / (itemsize (M N K / BN + M N K / BM)) = 2 / itemsize x BM BN / (BM + BN)

whatever M, N and K. That is without a cache; with the L2 cache, which programs share, less comes from memory. The price
of a large tile: fp32 sums in registers, 4 BM BN bytes a program, and stages x BK (BM + BN) x itemsize bytes of shared
memory.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from refimpl.notebook import show
from refimpl.notebook.widgets import Knobs

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

SHARED, REGISTERS = 227 * 1024, 256 * 1024  # bytes of a multiprocessor of an H100, for all programs on it
COLOURS = {"a": "#4c72b0", "b": "#dd8452"}


def loaded_bytes(M: int, N: int, K: int, BM: int, BN: int, itemsize: int = 2) -> dict[str, int]:
    """Bytes of a and b that all programs load."""
    return {"a": M * K * -(-N // BN) * itemsize, "b": K * N * -(-M // BM) * itemsize}


def intensity(BM: int, BN: int, itemsize: int = 2) -> float:
    """Operations for each byte that is loaded."""
    return 2 * BM * BN / (itemsize * (BM + BN))


def tile_row(size: int, BM: int, BN: int, BK: int, stages: int) -> dict[str, float]:
    """A product of square matrices of bf16: GB loaded, operations a byte, shared KB and bytes of sums of a program."""
    return {
        "GB loaded": sum(loaded_bytes(size, size, size, BM, BN).values()) / 1e9,
        "operations a byte": intensity(BM, BN),
        "shared KB": stages * BK * (BM + BN) * 2 / 1024,
        "KB of sums": BM * BN * 4 / 1024,
    }


def bars(size: int, BM: int, BN: int, BK: int, stages: int) -> "Figure":
    """What is loaded, and how full a tile makes a multiprocessor."""
    figure, axes = show.figure(3.2, rows=2)
    top, bottom = axes
    left = 0.0
    for name, size_ in loaded_bytes(size, size, size, BM, BN).items():
        top.barh(["loaded"], [size_ / 1e9], left=left, color=COLOURS[name], label=f"of {name}")
        left += size_ / 1e9
    top.axvline(2 * size * size * 2 / 1e9, color="k", lw=1, ls=":", label="each once")
    top.set(xlabel="GB, without a cache", title=f"{intensity(BM, BN):.0f} operations a byte")
    row = tile_row(size, BM, BN, BK, stages)
    shares = {
        "shared memory": row["shared KB"] * 1024 / SHARED,
        "registers, sums": row["KB of sums"] * 1024 / REGISTERS,
    }
    bottom.barh(list(shares), [100 * s for s in shares.values()], color="#8172b3")
    bottom.axvline(100, color="k", lw=1)
    bottom.set(xlabel="% of a multiprocessor, for one program")
    figure.legend(loc="outside upper center", ncols=3, frameon=False, fontsize=9)
    return figure


def table(size: int, tiles: Sequence[tuple[int, int]], BK: int, stages: int) -> "pd.DataFrame":
    """The same numbers as text."""
    import pandas as pd

    rows = [{"BM": m, "BN": n} | {k: f"{v:.3g}" for k, v in tile_row(size, m, n, BK, stages).items()} for m, n in tiles]
    return pd.DataFrame(rows)


def tile_knobs(
    size: Sequence[int] = (4096, 1024, 16384),
    block: Sequence[int] = (128, 1, 16, 32, 64, 256),
    depth: Sequence[int] = (64, 32, 128),
    stages: Sequence[int] = (3, 1, 2, 4),
) -> Knobs:
    """Bars for a product of square matrices; turn the tile, its depth and the number of stages. First values first."""
    sides = sorted(block)
    text = table(size[0], [(m, m) for m in sides] + [(128, 256)], depth[0], stages[0])
    return Knobs(bars, text, size=size, BM=block, BN=block, BK=depth, stages=stages)
