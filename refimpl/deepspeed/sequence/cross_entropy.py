"""Each token's loss where ranks share the vocabulary, the sequence, or both, by DeepSpeed's names.

Of a vocabulary's parts three numbers a token travel: see `parallel/vocabulary.py`. Of a sequence's parts every rank has
the losses of all, or their mean, and calls backward on the same number. A token's gradient is what all N ranks ask of
it, N times the mean's; the engine averages over these ranks, and has the gradient of one process. DeepSpeed's functions
ask on a token's own rank alone: its engine adds over a sequence's ranks at stages 0 to 2, and averages at stage 3,
which trains with 1/N of that gradient. DeepSpeed: deepspeed/sequence/cross_entropy.py.
"""

import warnings
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from refimpl.deepspeed.sequence.layer import group_of
from refimpl.parallel.conjugates import gather_sum
from refimpl.parallel.vocabulary import parted_cross_entropy

Bounds = tuple[int, int, int]  # of this rank's part: its first token, the one behind its last; of all: their number


def vocab_parallel_cross_entropy(
    vocab_parallel_logits: Tensor,
    target: Tensor,
    tp_group: ProcessGroup | None = None,
    sp_group: ProcessGroup | None = None,
    vocab_start_index: int | None = None,
    vocab_end_index: int | None = None,
    global_vocab_size: int | None = None,
    ignore_index: int = -100,
    reduction: Literal["mean", "sum", "none"] = "mean",
    gather_sequence_loss: bool = False,
    backend: Literal["torch", "liger"] = "torch",
) -> Tensor:
    """Logits [.., V/N] of this rank's tokens of the vocabulary, targets [..] of all -> the loss, fp32. A collective.

    A scalar over all tokens of `sp_group`'s ranks, or with "none" [..]; with `gather_sequence_loss` of all these ranks,
    joined along the first dimension. None for a group: nobody to share with. Without bounds the parts follow each other
    in the order of the ranks; with `global_vocab_size` too nobody asks the others for theirs.
    ValueError for bounds that leave tokens out, and for targets beyond the vocabulary (on a GPU nobody looks).
    """
    if vocab_parallel_logits.shape[:-1] != target.shape:
        logits = tuple(vocab_parallel_logits.shape)
        raise ValueError(f"logits {logits} of targets {tuple(target.shape)}: all but the last dimension must be alike")
    if reduction not in ("none", "sum", "mean") or backend not in ("torch", "liger"):
        raise ValueError(f"{reduction=}, {backend=}: one of none, sum and mean; torch or liger")
    if gather_sequence_loss and (reduction != "none" or sp_group is None):
        raise ValueError("gather_sequence_loss: needs reduction='none' and an sp_group: a mean is not gathered")
    if backend == "liger":
        warnings.warn("vocab_parallel_cross_entropy: backend='liger': torch's operations are taken", stacklevel=2)
    given = vocab_start_index, vocab_end_index
    bounds = bounds_of(vocab_parallel_logits.shape[-1], tp_group, *given, global_vocab_size)
    each = each_loss(vocab_parallel_logits, target, tp_group, bounds, ignore_index)
    if gather_sequence_loss:
        return gather_sum(each, group_of(sp_group), dim=0)
    return reduced(each, target, ignore_index, reduction, sp_group)


def reduced(each: Tensor, target: Tensor, ignore_index: int, reduction: str, sp_group: ProcessGroup | None) -> Tensor:
    """Losses [..] of this rank's tokens -> as they are, or their sum or mean over `sp_group`'s ranks too."""
    if reduction == "none":
        return each
    total, counts = each.sum(), (target != ignore_index).sum().float()
    if sp_group is not None:
        total = gather_sum(total.view(1), group_of(sp_group), dim=0).sum()
        group_of(sp_group).all_reduce(counts)
    return total if reduction == "sum" else total / counts.clamp(min=1)


def each_loss(
    logits: Tensor, target: Tensor, tp_group: ProcessGroup | None, bounds: Bounds, ignore_index: int
) -> Tensor:
    """Logits [.., V/N], targets [..] -> losses [..] fp32, 0 where the target is `ignore_index`."""
    start, end, vocab = bounds
    counts = target != ignore_index
    if target.is_cpu and bool((counts & ((target < 0) | (target >= vocab))).any()):
        raise ValueError(f"a target is beyond the vocabulary, 0 to {vocab - 1}")
    target = target.long()  # of any integers, to save a loader's memory
    if tp_group is not None:
        return parted_cross_entropy(logits, target, counts, slice(start, end), group_of(tp_group))
    rows, flat = logits.float().flatten(0, -2), target.flatten()
    return F.cross_entropy(rows, flat, ignore_index=ignore_index, reduction="none").view(target.shape)


def bounds_of(
    size: int, tp_group: ProcessGroup | None, start: int | None = None, end: int | None = None, vocab: int | None = None
) -> Bounds:
    """Which part of the vocabulary this rank's `size` logits are, as it was said or as the ranks have them in order.

    A collective, unless `vocab` says how many there are. ValueError, on every rank, for parts that do not join.
    """
    if (start is None) != (end is None) or (start is None and vocab is not None):
        raise ValueError("vocab_start_index, vocab_end_index: both or neither, and both with global_vocab_size")
    if start is not None and end is not None and vocab is not None:
        return start, end, vocab
    said = [(start, end, size)] if tp_group is None else group_of(tp_group).all_gather_object((start, end, size))
    rank, at, mine = 0 if tp_group is None else group_of(tp_group).rank, 0, (0, 0)
    for other, (first, behind, length) in enumerate(said):
        if length < 1 or (first, behind) not in ((None, None), (at, at + length)):
            raise ValueError(
                f"tensor rank {other} has {length} logits, as tokens {first} to {behind}: parts must join, each of one "
                f"token or more, and its begins with {at}"
            )
        mine = (at, at + length) if other == rank else mine
        at += length
    return *mine, at


