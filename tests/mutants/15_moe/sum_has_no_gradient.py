"""The sum that divides is detached.

task: top_k_gate
says: the gradient of the logits: the sum that divides has a gradient too
"""


def top_k_gate(logits, k):
    probs = logits.float().softmax(1)
    experts = probs.argsort(dim=1, descending=True, stable=True)[:, :k]
    weights = probs.gather(1, experts)
    if k > 1:
        weights = weights / weights.sum(1, keepdim=True).detach()
    return (experts, weights)
