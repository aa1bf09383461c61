"""Selective checkpointing: keep the results that are dear to compute and small to keep, compute the rest again.

A policy says of an operation whether its result is kept. In the first run of a checkpointed function a
TorchDispatchMode sees every operation below autograd and keeps what the policy wants; in the second it hands the kept
result out instead of computing, in the same order. What is drawn at random is never kept: the generator, set back, must
draw as often as it did. Fused attention may draw, for its dropout; without dropout it does not, and is kept.

    policy        kept of one GPT block, in units of B T w elements           computed again
    (none)        the input, 1                                                all
    matmuls()     input 1 + qkv 3 + attention 1 + out 1 + up 4 + down 1 = 11  norms, GELU, adds
    plain run     16                                                          nothing

Korthikanti et al. 2022, arXiv:2205.05198, section 5 chooses by hand what torch calls selective checkpointing
(torch/utils/checkpoint.py, `create_selective_checkpoint_contexts`). DeepSpeed has no such policy.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

Policy = Callable[[OpOverload], bool]
Kept = tuple[Any, int]  # a result, and its version then

# Products of matrices, in which nearly all operations of a transformer are, and fused attention.
MATMULS = (
    *("mm", "addmm", "bmm", "baddbmm", "addbmm", "convolution", "_scaled_mm", "_grouped_mm"),
    *("_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu"),
    *("_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention"),
)


def named(*names: str) -> Policy:
    """Keep the results of these operations of torch.ops.aten. ValueError, with the nearest name, for an unknown one."""
    for name in names:
        if not hasattr(torch.ops.aten, name):
            near = get_close_matches(name, dir(torch.ops.aten), n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(f"policy: torch.ops.aten has no operation {name!r}{hint}")
    wanted = frozenset(names)
    return lambda op: op.overloadpacket.__name__ in wanted


def matmuls() -> Policy:
    """Keep the results of matrix products and of fused attention."""
    return named(*(name for name in MATMULS if hasattr(torch.ops.aten, name)))


class Results:
    """Of one checkpointed call: its operations in order, with what the policy keeps of them."""

    def __init__(self, policy: Policy | None) -> None:
        self.policy = policy
        self.calls: list[tuple[OpOverload, Kept | None]] = []

    @contextmanager
    def kept(self) -> Iterator[None]:
        """The first run. The policy is asked here alone, so it may count: every second product, say."""
        if self.policy is None:
            yield
            return
        with _Mode(self._keep):
            yield

    @contextmanager
    def used(self) -> Iterator[None]:
        """The second run. Operations of which nothing is kept may come and go, as a gather of parameters does."""
        if self.policy is None:
            yield
            return
        kinds = {op for op, kept in self.calls if kept is not None}
        calls = iter([call for call in self.calls if call[0] in kinds])
        with _Mode(lambda op, compute, can_keep: _next(op, compute, calls) if op in kinds else compute()):
            yield

    def _keep(self, op: OpOverload, compute: Callable[[], Any], can_keep: Callable[[], bool]) -> Any:
        assert self.policy is not None
        result, kept = compute(), None
        if self.policy(op) and can_keep():
            value = tree_map_only(Tensor, _alias, result)
            kept = value, _version(value)
        self.calls.append((op, kept))
        return result


def _next(op: OpOverload, compute: Callable[[], Any], calls: Iterator[tuple[OpOverload, Kept | None]]) -> Any:
    before, kept = next(calls, (None, None))
    if before is not op:
        raise RuntimeError(
            f"selective checkpointing: the second run asks for {op} where the first had {before or 'ended'}; let the "
            "policy leave out what runs only in one of them"
        )
    if kept is None:
        return compute()
    value, version = kept
    if _version(value) != version:
        raise RuntimeError(
            f"{op}: its kept result was changed in place since; let the policy leave it out, or change a copy"
        )
    return tree_map_only(Tensor, Tensor.detach, value)


def _alias(tensor: Tensor) -> Tensor:
    """The same memory with the same version: below autograd, where modes run, `detach` alone begins a new count."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


def _version(result: Any) -> int:
    """Grows with every change in place of any tensor of `result`."""
    versions: list[int] = []
    tree_map_only(Tensor, lambda t: versions.append(t._version), result)
    return sum(versions)


class _Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Hands each operation to `handle`, with a function that computes it and one that says whether it can be kept."""

    def __init__(self, handle: Callable[[OpOverload, Callable[[], Any], Callable[[], bool]], Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.handle = handle

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        return self.handle(func, lambda: func(*args, **given), lambda: can_keep(func, args, given))


def can_keep(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a kept result can stand for a second run of `op`: it makes tensors, in place of none, by no chance.

    Not `detach`: that is autograd's bookkeeping, of which a second run has more.
    """
    schema = op._schema
    makes = any("Tensor" in str(returned.type) for returned in schema.returns)
    if not makes or schema.is_mutable or op is torch.ops.aten.detach.default:
        return False
    if torch.Tag.nondeterministic_seeded not in op.tags:
        return True
    given = {argument.name: value for argument, value in zip(schema.arguments, args, strict=False)} | dict(kwargs)
    defaults = {argument.name: argument.default_value for argument in schema.arguments}
    return "dropout_p" in defaults and given.get("dropout_p", defaults["dropout_p"]) == 0
