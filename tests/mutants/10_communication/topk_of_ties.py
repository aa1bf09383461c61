"""torch.topk takes any of equally large ones, in order of size.

task: top_k
says: ascending
"""


def top_k(grad, error, k):
    whole = grad.float() + error
    chosen = whole.abs().argsort(descending=True, stable=True)[:k]
    values = whole[chosen].to(grad.dtype)
    error.copy_(whole)
    error[chosen] -= values.float()
    return (values, chosen.int())
