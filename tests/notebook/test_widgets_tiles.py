"""The knobs of chapter 14: their formula is what the programs of a blocked product load."""

import pytest

from refimpl.notebook.widgets import png
from refimpl.notebook.widgets_tiles import bars, intensity, loaded_bytes, tile_knobs


def walked(M: int, N: int, K: int, BM: int, BN: int) -> dict[str, int]:
    """Bytes of bf16 that programs load, tile by tile, less the rows and columns that a mask leaves out."""
    found = {"a": 0, "b": 0}
    for m in range(0, M, BM):
        for n in range(0, N, BN):
            found["a"] += 2 * K * min(BM, M - m)
            found["b"] += 2 * K * min(BN, N - n)
    return found


@pytest.mark.parametrize(("BM", "BN"), [(16, 32), (1, 1), (64, 16)])
def test_the_formula_is_what_programs_load(BM: int, BN: int) -> None:
    assert loaded_bytes(70, 65, 48, BM, BN) == walked(70, 65, 48, BM, BN)
    whole = loaded_bytes(128, 128, 128, BM, BN)
    assert 2 * 128**3 / sum(whole.values()) == intensity(BM, BN)


def test_knobs_have_a_picture_and_its_numbers_as_text() -> None:
    knobs = tile_knobs()
    assert {"BM", "BN", "GB loaded", "operations a byte"} <= set(knobs.table.columns)
    assert png(bars(1024, 64, 64, 32, 2)).startswith(b"\x89PNG")
