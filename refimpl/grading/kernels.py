"""Launch an answer's Triton kernel in the interpreter, and judge what its programs read, wrote and multiplied.

A right result does not show whether a row was loaded once or three times, whether a mask is missing where memory
happens to be readable, or whether two programs write to one place. `launch` counts (refimpl.kernels.count) and looks
for the last two at once; `moved` compares bytes argument by argument. Memory around the tensors is made by `within`: a
lane that goes astray stays inside the storage, so that nothing crashes, and is seen.
"""

import os
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from refimpl.grading.compare import Wrong, require
from refimpl.grading.compiled import one_truth, refuse_statements
from refimpl.grading.undefined import masked_off
from refimpl.launch import report

if TYPE_CHECKING:
    from refimpl.kernels.tally import Counts

AROUND = 64  # elements of memory before and behind a tensor
Limits = Mapping[str, int]


def interpret() -> None:
    """From now on, in this process, kernels are interpreted. Triton decides it for its own functions when imported.

    A rank was forked from a process that has torch._dynamo, and so a triton that compiles. That one is forgotten, all
    but its compiled part, which cannot be loaded twice; and refimpl.kernels, which has taken names from it.
    """
    os.environ["TRITON_INTERPRET"] = "1"
    language = sys.modules.get("triton.language")
    if language is not None and not hasattr(language.max, "rewrite"):  # only an interpreted function has it
        for name in list(sys.modules):
            ours = name.startswith("refimpl.kernels")
            if ours or (name.partition(".")[0] == "triton" and not name.startswith("triton._C")):
                del sys.modules[name]


def within(t: Tensor, row_stride: int = 0) -> Tensor:
    """A copy of t in the middle of memory that holds NaN (or -1); of a matrix, rows may lie `row_stride` apart."""
    rows, cols = (t.shape[0], t.shape[-1]) if row_stride else (1, t.numel())
    stride = row_stride or cols
    empty = float("nan") if t.is_floating_point() else -1
    whole = torch.full((2 * AROUND + rows * stride,), empty, dtype=t.dtype)
    if row_stride:
        return whole.as_strided(t.shape, (stride, 1), AROUND).copy_(t)
    return whole[AROUND : AROUND + cols].view(t.shape).copy_(t)


def launch(kernel: Any, grid: Sequence[int], *args: Any, **constants: Any) -> "Counts":
    """What the kernel did. Wrong if it stored nothing, if a lane left its tensor, if programs race, if a result depends
    on what the language leaves open, or if the compiler would refuse it.
    """
    from refimpl.kernels.count import counted

    refuse_statements(kernel)
    memory = [torch.empty(0, dtype=torch.uint8).set_(a.untyped_storage()) for a in args if isinstance(a, Tensor)]
    before = [m.clone() for m in memory]
    with counted(trace=True, each=lambda: report(None)) as counts, unwrapped(), one_truth(), masked_off() as lanes:
        kernel[tuple(grid)](*args, **constants)
    require(
        counts.stored, "no program stores anything: a kernel returns nothing, its results go into memory by tl.store"
    )
    for name, size in counts.outside.items():
        read, written = counts.loaded_from[name], counts.stored_to[name]
        verb = "loaded and stored" if read and written else "loaded" if read else "stored"
        raise Wrong(
            f"{name}: {size:,} bytes are {verb} that are no element of it: a mask is missing or too wide",
            "Right values may still come out: what lies there is another tensor's, or nobody's.",
        )
    for name, places in counts.races().items():
        raise Wrong(
            f"{name}: a race, {places} places are stored by one program while another stores or loads there",
            "The interpreter runs programs one after the other; on a GPU they run at once, in any order.",
        )
    if lanes:  # once more, from the same memory, with NaN in them
        after = [m.clone() for m in memory]
        for m, was in zip(memory, before, strict=True):
            m.copy_(was)
        with unwrapped(), masked_off(torch.nan):
            kernel[tuple(grid)](*args, **constants)
        require(
            all(map(torch.equal, memory, after)),
            "lanes that a mask switches off count in the result, and no `other` says what they hold: "
            "here it is 0, on a GPU anything",
            "tl.load(pointer, mask=mask, other=0.0), or what else changes nothing: -inf for a maximum.",
        )
    return counts


@contextmanager
def unwrapped() -> Iterator[None]:
    """An exception inside a kernel as it was raised, with the learner's line, not as the interpreter wraps it.

    What numpy warns of meanwhile, in the interpreter's lines, is the kernel's arithmetic, and is judged by its result.
    """
    from triton.runtime.errors import InterpreterError

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            yield
    except InterpreterError as error:
        # Triton's own functions, as tl.sigmoid, wrap once more: the learner's line is in the outermost cause alone.
        outermost = error.__cause__
        cause: BaseException = error
        while isinstance(cause, InterpreterError) and cause.__cause__:
            # Raised below, the cause gets the wrapper as its context: without this they would be each other's.
            wrapper, cause = cause, cause.__cause__
            wrapper.__cause__ = None
        raise cause.with_traceback(outermost and outermost.__traceback__) from None


