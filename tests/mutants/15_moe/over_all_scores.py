"""The scores of all E are made to sum to 1.

task: biased_gate
says: divided by the sum over all E
"""


def biased_gate(logits, bias, k):
    scores = logits.float().sigmoid()
    experts = (scores + bias).argsort(dim=1, descending=True, stable=True)[:, :k]
    return experts, scores.gather(1, experts) / scores.sum(1, keepdim=True)
