"""torch.topk, which takes any of equal ones.

task: top_k_gate
says: of equally high ones the first is to be taken
"""


def top_k_gate(logits, k):
    probs = logits.float().softmax(1)
    experts = probs.flip(1).topk(k)[1].mul(-1).add(probs.shape[1] - 1)
    weights = probs.gather(1, experts)
    if k > 1:
        weights = weights / weights.sum(1, keepdim=True)
    return (experts, weights)
