"""Rows are taken from an fp32 copy.

task: permute
says: the rows
"""

import torch


def permute(x, experts, number):
    flat = experts.flatten()
    order = torch.argsort(flat, stable=True)
    routes = order[flat[order] >= 0]
    counts = torch.bincount(flat[flat >= 0], minlength=number)
    return (x.float()[routes // experts.shape[1]].to(x.dtype), routes, counts)
