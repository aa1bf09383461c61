"""What cards and chapter 14 say of kernels: bytes, sectors, waves, exponentials, occupancy."""

import pytest
import torch

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402
from triton.runtime.interpreter import InterpretedFunction  # noqa: E402

from refimpl.grading.chapters import find_chapter, import_file  # noqa: E402
from refimpl.kernels.compiled import Compiled  # noqa: E402
from refimpl.kernels.count import counted  # noqa: E402
from refimpl.kernels.language import INTERPRETED  # noqa: E402
from refimpl.kernels.rms_norm import rms_norm  # noqa: E402

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="kernels are compiled for a GPU here")


@InterpretedFunction
def copy(x_ptr, out_ptr, stride, step, BLOCK: tl.constexpr):
    at = tl.program_id(0) * stride + tl.arange(0, BLOCK) * step
    tl.store(out_ptr + at, tl.load(x_ptr + at))


@InterpretedFunction
def tile(a_ptr, b_ptr, order_ptr, out_ptr, ROW: tl.constexpr):
    pid, i = tl.program_id(0), tl.arange(0, ROW)
    m, n = tl.load(order_ptr + 2 * pid), tl.load(order_ptr + 2 * pid + 1)
    total = tl.sum(tl.load(a_ptr + m * ROW + i) * tl.load(b_ptr + n * ROW + i), axis=0)
    tl.store(out_ptr + m * 9 + n, total)


def test_a_norm_moves_each_element_twice() -> None:
    x, weight = torch.randn(6, 96), torch.ones(96)
    with counted() as c, torch.no_grad():
        rms_norm(x, weight, 1e-5)
    assert c.loaded_from["x"] == x.nbytes
    assert c.stored_to["y"] == x.nbytes


def test_a_column_touches_a_sector_for_each_element() -> None:
    x, out = torch.randn(64, 64), torch.empty(64, 64)
    with counted(trace=True) as by_rows:
        copy[(64,)](x, out, 64, 1, BLOCK=64)
    with counted(trace=True) as by_columns:
        copy[(64,)](x, out, 1, 64, BLOCK=64)
    assert by_rows.sectors() == {"x_ptr": x.nbytes, "out_ptr": x.nbytes}
    assert by_columns.sectors() == {"x_ptr": 8 * x.nbytes, "out_ptr": 8 * x.nbytes}
    assert by_rows.loaded == by_columns.loaded


def test_squares_of_tiles_load_less_than_rows_of_them() -> None:
    a, b, out = torch.randn(9, 16), torch.randn(9, 16), torch.empty(9, 9)
    rows = [(m, n) for m in range(9) for n in range(9)]
    squares = sorted(rows, key=lambda t: (t[0] // 3, t[1] // 3, t))
    found = {}
    for name, order in (("rows", rows), ("squares", squares)):
        with counted(trace=True) as c:
            tile[(81,)](a, b, torch.tensor(order, dtype=torch.int32), out, ROW=16)
        torch.testing.assert_close(out, a @ b.t())
        loaded = c.shared(9)
        found[name] = [loaded["a_ptr"] // 64, loaded["b_ptr"] // 64]  # rows of 9 tiles, for 9 waves
    assert found == {"rows": [9, 81], "squares": [27, 27]}


def test_flash_attention_has_an_exponential_for_4_d_operations() -> None:
    T, D, B = 32, 16, 16
    kernel = import_file(find_chapter("14").solution, "solution").flash_kernel
    q, k, v, out = (torch.randn(1, T, D) for _ in range(4))
    blocks = 3
    with counted() as c:
        InterpretedFunction(kernel.fn)[(T // B, 1)](
            q, k, v, out, torch.empty(1, T), T, 1, 0.25, T * D, D, T * D, D, D=D, BM=B, BN=B
        )
    assert c.flops == 4 * D * blocks * B * B
    assert c.exps == blocks * (B * B + B)  # one a score, and one a query for the factor


@pytest.mark.parametrize(("registers", "warps", "programs"), [(40, 4, 12), (128, 8, 2), (248, 8, 1), (32, 4, 16)])
def test_occupancy_follows_from_registers(registers: int, warps: int, programs: int) -> None:
    assert Compiled("", "", registers, 0, 0, warps).programs == programs
    assert programs == min(64 * 1024 // (registers * 32 * warps), 64 // warps)
