"""A softmax, as of all other gates.

task: biased_gate
says: the scores are sigmoids
"""


def biased_gate(logits, bias, k):
    scores = logits.float().softmax(1)
    experts = (scores + bias).argsort(dim=1, descending=True, stable=True)[:, :k]
    weights = scores.gather(1, experts)
    return (experts, weights / weights.sum(1, keepdim=True))
