"""What is counted is the argmax, not the choices.

task: balance_loss
says: counts each token's likeliest expert
"""

import torch


def balance_loss(logits, experts, group):
    number = logits.shape[1]
    counts = torch.bincount(logits.argmax(1), minlength=number)
    group.all_reduce(counts)
    shares = counts / counts.sum().clamp(min=1)
    return number * (shares * logits.float().softmax(1).sum(0) / max(len(logits), 1)).sum()
