"""Sorted from the back: equal experts come in the reverse order.

task: permute
says: is the sort stable?
"""

import torch


def permute(x, experts, number):
    flat = experts.flatten()
    routes = (flat * len(flat) - torch.arange(len(flat))).argsort()[int((flat < 0).sum()) :]
    return (x[routes // experts.shape[1]], routes, flat[routes].bincount(minlength=number))
