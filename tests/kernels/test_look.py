"""look(): registers, stack and instructions of a kernel, compiled for an H100 without a GPU."""

from pathlib import Path

import pytest

from refimpl.kernels.look import look

KERNEL = """
import triton
import triton.language as tl


@triton.jit
def product(a_ptr, b_ptr, c_ptr, K, B: tl.constexpr, BK: tl.constexpr):
    i, k = tl.arange(0, B), tl.arange(0, BK)
    total = tl.zeros((B, B), tl.float32)
    for start in range(0, K, BK):
        a = tl.load(a_ptr + i[:, None] * K + start + k[None, :])
        b = tl.load(b_ptr + (start + k[:, None]) * B + i[None, :])
        total = tl.dot(a, b, total)
    tl.store(c_ptr + i[:, None] * B + i[None, :], total)


@triton.jit
def wrong(a_ptr, B: tl.constexpr):
    tl.store(a_ptr + tl.arange(0, B), 0)
"""
SIGNATURE = {"a_ptr": "*fp16", "b_ptr": "*fp16", "c_ptr": "*fp32", "K": "i32"}
POINTERS = ["a_ptr", "b_ptr", "c_ptr"]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("look") / "kernel.py"
    path.write_text(KERNEL)
    return path


def test_what_configurations_change(path: Path) -> None:
    options = [{"num_warps": 4, "num_stages": 1}, {"num_warps": 4, "num_stages": 3}, {"num_warps": 1, "B": 128}]
    one, three, large = look(path, "product", SIGNATURE, {"B": 64, "BK": 32}, options, [*POINTERS, "K"])
    assert one["tensor core"] > 0
    assert (one["copies ahead"], one["narrower loads"]) == (0, 0)
    assert one["16-byte loads"] > 0
    assert three["copies ahead"] > 0
    assert three["shared"] > one["shared"]
    assert (one["stack"], three["stack"], one["warps"], large["warps"]) == (0, 0, 4, 1)
    assert large["stack"] > 0, "128 x 128 sums in 32 threads of 255 registers cannot fit"
    assert one["programs"] >= 2


def test_an_odd_stride_narrows_the_loads(path: Path) -> None:
    (found,) = look(path, "product", SIGNATURE, {"B": 64, "BK": 32}, [{"num_stages": 1}], POINTERS)
    assert found["narrower loads"] > 0


def test_what_the_compiler_refuses_is_said(path: Path) -> None:
    with pytest.raises(RuntimeError, match="power of 2"):
        look(path, "wrong", {"a_ptr": "*fp32"}, {"B": 3}, [{}])
