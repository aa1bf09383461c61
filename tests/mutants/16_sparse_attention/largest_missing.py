"""The row's largest score is subtracted before exp, and not added to the logarithm again.

task: sparse_forward
says: the largest score was subtracted, and is missing
"""

import torch


def sparse_forward(q, k, v, layout, causal):
    T, D = q.shape
    b = T // len(layout)
    out, lse = torch.zeros(T, D), torch.full((T,), -torch.inf)
    for row, cols in rows_of(layout, causal):
        mine, theirs = torch.arange(row * b, (row + 1) * b), tokens_of(cols, b)
        scores = q[mine] @ k[theirs].T / D**0.5
        if causal:
            scores = scores.masked_fill(theirs > mine[:, None], -torch.inf)
        top = scores.amax(1, keepdim=True).clamp(min=-3e38)
        p = (scores - top).exp()
        total = p.sum(1, keepdim=True)
        out[mine] = p @ v[theirs] / total.clamp(min=1e-30)
        lse[mine] = total.squeeze(1).log()
    return out, lse