def moved(
    counts: "Counts",
    loaded: Limits,
    stored: Limits,
    *,
    optional: Limits | None = None,
    advice: str = "",
) -> None:
    """Raise Wrong unless these bytes were loaded and stored, argument by argument; `optional` more may be loaded."""
    for verb, found, expected, more in (
        ("loaded", counts.loaded_from, loaded, optional or {}),
        ("stored", counts.stored_to, stored, {}),
    ):
        for name in sorted({*found, *expected}):
            least, most = expected.get(name, 0), expected.get(name, 0) + more.get(name, 0)
            if least <= found[name] <= most:
                continue
            raise Wrong(_headline(verb, name, found[name], least, advice), *_table(counts, loaded, stored))


def _headline(verb: str, name: str, found: int, expected: int, advice: str) -> str:
    if not expected:
        text = f"{name} is {verb}: {found:,} bytes, and none is needed"
    elif found > expected:
        text = f"{name} is {verb} {found / expected:.3g} times over: {found:,} bytes, {expected:,} are needed"
    else:
        text = f"{name}: {found:,} bytes are {verb}, expected {expected:,}: some of it is left out"
    return f"{text}; {advice}" if advice and found > expected else text


def _table(counts: "Counts", loaded: Limits, stored: Limits) -> list[str]:
    lines = []
    for verb, found, expected in (("loaded", counts.loaded_from, loaded), ("stored", counts.stored_to, stored)):
        for name in sorted({*found, *expected}):
            mark = "" if found[name] == expected.get(name, 0) else "   <-"
            lines.append(f"  {verb} {name:14} {found[name]:>8,} bytes, expected {expected.get(name, 0):>8,}{mark}")
    return lines


def multiplied(counts: "Counts", flops: int, advice: str) -> None:
    """Raise Wrong unless tl.dot did so many operations, none of them on fp32 as TF32."""
    require(
        not counts.tf32,
        "fp32 tiles are multiplied as TF32, with 10 bits, which the interpreter does not show: tl.dot needs "
        'input_precision="ieee"',
    )
    require(counts.flops, f"tl.dot multiplies nothing, expected {flops:,} operations by it: it is what tensor cores do")
    require(
        counts.flops == flops,
        f"tl.dot does {counts.flops:,} operations, expected {flops:,} ({counts.flops / flops:.3g} times): {advice}",
    )


def no_larger(counts: "Counts", elements: int, advice: str) -> None:
    """Raise Wrong if a program held a block of more elements."""
    require(
        counts.largest_block <= elements,
        f"a program holds a block of {counts.largest_block:,} elements, {elements:,} are enough: {advice}",
    )


def bytes_of(**tensors: Tensor) -> dict[str, int]:
    """Each argument's own size: what one pass over it moves."""
    return {f"{name}_ptr": t.numel() * t.element_size() for name, t in tensors.items()}


def times(sizes: Limits, **factors: int) -> dict[str, int]:
    """The sizes, each as often as `factors` says by the argument's name without _ptr; once if it does not."""
    return {name: size * factors.get(name.removesuffix("_ptr"), 1) for name, size in sizes.items()}


def sectors(counts: "Counts", name: str, most: int, advice: str) -> None:
    """Raise Wrong if the accesses to an argument touch more than `most` bytes of memory's sectors."""
    found: Counter[str] = counts.sectors()
    require(
        found[name] <= most,
        f"{name}: the sectors that are touched hold {found[name]:,} bytes, {most:,} are enough: {advice}",
    )


def random_numbers(seed: int, n: int) -> Tensor:
    """tl.rand(seed, i) for i = 0 to n - 1, [n] fp32."""
    from refimpl.grading import probes

    out = torch.empty(1 << n.bit_length())
    probes.numbers[(1,)](out, seed, BLOCK=len(out))
    return out[:n]


def tiles_of(function: Any, tiles_m: int, tiles_n: int, group: int) -> list[tuple[int, int]]:
    """The tile that the answer's function gives to each program."""
    from refimpl.grading import probes

    out = torch.full((tiles_m * tiles_n, 2), -1)
    refuse_statements(function)
    with unwrapped(), one_truth():
        probes.tiles[(len(out),)](out, function, tiles_m, tiles_n, group)
    return [(int(m), int(n)) for m, n in out.tolist()]
