"""The first k of those that reach the k-th largest.

task: top_k
says: all that reach the k-th largest, of which the first k
"""


def top_k(grad, error, k):
    whole = grad.float() + error
    k = min(k, len(whole))
    bar = whole.abs().kthvalue(len(whole) - k + 1).values
    chosen = (whole.abs() >= bar).nonzero().flatten()[:k]
    values = whole[chosen].to(grad.dtype)
    error.copy_(whole)
    error[chosen] -= values.float()
    return values, chosen.int()
