"""torch.topk, which takes any of equal ones.

task: biased_gate
says: of equally high ones the first is to be taken
"""


def biased_gate(logits, bias, k):
    scores = logits.float().sigmoid()
    experts = (scores + bias).topk(k, dim=1)[1]
    weights = scores.gather(1, experts)
    return (experts, weights / weights.sum(1, keepdim=True))
