"""The mean over tokens is taken in the logits' dtype.

task: balance_loss
says: the softmax is in bf16
"""


def balance_loss(logits, experts, group):
    number = logits.shape[1]
    counts = experts.flatten().bincount(minlength=number)
    group.all_reduce(counts)
    share = counts / counts.sum().clamp(min=1)
    mean = logits.softmax(1).sum(0) / max(len(logits), 1)
    return number * (share * mean).sum()
