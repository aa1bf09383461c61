"""The share of the routes of this rank.

task: balance_loss
says: f is of this rank's tokens alone
"""


def balance_loss(logits, experts, group):
    number = logits.shape[1]
    counts = experts.flatten().bincount(minlength=number)
    share = counts / counts.sum().clamp(min=1)
    mean = logits.float().softmax(1).sum(0) / max(len(logits), 1)
    return number * (share * mean).sum()
