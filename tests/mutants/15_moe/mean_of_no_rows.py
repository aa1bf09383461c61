"""The mean over tokens, of which there may be none.

task: balance_loss
says: 0/0 is not a number
"""


def balance_loss(logits, experts, group):
    number = logits.shape[1]
    counts = experts.flatten().bincount(minlength=number)
    group.all_reduce(counts)
    share = counts / counts.sum().clamp(min=1)
    mean = logits.float().softmax(1).mean(0)
    return number * (share * mean).sum()
