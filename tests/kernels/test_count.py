"""counted(): bytes by argument, FLOPs, places outside and races, against what the kernel's text says it does."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402
from triton.runtime import interpreter  # noqa: E402
from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: E402

from refimpl.kernels.count import UNKNOWN, counted  # noqa: E402
from refimpl.kernels.language import INTERPRETED  # noqa: E402

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="kernels are compiled for a GPU here")


@interpreter.InterpretedFunction
def add(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.load(x_ptr + i, mask=i < n) + tl.load(y_ptr + i, mask=i < n)
    tl.store(out_ptr + i, total, mask=i < n)


@interpreter.InterpretedFunction
def add_unmasked(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + i, tl.load(x_ptr + i) + tl.load(y_ptr + i))


@interpreter.InterpretedFunction
def copy_rows(x_ptr, out_ptr, rows, cols, row_stride, col_stride, BLOCK: tl.constexpr):
    """A program copies a row of a view into a dense one."""
    row, i = tl.program_id(0), tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * row_stride + i * col_stride, mask=i < cols)
    tl.store(out_ptr + row * cols + i, x, mask=i < cols)


@interpreter.InterpretedFunction
def matmul(a_ptr, b_ptr, c_ptr, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    i = tl.program_id(0) * BM + tl.arange(0, BM)[:, None]
    j = tl.program_id(1) * BN + tl.arange(0, BN)[None, :]
    total = tl.zeros((BM, BN), tl.float32)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        a = tl.load(a_ptr + i * K + k[None, :], mask=(i < M) & (k[None, :] < K), other=0.0)
        b = tl.load(b_ptr + k[:, None] * N + j, mask=(k[:, None] < K) & (j < N), other=0.0)
        total += tl.dot(a, b)
    tl.store(c_ptr + i * N + j, total, mask=(i < M) & (j < N))


@interpreter.InterpretedFunction
def softmax(x_ptr, out_ptr, cols, BLOCK: tl.constexpr):
    row, i = tl.program_id(0), tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * cols + i, mask=i < cols, other=-float("inf"))
    e = tl.exp(x - tl.max(x, axis=0))
    tl.store(out_ptr + row * cols + i, e / tl.sum(e, axis=0), mask=i < cols)


@interpreter.InterpretedFunction
def total(x_ptr, out_ptr, n, ATOMIC: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    part = tl.sum(tl.load(x_ptr + i, mask=i < n, other=0.0), axis=0)
    if ATOMIC:
        tl.atomic_add(out_ptr, part)
    else:
        tl.store(out_ptr, tl.load(out_ptr) + part)


@interpreter.InterpretedFunction
def take_first(out_ptr, x_ptr):
    tl.atomic_cas(out_ptr, 0, 7)
    tl.device_assert(tl.load(x_ptr) < 0, "planted")
    tl.static_assert(False, "planted")


@interpreter.InterpretedFunction
def through_a_table(table_ptr, out_ptr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x_ptr = tl.load(table_ptr + tl.program_id(0)).to(tl.pointer_type(tl.float32))
    tl.store(out_ptr + tl.program_id(0) * BLOCK + i, tl.load(x_ptr + i))


@interpreter.InterpretedFunction
def by_descriptor(x, out, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK
    out.store([at, 0], x.load([at, 0]) * 2)


@pytest.mark.parametrize("n", [0, 1, 63, 64, 130])
def test_masked_lanes_are_not_counted(n: int) -> None:
    x, y, out = torch.randn(n), torch.randn(n), torch.empty(n)
    with counted() as c:
        add[(3,)](x, y, out, n, BLOCK=64)
    assert torch.equal(out, x + y)
    assert (c.loaded, c.stored) == (8 * n, 4 * n)
    assert (c.loaded_from["x_ptr"], c.loaded_from["y_ptr"], c.stored_to["out_ptr"]) == (4 * n, 4 * n, 4 * n)
    assert (c.programs, c.launches, c.largest_block, c.operations) == (3, 1, 64, 3 * 64)
    assert not c.outside


@pytest.mark.parametrize(("dtype", "size"), [(torch.float16, 2), (torch.float64, 8), (torch.int8, 1)])
def test_an_element_has_its_dtypes_bytes(dtype: torch.dtype, size: int) -> None:
    x = torch.ones(10, dtype=dtype)
    with counted() as c:
        add[(1,)](x, x, torch.empty_like(x), 10, BLOCK=16)
    assert (c.loaded, c.stored) == (20 * size, 10 * size)


def test_one_tensor_given_three_times_is_three_arguments() -> None:
    x = torch.arange(10.0)
    with counted() as c:
        add[(1,)](x, x, x, 10, BLOCK=16)
    assert torch.equal(x, 2 * torch.arange(10.0))
    assert (c.loaded_from["x_ptr"], c.loaded_from["y_ptr"], c.stored_to["out_ptr"]) == (40, 40, 40)


def test_without_a_mask_what_lies_outside_is_seen_and_not_touched() -> None:
    x, out = torch.ones(10), torch.zeros(10)
    with counted() as c:
        add_unmasked[(1,)](x, x, out, 10, BLOCK=16)
    assert torch.equal(out, torch.full((10,), 2.0))
    assert c.outside == {"x_ptr": 24, "y_ptr": 24, "out_ptr": 24}
    assert c.loaded == 2 * 64


def test_inside_the_storage_but_not_of_the_view_is_outside_too() -> None:
    whole = torch.full((12,), 5.0)
    out = whole.clone()
    with counted() as c:
        add_unmasked[(1,)](whole[:10], whole[:10], out[2:10], 10, BLOCK=16)
    assert c.outside == {"x_ptr": 24, "y_ptr": 24, "out_ptr": 32}
    assert out.tolist() == [5.0, 5.0] + [10.0] * 10  # memory of the tensor's own: the store is made


@pytest.mark.parametrize("cols", [5, 7, 8])
def test_elements_of_a_strided_view(cols: int) -> None:
    """Of 3 rows of 8, five columns are the view: a row read too far is seen, in the middle of the memory too."""
    x, out = torch.randn(3, 8)[:, :5], torch.empty(3, cols)
    with counted() as c:
        copy_rows[(3,)](x, out, 3, cols, x.stride(0), x.stride(1), BLOCK=8)
    assert c.outside["x_ptr"] == 3 * 4 * (cols - 5)


def test_views_that_interleave_are_told_apart() -> None:
    qkv = torch.randn(4, 3, 8).transpose(0, 1)
    out = torch.empty(4, 8)
    with counted() as c:
        copy_rows[(4,)](qkv[1], out, 4, 8, qkv.stride(1), 1, BLOCK=8)
        assert torch.equal(out, qkv[1])
        copy_rows[(4,)](qkv[2], qkv[0], 4, 8, qkv.stride(1), 1, BLOCK=8)
    assert c.launches == 2
    assert c.loaded_from == {"x_ptr": 2 * 4 * 8 * 4}
    assert c.outside["out_ptr"] == 2 * 8 * 4  # it writes rows of 8 densely; every third run of 8 is the view's


def test_a_transposed_argument_has_all_its_elements() -> None:
    x, out = torch.randn(8, 3).t(), torch.empty(3, 8)
    with counted() as c:
        copy_rows[(3,)](x, out, 3, 8, x.stride(0), x.stride(1), BLOCK=8)
    assert torch.equal(out, x)
    assert not c.outside


def test_a_matmul_loads_each_matrix_once_for_every_tile_of_the_other() -> None:
    M, N, K, BM, BN, BK = 20, 33, 24, 16, 16, 16
    a, b, c_ = torch.randn(M, K), torch.randn(K, N), torch.empty(M, N)
    grid = (triton.cdiv(M, BM), triton.cdiv(N, BN))
    with counted(trace=True) as c:
        matmul[grid](a, b, c_, M, N, K, BM=BM, BN=BN, BK=BK)
    torch.testing.assert_close(c_, a @ b)
    assert c.loaded_from == {"a_ptr": 4 * M * K * grid[1], "b_ptr": 4 * K * N * grid[0]}
    assert c.stored == 4 * M * N
    assert c.flops == grid[0] * grid[1] * triton.cdiv(K, BK) * 2 * BM * BN * BK
    assert c.distinct() == {"a_ptr": 4 * M * K, "b_ptr": 4 * K * N}
    # Two programs at once: both rows of tiles, so b's tile is loaded once for both, and all of a again each time.
    assert c.shared(2) == {"a_ptr": 4 * M * K * grid[1], "b_ptr": 4 * K * N}
    assert c.shared(1) == c.loaded_from
    assert not c.races()


def test_operations_and_exponentials() -> None:
    x, out = torch.randn(3, 11), torch.empty(3, 11)
    with counted() as c:
        softmax[(3,)](x, out, 11, BLOCK=16)
    torch.testing.assert_close(out, x.softmax(1))
    assert c.exps == 3 * 16
    assert c.operations == 3 * 16 * 5  # max, subtract, exp, sum, divide
    assert c.flops == 0


def test_a_race_and_its_cure() -> None:
    x, out = torch.ones(40), torch.zeros(1)
    with counted(trace=True) as c:
        total[(3,)](x, out, 40, ATOMIC=False, BLOCK=16)
    assert c.races() == {"out_ptr": 1}
    with counted(trace=True) as c:
        total[(3,)](x, out, 40, ATOMIC=True, BLOCK=16)
    assert not c.races()
    assert (c.loaded_from["out_ptr"], c.stored_to["out_ptr"]) == (12, 12)
    assert out.item() == 80
    with counted(trace=True) as c:
        total[(1,)](x, out, 16, ATOMIC=False, BLOCK=16)
    assert not c.races(), "one program races with nobody"


def test_a_race_through_two_names_of_one_tensor() -> None:
    x = torch.arange(24.0)
    with counted(trace=True) as c:
        copy_rows[(2,)](x, x[4:], 2, 8, 8, 1, BLOCK=8)  # program 0 stores 4 to 11, program 1 loads 8 to 15
    assert c.races() == {"out_ptr": 4}  # 8 to 11; what 12 to 15 hold concerns program 1 alone
    with counted(trace=True) as c:
        copy_rows[(2,)](x, x, 2, 8, 8, 1, BLOCK=8)
    assert not c.races()


def test_compare_and_swap_and_what_stays_after_an_error() -> None:
    before = dict(vars(interpreter.interpreter_builder)), dict(vars(interpreter))
    out = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(Exception, match="planted"), counted() as c:
        take_first[(1,)](out, torch.ones(1))
    assert (c.loaded, c.stored) == (4 + 4, 4)
    assert dict(vars(interpreter)) == before[1]
    assert "create_dot" not in vars(interpreter.interpreter_builder)
    assert vars(interpreter.interpreter_builder).keys() - before[0].keys() <= {"grid_dim", "grid_idx"}
    x = torch.ones(4)
    add[(1,)](x, x, x, 4, BLOCK=4)
    assert x.tolist() == [2.0] * 4


def test_pointers_from_a_table_have_no_name() -> None:
    rows = [torch.randn(8) for _ in range(3)]
    table, out = torch.tensor([r.data_ptr() for r in rows]), torch.empty(3, 8)
    with counted() as c:
        through_a_table[(3,)](table, out, BLOCK=8)
    assert torch.equal(out, torch.stack(rows))
    assert c.loaded_from == {"table_ptr": 24, UNKNOWN: 96}


def test_descriptors_are_counted_without_what_they_pad() -> None:
    x, out = torch.randn(6, 8), torch.zeros(6, 8)
    with counted() as c:
        by_descriptor[(2,)](*(TensorDescriptor.from_tensor(t, [4, 8]) for t in (x, out)), BLOCK=4)
    assert torch.equal(out, 2 * x)
    assert (c.loaded_from["x"], c.stored_to["out"]) == (6 * 8 * 4, 6 * 8 * 4)
    assert not c.outside


def test_only_one_count_at_a_time() -> None:
    with counted(), pytest.raises(RuntimeError, match="one count at a time"), counted():
        pass


def test_nothing_is_counted_silently_without_the_interpreter() -> None:
    code = "from refimpl.kernels.count import counted\nwith counted(): pass"
    environ = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    found = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True)
    assert found.returncode
    assert "set TRITON_INTERPRET=1" in found.stderr


def test_results_are_the_same_with_and_without() -> None:
    a, b = torch.randn(17, 19), torch.randn(19, 23)
    one, other = torch.empty(17, 23), torch.empty(17, 23)
    matmul[(2, 2)](a, b, one, 17, 23, 19, BM=16, BN=16, BK=16)
    with counted():
        matmul[(2, 2)](a, b, other, 17, 23, 19, BM=16, BN=16, BK=16)
    assert np.array_equal(one.numpy(), other.numpy())
