"""What a grader of kernels sees and says, in a rank of its own: there kernels are interpreted, here they are not."""

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from refimpl.grading.compare import Wrong
from refimpl.grading.kernels import moved
from refimpl.grading.rank import explained
from refimpl.launch import run

KERNELS = """
import triton
import triton.language as tl


@triton.jit
def double(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + i, 2 * tl.load(x_ptr + i, mask=i < n), mask=i < n)


@triton.jit
def beyond(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + i, 2 * tl.load(x_ptr + i, mask=i < n), mask=i < n + 1)


@triton.jit
def racing(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out_ptr + i, 2 * tl.load(x_ptr + i, mask=i < n), mask=i < n)


@triton.jit
def twice(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n) + tl.load(x_ptr + i, mask=i < n)
    tl.store(out_ptr + i, x, mask=i < n)


@triton.jit
def raising(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    tl.store(out_ptr, tl.exp(tl.load(x_ptr).to(tl.float16)))


@triton.jit
def leaving(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    for i in range(n):
        if i == 8:
            break
        tl.store(out_ptr + i, 2 * tl.load(x_ptr + i))


@triton.jit
def branching(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if i < n:
        tl.store(out_ptr + i, 2 * tl.load(x_ptr + i, mask=i < n), mask=i < n)


@triton.jit
def deciding(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    first = tl.program_id(0) * BLOCK
    if first < n and n > 0:
        i = first + tl.arange(0, BLOCK)
        tl.store(out_ptr + i, 2 * tl.load(x_ptr + i, mask=i < n), mask=i < n)
"""
NAMES = ("double", "deciding", "beyond", "racing", "twice", "raising", "leaving", "branching")


def judged(path: Path) -> dict[str, list[str]]:
    """Each kernel -> what the grader says of it, or what it raises; in a process that had torch._dynamo before."""
    import torch
    import torch._dynamo

    from refimpl.grading.chapters import import_file
    from refimpl.grading.kernels import bytes_of, interpret, launch, moved, within

    interpret()
    answer, found = import_file(path, "answer"), {}
    for name in NAMES:
        x, out = within(torch.arange(10.0)), within(torch.zeros(10))
        try:
            counts = launch(getattr(answer, name), (2,), x, out, 10, BLOCK=8)
            moved(counts, bytes_of(x=x), bytes_of(out=out), advice="keep it")
            found[name] = ["right", str(torch.equal(out, 2 * x))]
        except Wrong as wrong:
            found[name] = [wrong.headline, *wrong.details]
        except ValueError as error:
            found[name] = [type(error).__name__, str(error.__context__ and error.__context__.__cause__), str(error)]
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    pytest.importorskip("triton")
    path = tmp_path_factory.mktemp("kernels") / "answer.py"
    path.write_text(KERNELS)
    return run(judged, path, ranks=1)[0]


def test_a_right_kernel_passes(found: dict[str, list[str]]) -> None:
    assert found["double"] == found["deciding"] == ["right", "True"]


def test_what_leaves_the_tensor_and_what_races_is_said_though_results_are_right(found: dict[str, list[str]]) -> None:
    assert found["beyond"][0].startswith("out_ptr: 4 bytes are stored that are no element of it")
    assert found["racing"][0].startswith("out_ptr: a race, 8 places")


def test_a_second_load_is_said_with_a_table(found: dict[str, list[str]]) -> None:
    assert found["twice"][0] == "x_ptr is loaded 2 times over: 80 bytes, 40 are needed; keep it"
    assert any("x_ptr" in line and line.endswith("<-") for line in found["twice"][1:])


def test_an_exception_is_the_learners_own_and_no_circle(found: dict[str, list[str]]) -> None:
    """Its context is the interpreter's wrapper, whose cause it was: whoever followed that would never end."""
    assert found["raising"][:2] == ["ValueError", "None"]


def test_what_the_compiler_refuses_is_said_though_the_interpreter_takes_it(found: dict[str, list[str]]) -> None:
    assert found["leaving"][0].startswith("Triton's compiler knows no `break`")
    assert found["leaving"][1].endswith(": break")
    kind, _, said = found["branching"]
    assert kind == "ValueError"
    assert said.startswith("a block of 8 numbers is asked for one truth")


def test_bytes_that_are_left_out_are_said() -> None:
    counts: Any = SimpleNamespace(loaded_from=Counter(x_ptr=4), stored_to=Counter(out_ptr=8))
    moved(counts, {"x_ptr": 4}, {"out_ptr": 8})
    moved(counts, {}, {"out_ptr": 8}, optional={"x_ptr": 4})
    with pytest.raises(Wrong, match="x_ptr: 4 bytes are loaded, expected 8: some of it is left out"):
        moved(counts, {"x_ptr": 8}, {"out_ptr": 8})
    with pytest.raises(Wrong, match="out_ptr is stored 2 times over: 8 bytes, 4 are needed"):
        moved(counts, {"x_ptr": 4}, {"out_ptr": 4}, optional={"out_ptr": 4})


def test_without_triton_the_report_says_what_to_do() -> None:
    error = ModuleNotFoundError("No module named 'triton'", name="triton")
    wrong = explained(error, Path("exercise.py"), "softmax_kernel")
    assert wrong.headline == "exercise.py cannot be imported: No module named 'triton'"
    assert any("macOS" in line and "Linux container" in line for line in wrong.details)