def vocab_sequence_parallel_cross_entropy(
    vocab_parallel_logits: Tensor,
    target: Tensor,
    sp_group: ProcessGroup | None,
    tp_group: ProcessGroup | None = None,
    vocab_start_index: int | None = None,
    vocab_end_index: int | None = None,
    ignore_index: int = -100,
    reduction: Literal["mean", "sum", "none"] = "none",
    gather_sequence_loss: bool = True,
    backend: Literal["torch", "liger"] = "torch",
) -> Tensor:
    """This rank's logits [T/N, B, V] and targets [T/N, B] -> the losses [T, B] of all tokens, in the logits' dtype.

    `sp_group` None: all ranks; with `tp_group`, where that cannot be, ValueError, and of losses that are not gathered
    nobody. With `tp_group` the logits are [T/N, B, V/M]. See `vocab_parallel_cross_entropy`, whose losses are fp32. A
    collective, backward too.
    """
    if gather_sequence_loss and sp_group is None:
        if tp_group is not None:
            raise ValueError("vocab_sequence_parallel_cross_entropy: give sp_group: not all ranks share the sequence")
        sp_group = torch.distributed.group.WORLD
    given = tp_group, sp_group, vocab_start_index, vocab_end_index, None
    loss = vocab_parallel_cross_entropy(
        vocab_parallel_logits, target, *given, ignore_index, reduction, gather_sequence_loss, backend
    )
    return loss.to(vocab_parallel_logits.dtype) if gather_sequence_loss else loss


class VocabParallelCrossEntropyLoss(nn.Module):
    """`vocab_parallel_cross_entropy` with these arguments."""

    def __init__(
        self,
        tp_group: ProcessGroup | None = None,
        sp_group: ProcessGroup | None = None,
        vocab_start_index: int | None = None,
        vocab_end_index: int | None = None,
        ignore_index: int = -100,
        reduction: Literal["mean", "sum", "none"] = "mean",
        gather_sequence_loss: bool = False,
        backend: Literal["torch", "liger"] = "torch",
    ) -> None:
        super().__init__()
        self.loss = partial(
            vocab_parallel_cross_entropy,
            tp_group=tp_group,
            sp_group=sp_group,
            vocab_start_index=vocab_start_index,
            vocab_end_index=vocab_end_index,
            ignore_index=ignore_index,
            reduction=reduction,
            gather_sequence_loss=gather_sequence_loss,
            backend=backend,
        )

    def forward(self, vocab_parallel_logits: Tensor, target: Tensor) -> Tensor:
        """Logits [.., V/N], targets [..] -> the loss."""
        return self.loss(vocab_parallel_logits, target)


class VocabParallelCausalLMLoss:
    """What transformers calls `model.loss_function`, of logits [B, T, V/N]: a token's target is the next one.

    The parts of the vocabulary are asked for once. `sp_group` only where nothing else adds up a sequence's ranks.
    """

    def __init__(
        self,
        tp_group: ProcessGroup | None = None,
        sp_group: ProcessGroup | None = None,
        vocab_start_index: int | None = None,
        vocab_end_index: int | None = None,
        ignore_index: int = -100,
        backend: Literal["torch", "liger"] = "torch",
    ) -> None:
        self.tp_group, self.sp_group = tp_group, sp_group
        self.vocab_start_index, self.vocab_end_index = vocab_start_index, vocab_end_index
        self.ignore_index, self.backend = ignore_index, backend
        self.bounds: Bounds | None = None

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor | None = None,
        vocab_size: int | None = None,
        shift_labels: Tensor | None = None,
        num_items_in_batch: Tensor | float | None = None,
        **_: Any,
    ) -> Tensor:
        """The mean over the targets, or their sum / num_items_in_batch. `shift_labels` are targets already.

        vocab_size: not needed. ValueError without targets; RuntimeError for logits of another part than before.
        """
        if shift_labels is None:
            if labels is None:
                raise ValueError("VocabParallelCausalLMLoss: give labels, or shift_labels")
            logits, shift_labels = logits[..., :-1, :], labels[..., 1:]
        if self.bounds is None:
            given = self.vocab_start_index, self.vocab_end_index
            self.bounds = bounds_of(logits.shape[-1], self.tp_group, *given)
        if logits.shape[-1] != self.bounds[1] - self.bounds[0]:
            raise RuntimeError(
                f"VocabParallelCausalLMLoss: {logits.shape[-1]} logits, and {self.bounds[1] - self.bounds[0]} at the "
                "first call: make one for each head"
            )
        start, end, vocab = self.bounds
        loss = vocab_parallel_cross_entropy(
            logits,
            shift_labels,
            tp_group=self.tp_group,
            sp_group=self.sp_group,
            vocab_start_index=start,
            vocab_end_index=end,
            global_vocab_size=vocab,
            ignore_index=self.ignore_index,
            reduction="mean" if num_items_in_batch is None else "sum",
            backend=self.backend,
        )
        if num_items_in_batch is None:
            return loss
        return loss / torch.as_tensor(num_items_in_batch, device=loss.device, dtype=loss.dtype).clamp(min=1)
