"""Scores with their bias are kept from falling below 0.

task: biased_gate
says: score + bias is cut off at 0
"""


def biased_gate(logits, bias, k):
    scores = logits.float().sigmoid()
    experts = (scores + bias).clamp(min=0).argsort(dim=1, descending=True, stable=True)[:, :k]
    weights = scores.gather(1, experts)
    return experts, weights / weights.sum(1, keepdim=True)
