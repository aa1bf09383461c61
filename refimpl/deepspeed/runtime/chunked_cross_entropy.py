"""The loss of a large vocabulary without its logits in fp32: some rows at a time, by DeepSpeed's names.

Of M rows of V logits in b bytes, F.cross_entropy(logits.float(), target) has the wide logits, the log-softmax that it
keeps, and their gradients: 4 M V bytes each, three at once in backward. Here a block of rows is made wide, its loss is
taken, and the rest forgotten: a block is a checkpoint, which runs again in backward. What is left are the logits as
they came and their gradient, in their dtype: M V b, and as much while autograd joins the blocks' gradients. On a GPU it
is one kernel, which makes the gradient in forward: see `refimpl.kernels.cross_entropy`.
DeepSpeed: deepspeed/runtime/chunked_cross_entropy.py, which keeps a log-sum-exp a row, and has no second derivative.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from refimpl.deepspeed.runtime.sequence_parallel.tiled import again

Backend = Literal["auto", "triton", "torch"]
BACKENDS = ("auto", "triton", "torch")
BLOCK = 1 << 26  # fp32 numbers of a block: 256 MB


def chunked_cross_entropy(
    logits: Tensor,
    target: Tensor,
    ignore_index: int = -100,
    reduction: Literal["mean", "sum", "none"] = "mean",
    block_rows: int | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Logits [M, V], target [M] int64 -> F.cross_entropy(logits.float(), target), with "none" [M]. NaN: a mean of none.

    block_rows: rows made wide at a time, by torch's operators. "auto" takes the kernel where it runs; "triton"
    elsewhere is a RuntimeError. ValueError for shapes and words that do not fit.
    """
    if logits.dim() != 2 or target.shape != logits.shape[:1]:
        raise ValueError(f"logits must be [M, V] and target [M], not {list(logits.shape)} and {list(target.shape)}")
    if reduction not in ("none", "sum", "mean"):
        raise ValueError(f"{reduction=}: one of none, sum and mean")
    kernel = None if refused(block_rows, backend) == "torch" else kernel_for(logits)
    if kernel is not None:
        return kernel(logits, target, ignore_index, reduction)
    if backend == "triton":
        raise RuntimeError('backend="triton": these logits are on no GPU that has Triton; leave it out, or say "torch"')
    rows = block_rows or max(1, BLOCK // max(1, logits.shape[1]))
    blocks = zip(torch.split(logits, rows), torch.split(target, rows), strict=True)
    each = torch.cat([again(wide_loss, block, aims, ignore_index) for block, aims in blocks])
    if reduction == "none":
        return each
    return each.sum() if reduction == "sum" else each.sum() / (target != ignore_index).sum()


def kernel_for(logits: Tensor) -> Callable[..., Tensor] | None:
    """The kernel, where it runs; a CPU has no use for its import."""
    if not logits.is_cuda:
        return None
    from refimpl.kernels.cross_entropy import cross_entropy
    from refimpl.kernels.language import takes

    return cross_entropy if takes(logits) else None


def wide_loss(logits: Tensor, target: Tensor, ignore_index: int) -> Tensor:
    """Of each row, in fp32."""
    return F.cross_entropy(logits.float(), target, ignore_index=ignore_index, reduction="none")


def refused(block_rows: int | None, backend: Backend) -> Backend:
    """The backend, if both can be; ValueError otherwise."""
    if backend not in BACKENDS:
        raise ValueError(f"{backend=}: one of {', '.join(BACKENDS)}")
    if block_rows is not None and (not isinstance(block_rows, int) or block_rows < 1):
        raise ValueError(f"{block_rows=}: must be at least 1, or None")
    return backend


class ChunkedCausalLMLoss:
    """transformers' `ForCausalLMLoss`, of which a token's target is the next one, by `chunked_cross_entropy`."""

    def __init__(self, block_rows: int | None = None, backend: Backend = "auto") -> None:
        self.block_rows, self.backend = block_rows, refused(block_rows, backend)

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor | None,
        vocab_size: int,
        num_items_in_batch: Tensor | float | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        """Logits [.., T, V], labels [.., T] -> the mean over the targets, or their sum / num_items_in_batch.

        `shift_labels` are targets already.
        """
        if shift_labels is None:
            if labels is None:
                raise ValueError("ChunkedCausalLMLoss: give labels, or shift_labels")
            shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        rows, aims = logits.reshape(-1, vocab_size), shift_labels.reshape(-1).to(logits.device)
        many = num_items_in_batch is not None
        loss = chunked_cross_entropy(rows, aims, ignore_index, "sum" if many else "mean", self.block_rows, self.backend)
        return loss / torch.as_tensor(num_items_in_batch, device=loss.device) if many else loss


def install_chunked_causal_lm_loss(
    model: Any, block_rows: int | None = None, backend: Backend = "auto"
) -> ChunkedCausalLMLoss:
    """Let a transformers model take its loss so. ValueError where its `loss_function` is another, or cannot be set."""
    own = getattr(model, "loss_function", None)
    if own is not import_module("transformers.loss.loss_utils").ForCausalLMLoss:
        raise ValueError(
            f"{type(model).__name__}.loss_function is {own!r}, not transformers' ForCausalLMLoss: leave it"
        )
    loss = ChunkedCausalLMLoss(block_rows, backend)
    try:
        model.loss_function = loss
    except (AttributeError, TypeError) as error:
        raise ValueError(f"{type(model).__name__}.loss_function cannot be set") from error
    return loss
