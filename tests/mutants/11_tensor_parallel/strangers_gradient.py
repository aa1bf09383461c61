"""Backward takes 1 off the logit at place 0 on the ranks that have not got the target.

task: vocab_cross_entropy
says: takes 1 off another logit
"""

import torch


def vocab_cross_entropy(
    logits: Tensor,
    targets: Tensor,
    first: int,
    group: Group,
    ignore_index: int = -100,
) -> Tensor:
    class Loss(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, logits: Tensor) -> Tensor:
            top = logits.amax(1).float()
            group.all_reduce(top, op="max")
            z = logits.float() - top.unsqueeze(1)
            counts = targets != ignore_index
            here = counts & (targets >= first) & (targets < first + logits.shape[1])
            place = (targets - first).masked_fill(~here, 0).unsqueeze(1)
            sums = torch.stack([z.gather(1, place).squeeze(1) * here, z.exp_().sum(1)])  # [2, n]
            group.all_reduce(sums)
            target, total = sums
            ctx.save_for_backward(z.div_(total.unsqueeze(1)), place, here, counts)
            ctx.dtype = logits.dtype
            return ((total.log() - target) * counts).sum() / counts.sum().clamp(min=1)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            z, place, _, counts = ctx.saved_tensors
            scale = (grad * counts / counts.sum().clamp(min=1)).unsqueeze(1)  # [n, 1]
            out = z * scale
            out.scatter_add_(1, place, -scale)
            return out.to(ctx.dtype)

    return Loss.apply(logits)
