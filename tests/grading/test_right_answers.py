"""Right answers that are written otherwise than the solution pass."""

from pathlib import Path

import pytest
from answers import grader

from refimpl.grading.chapters import find_chapter
from refimpl.grading.live import exercises_of

ANSWERS = {
    ("14", "dropout_kernel"): '''"""What is dropped is not loaded."""

import triton
import triton.language as tl


@triton.jit
def dropout_kernel(x_ptr, out_ptr, n, p, seed, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    keep = tl.rand(seed, i) >= p
    x = tl.load(x_ptr + i, (i < n) & keep, 0.0).to(tl.float32)
    tl.store(out_ptr + i, x * (1.0 / (1.0 - p)), i < n)
''',
    ("16", "sparse_backward"): '''"""Block by block, and the row sums by an einsum, which counts as a product."""

import torch


def sparse_backward(q, k, v, out, lse, out_grad, layout, causal):
    n = len(layout)
    b, scale = len(q) // n, q.shape[1] ** -0.5
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    delta = torch.einsum("td,td->t", out_grad, out)
    for r, c in layout.nonzero().tolist():
        if causal and c > r:
            continue
        R, C = slice(r * b, r * b + b), slice(c * b, c * b + b)
        p = torch.exp(q[R] @ k[C].T * scale - lse[R, None])
        p = p.tril() if causal and c == r else p
        dv[C] += p.T @ out_grad[R]
        ds = p * (out_grad[R] @ v[C].T - delta[R, None]) * scale
        dq[R] += ds @ k[C]
        dk[C] += ds.T @ q[R]
    return dq, dk, dv
''',
}


@pytest.mark.parametrize(("chapter", "task"), ANSWERS)
def test_it_passes(tmp_path: Path, chapter: str, task: str) -> None:
    file = tmp_path / "exercise.py"
    file.write_text(ANSWERS[chapter, task])
    (exercise,) = (exercise for exercise in exercises_of(find_chapter(chapter)) if exercise.task == task)
    verdict = grader().grade(exercise, file)
    assert verdict.outcome == "pass", verdict.text
