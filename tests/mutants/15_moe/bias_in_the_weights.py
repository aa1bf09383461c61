"""The weights are what was chosen by.

task: biased_gate
says: the bias is in the weights
"""


def biased_gate(logits, bias, k):
    scores = logits.float().sigmoid()
    experts = (scores + bias).argsort(dim=1, descending=True, stable=True)[:, :k]
    weights = (scores + bias.detach()).gather(1, experts)
    return (experts, weights / weights.sum(1, keepdim=True))
