"""Each rank subtracts its own maximum, and adds its own to the logarithm of all.

task: vocab_cross_entropy
says: and adds that again: the ranks need one and the same
"""

import torch


def vocab_cross_entropy(logits, targets, first, group, ignore_index=-100):

    class Loss(torch.autograd.Function):
        @staticmethod
        def forward(ctx, logits):
            top = logits.amax(1).float()
            z = logits.float() - top.unsqueeze(1)
            counts = targets != ignore_index
            here = counts & (targets >= first) & (targets < first + logits.shape[1])
            place = (targets - first).masked_fill(~here, 0).unsqueeze(1)
            sums = torch.stack([logits.float().gather(1, place).squeeze(1) * here, z.exp_().sum(1)])
            group.all_reduce(sums)
            target, total = sums
            ctx.save_for_backward(z.div_(total.unsqueeze(1)), place, here, counts)
            ctx.dtype = logits.dtype
            return ((total.log() + top - target) * counts).sum() / counts.sum().clamp(min=1)

        @staticmethod
        def backward(ctx, grad):
            z, place, here, counts = ctx.saved_tensors
            scale = (grad * counts / counts.sum().clamp(min=1)).unsqueeze(1)
            out = z * scale
            out.scatter_add_(1, place, -scale * here.unsqueeze(1))
            return out.to(ctx.dtype)

    return Loss.apply(logits)
