"""What Triton's compiler refuses, and its interpreter takes: a kernel that no GPU could run must not pass.

The interpreter runs a kernel as Python. There `break` ends a loop, and a block of many numbers, asked whether it is
true, says yes: `if rows < T` is always taken. `a and b` and `max(a, b)` of two blocks, which the compiler makes
element by element, are b there: nothing that an answer could be judged by.
"""

import ast
import importlib
import inspect
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from refimpl.grading.compare import Wrong

BLOCK_AS_BOOL = (
    "a block of {} numbers is asked for one truth: the compiler refuses `if` and `while` of blocks, the interpreter "
    "has no `and`, `or`, `not`, min and max of them; there are tl.where, masks, &, |, ~, tl.minimum and tl.maximum"
)
ELSEWHERE = (ast.Starred, ast.FormattedValue)  # the compiler meets them inside of others


def refuse_statements(kernel: Any) -> None:
    """Raise Wrong if the text of a kernel has what the compiler has no translation for, such as `break` or a lambda."""
    from triton.compiler.code_generator import CodeGenerator

    lines, first = inspect.getsourcelines(kernel.fn)
    for node in ast.walk(ast.parse(textwrap.dedent("".join(lines)))):
        what = type(node).__name__
        known = hasattr(CodeGenerator, f"visit_{what}") or isinstance(node, ELSEWHERE)
        if isinstance(node, ast.stmt | ast.expr) and not known:
            line = lines[node.lineno - 1].strip()
            raise Wrong(
                f"Triton's compiler knows no `{what.lower()}`: no GPU could run this kernel, the interpreter does",
                f"  line {first + node.lineno - 1}: {line}",
                "A loop ends where its range says: for start in range(0, end, BLOCK).",
            )


@contextmanager
def one_truth() -> Iterator[None]:
    """Inside, a block of more than one number raises ValueError where a kernel's own line asks whether it is true."""
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    patch = interpreter._patch_lang_tensor

    def __bool__(block: Any) -> bool:  # by this name calls.py knows that Python calls it
        data = block.handle.data
        asks = sys._getframe(1).f_globals["__name__"].partition(".")[0]
        if data.size > 1 and asks != "triton":  # whose own functions ask whether there is a mask at all
            raise ValueError(BLOCK_AS_BOOL.format(data.size))
        return data.size > 1 or bool(data)

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__bool__", __bool__)

    interpreter._patch_lang_tensor = patched
    try:
        yield
    finally:
        interpreter._patch_lang_tensor = patch
