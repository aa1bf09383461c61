"""In which type tiles are multiplied, and how exactly."""

from typing import Any

import torch

from refimpl.kernels.language import INTERPRETED, tl


def dots(dtype: torch.dtype) -> dict[str, Any]:
    """The constants of a kernel that calls tl.dot on tiles of `dtype`, adding up in fp32.

    DOT: the inputs' own type; under the interpreter fp32, since its bf16 is wrong without a word. PRECISION, of fp32
    inputs: exact, or in TF32 (10 bits, 8 times as fast) where torch.backends.cuda.matmul.fp32_precision says so, which
    follows allow_tf32 too; reading that one is an error once somebody has set this one.
    """
    native = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}
    exact = dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision != "tf32"
    return {"DOT": tl.float32 if INTERPRETED else native[dtype], "PRECISION": "ieee" if exact else "tf32"}
