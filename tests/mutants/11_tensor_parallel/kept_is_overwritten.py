"""Backward makes its gradient in the memory of what was kept, so a second backward begins from the first's.

task: vocab_cross_entropy
says: the second backward gives another gradient
"""

import torch


def vocab_cross_entropy(logits, targets, first, group, ignore_index=-100):
    class Loss(torch.autograd.Function):
        @staticmethod
        def forward(ctx, logits):
            top = logits.amax(1).float()
            group.all_reduce(top, op="max")
            z = logits.float() - top.unsqueeze(1)
            counts = targets != ignore_index
            here = counts & (targets >= first) & (targets < first + logits.shape[1])
            place = (targets - first).masked_fill(~here, 0).unsqueeze(1)
            sums = torch.stack([z.gather(1, place).squeeze(1) * here, z.exp_().sum(1)])
            group.all_reduce(sums)
            target, total = sums
            ctx.p, ctx.rest, ctx.dtype = z.div_(total.unsqueeze(1)), (place, here, counts), logits.dtype
            return ((total.log() - target) * counts).sum() / counts.sum().clamp(min=1)

        @staticmethod
        def backward(ctx, grad):
            place, here, counts = ctx.rest
            scale = (grad * counts / counts.sum().clamp(min=1)).unsqueeze(1)
            return ctx.p.mul_(scale).scatter_add_(1, place, -scale * here.unsqueeze(1)).to(ctx.dtype)

    return Loss.apply(logits)
