"""Every rank gets all rows, and takes those of its experts.

task: dispatch
says: all_gather, which goes to ranks that have not got the expert
"""

import torch


def dispatch(rows, counts, group):
    sizes = torch.empty(group.size, len(counts) // group.size, dtype=torch.int64)
    group.all_to_all(sizes, counts.contiguous())
    every = torch.empty(group.size, len(counts), dtype=torch.int64)
    group.all_gather(every, counts.contiguous())
    totals = every.sum(1).tolist()
    most = max(totals)
    each = len(counts) // group.size
    before = [int(row[: group.rank * each].sum()) for row in every]
    mine = [int(row[group.rank * each : (group.rank + 1) * each].sum()) for row in every]

    class Everywhere(torch.autograd.Function):
        @staticmethod
        def forward(ctx, rows):
            padded = rows.new_zeros(most, rows.shape[1])
            padded[: len(rows)] = rows
            whole = rows.new_empty(group.size, most, rows.shape[1])
            group.all_gather(whole, padded)
            return torch.cat([w[b : b + n] for w, b, n in zip(whole, before, mine, strict=True)])

        @staticmethod
        def backward(ctx, grad):
            whole = grad.new_zeros(group.size, most, grad.shape[1])
            for w, b, g in zip(whole, before, grad.split(mine), strict=True):
                w[b : b + len(g)] = g
            out = grad.new_empty(most, grad.shape[1])
            group.reduce_scatter(out, whole)
            return out[: totals[group.rank]]

    return Everywhere.apply(rows), sizes
