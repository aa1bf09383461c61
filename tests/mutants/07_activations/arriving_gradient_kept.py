"""Keeps the gradient that arrived on ctx.

task: checkpoint
says: bytes stay alive after backward
"""

import torch

_right = checkpoint


def checkpoint(fn, *args):
    out, held = _right(fn, *args), []
    if not isinstance(out, torch.Tensor):
        return out
    out.register_hook(held.append)
    return out
