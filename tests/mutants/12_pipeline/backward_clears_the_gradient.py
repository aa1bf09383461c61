"""Backward forgets the gradients of the micro-batches before.

task: split_linear
says: what was there before is lost: backward leaves weight.grad alone
"""

_right = split_linear


def split_linear(x, weight, bias, later):
    out = _right(x, weight, bias, later)
    if out.requires_grad:
        out.register_hook(lambda _: [setattr(p, "grad", None) for p in (weight, bias)] and None)
    return out
