"""The softmax in the dtype of the logits, and only then fp32.

task: top_k_gate
says: the softmax is in bf16
"""


def top_k_gate(logits, k):
    probs = logits.softmax(1).float()
    experts = probs.argsort(dim=1, descending=True, stable=True)[:, :k]
    weights = probs.gather(1, experts)
    if k > 1:
        weights = weights / weights.sum(1, keepdim=True)
    return (experts, weights)
