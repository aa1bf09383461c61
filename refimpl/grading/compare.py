"""Found against expected: where they first differ, and which well-known mistake makes exactly this difference."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn, optim

from refimpl.comm.work import Work

SHOWN = 6  # values shown around the first difference
OTHERS = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
WORK = "a collective fills the tensor that it is given, and returns what one may wait for"


class Wrong(Exception):
    """The answer is wrong. `headline` names the mistake in one line; `details` are further lines."""

    def __init__(self, headline: str, *details: str) -> None:
        super().__init__(headline, *details)
        self.headline, self.details = headline, details


class WrongFile(Wrong):
    """The file itself is at fault, so that none of its tasks can be graded."""


class Todo(Wrong):
    """The answer, or something that it calls, is not written yet."""


def require(condition: object, headline: str, *details: str) -> None:
    """Raise Wrong unless the condition holds."""
    if not condition:
        raise Wrong(headline, *details)


@contextmanager
def refused(kind: type[Exception], what: str) -> Iterator[None]:
    """Inside, `what` is refused by an error of this kind, which goes on its way; another kind is Wrong."""
    try:
        yield
    except OTHERS as error:
        if isinstance(error, kind):
            raise
        raise Wrong(f"{what}: {type(error).__name__}, expected {kind.__name__}", f"  {error}") from None


def equal(
    found: Any,
    expected: Tensor,
    what: str,
    *,
    ranks: int = 0,
    parts: int = 0,
    known: Mapping[str, Tensor] | None = None,
    rtol: float = 1e-5,
    atol: float = 1e-6,
) -> None:
    """Raise Wrong unless `found` is a tensor like `expected`: shape, dtype, values (integers exactly).

    ranks, parts: recognise results that are too large or too small by the number of ranks, or of micro-batches (which
    should be another number, or one is taken for the other). known: results of well-known mistakes, each under
    the sentence that explains it.
    """
    a_tensor(found, what)
    for kind, is_, should in (
        ("shape", tuple(found.shape), tuple(expected.shape)),
        ("dtype", found.dtype, expected.dtype),
    ):
        require(is_ == should, f"{what} has {kind} {is_}, expected {should}")
    if close(found, expected, rtol, atol):
        return
    reason = recognise(found, expected, ranks, known or {}, rtol, atol, parts)
    reason = reason or f"wrong values: {pattern(found, expected, rtol, atol)}"
    raise Wrong(f"{what}: {reason}", *difference(found, expected, rtol, atol))


def a_tensor(found: Any, what: str) -> None:
    """Raise Wrong unless `found` is one."""
    if isinstance(found, Tensor):
        return
    hint = "is there a `return`?" if found is None else "a tensor is expected"
    raise Wrong(f"{what} is {_a(found)}: {WORK if isinstance(found, Work) else hint}")


def rounded_once(found: Tensor, exact: Tensor, what: str, advice: str, atol: float = 0.0) -> None:
    """Raise Wrong if `found`, of 16 bits, is further from `exact`, in fp64, than its own rounding and a few in fp32."""
    if found.dtype.itemsize > 2:
        return
    kind = torch.finfo(found.dtype)
    half = exact.abs().clamp(min=kind.smallest_normal) * kind.eps / 2 + atol
    off = ((found.detach().double() - exact) / half).abs().nan_to_num(0).max().item()
    require(off < 1.1, f"{what} is rounded more than once, {off:.1f} times half of the last place: {advice}")


def close(found: Tensor, expected: Tensor, rtol: float = 1e-5, atol: float = 1e-6) -> bool:
    """Whether both have one shape and equal values: integers exactly, floats within rtol and atol, NaN equal to NaN."""
    if found.shape != expected.shape:
        return False
    if not expected.is_floating_point():
        return torch.equal(found, expected.to(found.dtype))
    return torch.allclose(found.detach().double(), expected.detach().double(), rtol, atol, equal_nan=True)


def recognise(
    found: Tensor,
    expected: Tensor,
    ranks: int,
    known: Mapping[str, Tensor],
    rtol: float = 1e-5,
    atol: float = 1e-6,
    parts: int = 0,
) -> str:
    """The well-known mistake that makes exactly `found`, in a sentence; "" if there is none."""
    for sentence, candidate in known.items():
        if candidate.shape == found.shape and close(found, candidate, rtol, atol):
            return sentence
    f, e = found.detach().double(), expected.detach().double()
    if not f.isfinite().all() and e.isfinite().all():
        return "it holds NaN or Inf: memory that was never written (or not yet: wait() first), an overflow, or 0 / 0"
    guesses = {}
    if ranks > 1:
        guesses[f"exactly {ranks}x the expected: summed over the ranks, not averaged"] = e * ranks
        guesses[f"exactly 1/{ranks} of the expected: divided by the number of ranks once too often"] = e / ranks
    if parts > 1:
        guesses[f"exactly 1/{parts} of the expected: divided by the number of micro-batches, which add up"] = e / parts
        guesses[f"exactly {parts}x the expected: reduced anew with each of {parts} micro-batches"] = e * parts
    guesses["all zeros: nothing arrived here"] = torch.zeros_like(e)
    guesses["every sign is wrong"] = -e
    return next((s for s, guess in guesses.items() if torch.allclose(f, guess, rtol, atol)), "")


def pattern(found: Tensor, expected: Tensor, rtol: float = 1e-5, atol: float = 1e-6) -> str:
    """How values differ that no known mistake explains: by what, or where."""
    f, e = found.detach().double().flatten(), expected.detach().double().flatten()
    if len(f) == 1:
        return f"{f.item():.6g}, expected {e.item():.6g}"
    if torch.allclose(f.sort().values, e.sort().values, rtol, atol):
        return "the right numbers in another order"
    for kind, bits in ((torch.bfloat16, 8), (torch.float16, 11)) if found.is_floating_point() else ():
        if torch.equal(f, f.to(kind).double()) and not torch.equal(e, e.to(kind).double()):
            return f"none has more than the {bits} bits of {str(kind)[6:]}: are they rounded on the way?"
    by = (f / e)[e != 0]
    if len(by) > 1 and torch.allclose(f, by[0] * e, rtol, atol):
        return f"each is {by[0].item():.6g}x the expected"
    if torch.allclose(f - e, f[0] - e[0], rtol, atol):
        return f"each is {abs(f[0] - e[0]).item():.6g} too {'large' if f[0] > e[0] else 'small'}"
    wrong = different(found, expected, rtol, atol).nonzero().flatten()
    first, last, count = int(wrong[0]), int(wrong[-1]), len(wrong)
    if count == len(f):
        return f"all {count} of them"
    where = f"element {first}" if count == 1 else f"elements {first} to {last}"
    if count == last - first + 1:
        return f"{where} of {len(f)}, and no others"
    return f"{count} of {len(f)}, from element {first} on"


def different(found: Tensor, expected: Tensor, rtol: float, atol: float) -> Tensor:
    """Which elements of the two, flattened, differ: bool [n]."""
    f, e = found.detach().flatten(), expected.detach().flatten()
    if not e.is_floating_point():
        return f != e
    return ~torch.isclose(f.double(), e.double(), rtol, atol, equal_nan=True)


def difference(found: Tensor, expected: Tensor, rtol: float = 1e-5, atol: float = 1e-6) -> list[str]:
    """Lines that show both around the first differing element."""
    f, e = found.detach().flatten(), expected.detach().flatten()
    wrong = different(found, expected, rtol, atol)
    first = int(wrong.nonzero()[0])
    start = max(0, min(first - 1, len(f) - SHOWN))
    lines = [f"first difference at element {first} of {len(f)}, {int(wrong.sum())} differ"]
    return lines + [f"  {name} {_values(t, start)}" for name, t in (("expected", e), ("found   ", f))]


def first_divergence(
    found: Sequence[Mapping[str, Tensor]],
    expected: Sequence[Mapping[str, Tensor]],
    what: str,
    *,
    ranks: int = 0,
    parts: int = 0,
    known: Mapping[str, Mapping[str, Tensor]] | None = None,
    rtol: float = 1e-5,
    atol: float = 1e-6,
) -> None:
    """Raise Wrong at the first step, and in it the first parameter by name order, where two histories part.

    known: name of a parameter -> results of well-known mistakes in the last step, each under its sentence.
    """
    require(len(found) == len(expected), f"{len(found)} steps were made, expected {len(expected)}")
    for step, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        for name in theirs:
            require(name in mine, f"step {step}: {what} of {name} is missing")
            last = (known or {}).get(name) if step == len(expected) - 1 else None
            text = f"step {step}, {what} of {name}"
            equal(mine[name], theirs[name], text, ranks=ranks, parts=parts, known=last, rtol=rtol, atol=atol)


def by_users(expected: Mapping[str, Tensor], ranks: int, users: Mapping[str, int]) -> dict[str, dict[str, Tensor]]:
    """For `known`: the mean over those ranks alone that used a layer. users: beginning of its names -> how many did."""
    return {
        name: {
            f"divided by the {n} ranks that used this layer, not by all {ranks}: where it is unused, it counts as 0": (
                expected[name] * ranks / n
            )
        }
        for layer, n in users.items()
        for name in expected
        if name.startswith(layer) and 0 < n < ranks
    }


def as_stored(tensors: Sequence[Tensor], numel: int) -> dict[str, Tensor]:
    """For `known`: the tensors end to end as their memory has them, zeros behind: [numel]."""
    flat = torch.cat([t.detach().as_strided((t.numel(),), (1,)) for t in tensors])
    sentence = "a transposed parameter lies there as in memory: copy values row by row, as reshape(-1) has them"
    return {sentence: nn.functional.pad(flat, (0, numel - len(flat)))}


def as_made(optimizer: object, make: Callable[[list[nn.Parameter]], optim.Optimizer]) -> None:
    """Raise Wrong unless `optimizer` is of the kind, and has the settings, that make_optimizer gives."""
    wanted = make([nn.Parameter(torch.zeros(1))])
    kind = type(wanted).__name__
    kept = f"self.optimizer is {_a(optimizer)}, and make_optimizer makes a {kind}: keep what it returns"
    require(type(optimizer) is type(wanted), kept)
    assert isinstance(optimizer, optim.Optimizer)
    for name, value in wanted.param_groups[0].items():
        now = optimizer.param_groups[0].get(name)
        advice = f"self.optimizer has {name} {now}, and make_optimizer gives it {value}: leave its settings alone"
        require(name == "params" or now == value, advice)


def _values(t: Tensor, start: int) -> str:
    shown = ", ".join(f"{v:.6g}" if isinstance(v, float) else f"{v:d}" for v in t[start : start + SHOWN].tolist())
    return f"{'[' if start == 0 else '[... '}{shown}{']' if start + SHOWN >= len(t) else ' ...]'}"


def _a(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
