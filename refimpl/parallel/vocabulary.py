"""The vocabulary's layers, cut by rows of the table: the embedding, and a cross entropy without a row of logits.

Embedding. Each rank looks up the tokens that are in its part, gives zeros for the others, and one all-reduce (g) puts
the rows together. Traffic: B T C elements in forward, none in backward.

Cross entropy. The head is a column layer: rank i has the logits of its part of the vocabulary, [n, V/N]. Gathered they
would be n V numbers on every rank, often the largest tensor of the whole step. But the loss of a row needs three
numbers:

    loss = log(sum_v exp(z_v - m)) + m - z_target        m = max_v z_v, so that exp does not overflow

so the ranks exchange a maximum, a sum and the target's logit a row: two all-reduces, of n and 2 n fp32 numbers, in
place of n V. Backward exchanges nothing: d loss / d z_v = exp(z_v - m) / sum - [v is the target], known to the rank
that has v. Memory: the probabilities of its own part, n V/N fp32, kept for backward, in place of the logits.

Tied weights need nothing: embedding and head are cut alike, and each rank's part gets both gradients in full.
Shoeybi et al. 2019, arXiv:1909.08053, section 3. Megatron-LM: megatron/core/tensor_parallel/cross_entropy.py (three
all-reduces of n). torch: torch/distributed/tensor/parallel/loss.py.

    n   rows: B T tokens    V   vocabulary    N   ranks
"""

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from refimpl.comm.group import Group
from refimpl.parallel.conjugates import TAG, reduce
from refimpl.parallel.split import Split
from refimpl.parallel.tensor import Exchange, Parted, refuse_options

Reduction = Literal["mean", "sum", "none"]


class VocabParallelEmbedding(Parted):
    """Each rank has some rows of the table."""

    weight: nn.Parameter

    def __init__(self, plain: nn.Embedding, group: Group, *, leave: Exchange = reduce, name: str = "embedding") -> None:
        """From an `nn.Embedding` that is equal on all ranks. `leave`: what sums the ranks' rows."""
        super().__init__(group)
        refuse_options(plain, name)
        self.split = Split((plain.num_embeddings,), plain.num_embeddings, group.size, name)
        self.leave, self.padding_idx = leave, plain.padding_idx
        (self.span,) = self.split.spans(group.rank)
        self.keep("weight", plain.weight, self.split, 0)

    def forward(self, ids: Tensor) -> Tensor:
        """ids [..] int64 -> [.., C], the same on all ranks. IndexError for a token that is in no rank's part."""
        refuse_beyond("tokens", ids, self.split.whole)
        place, elsewhere = local_place(ids, self.span)
        rows = F.embedding(place, self.weight)  # [.., C]
        if self.padding_idx is not None:  # as in nn.Embedding: looked up, but no gradient
            rows = torch.where((ids == self.padding_idx).unsqueeze(-1), rows.detach(), rows)
        return self.leave(rows.masked_fill(elsewhere.unsqueeze(-1), 0), self.group)


def refuse_beyond(what: str, ids: Tensor, vocab: int) -> None:
    """IndexError for one that is in no rank's part. Nobody looks on a GPU, where the host would have to wait."""
    if ids.device.type == "cpu" and ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < vocab:
        raise IndexError(f"{what} {int(ids.min())} to {int(ids.max())}: the vocabulary is 0 to {vocab - 1}")


def local_place(ids: Tensor, span: slice) -> tuple[Tensor, Tensor]:
    """Each token's place in this rank's part, 0 for those elsewhere; and which those are."""
    elsewhere = (ids < span.start) | (ids >= span.stop)
    return (ids - span.start).masked_fill(elsewhere, 0), elsewhere


class VocabParallelLoss(Parted):
    """F.cross_entropy(logits, targets) of logits whose vocabulary is split over the ranks."""

    def __init__(
        self, vocab: int, group: Group, *, ignore_index: int = -100, reduction: Reduction = "mean", name: str = "loss"
    ) -> None:
        super().__init__(group)
        self.split = Split((vocab,), vocab, group.size, name)
        self.ignore_index, self.reduction = ignore_index, reduction

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """logits [.., V/N], targets [..] int64 -> an fp32 scalar, or [..] for reduction "none"; the same on all.

        IndexError for a target that is in no rank's part, as in torch. ValueError for logits of another part.
        """
        mine = self.split.sizes[self.group.rank]
        if logits.shape[-1] != mine:
            raise ValueError(
                f"logits {tuple(logits.shape)}: rank {self.group.rank} has {mine} of {self.split.whole} tokens"
            )
        (span,) = self.split.spans(self.group.rank)
        counts = targets != self.ignore_index
        refuse_beyond("targets", targets.masked_fill(~counts, 0), self.split.whole)
        losses = parted_cross_entropy(logits, targets, counts, span, self.group)
        if self.reduction == "none":
            return losses
        return losses.sum() if self.reduction == "sum" else losses.sum() / counts.sum()


def parted_cross_entropy(logits: Tensor, targets: Tensor, counts: Tensor, span: slice, group: Group) -> Tensor:
    """logits [.., V/N] of the tokens in `span`, targets [..], counts [..] bool -> losses [..] fp32, 0 where it is not.

    A collective; backward is none, and has no gradient itself (RuntimeError).
    """
    rows = logits.flatten(0, -2), targets.flatten(), counts.flatten()
    losses: Tensor = CrossEntropy.apply(*rows, span, group)  # type: ignore[no-untyped-call]
    return losses.view(targets.shape)


class CrossEntropy(torch.autograd.Function):
    """Each row's loss, 0 where it does not count."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, counts: Tensor, span: slice, group: Group) -> Tensor:
        """logits [n, V/N], targets [n], counts [n] bool -> [n] fp32."""
        top = logits.amax(-1).float()  # [n]
        group.all_reduce(top, "max", tag=TAG)
        z = logits.float() - top.unsqueeze(-1)  # [n, V/N], at most 0
        place, elsewhere = local_place(targets, span)
        place, elsewhere = place.masked_fill(~counts, 0), elsewhere | ~counts
        sums = torch.empty(2, len(z), device=z.device)  # sum of exponentials, the target's logit
        sums[1] = z.gather(1, place.unsqueeze(1)).squeeze(1).masked_fill_(elsewhere, 0)
        sums[0] = z.exp_().sum(-1)
        group.all_reduce(sums, tag=TAG)
        total, target = sums
        ctx.save_for_backward(z.div_(total.unsqueeze(-1)), place, elsewhere, counts)
        ctx.dtype = logits.dtype
        lost: Tensor = (total.log() - target).masked_fill_(~counts, 0)
        return lost

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        probabilities, place, elsewhere, counts = ctx.saved_tensors
        scale = grad.masked_fill(~counts, 0).unsqueeze(1)  # [n, 1]
        z = probabilities * scale
        z.scatter_add_(1, place.unsqueeze(1), -scale.masked_fill(elsewhere.unsqueeze(1), 0))
        return z.to(ctx.dtype), None, None, None, None
