"""The answers are saved for backward, which needs none.

task: give_back
says: backward needs no answers
"""

import torch


class _Travel(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, ins, outs, group):
        ctx.ins, ctx.outs, ctx.group, ctx.x = ins, outs, group, x
        got = x.new_empty(sum(outs), x.shape[1])
        group.all_to_all(got, x.contiguous(), out_splits=outs, in_splits=ins)
        return got

    @staticmethod
    def backward(ctx, grad):
        back = grad.new_empty(sum(ctx.ins), grad.shape[1])
        ctx.group.all_to_all(back, grad.contiguous(), out_splits=ctx.ins, in_splits=ctx.outs)
        return back, None, None, None


def give_back(answers, counts, sizes, group):
    outs = counts.view(group.size, -1).sum(1).tolist()
    ins = sizes.sum(1).tolist()
    return _Travel.apply(answers, ins, outs, group)
