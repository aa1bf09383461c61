"""The gradient's dtype for the sum with the error.

task: top_k
says: (or the sum before it) was rounded to 16 bits
"""


def top_k(grad, error, k):
    whole = grad + error.to(grad.dtype)
    chosen = whole.abs().sort(descending=True, stable=True).indices[:k].sort().values
    values = whole[chosen]
    error.copy_(whole)
    error[chosen] -= values.float()
    return values, chosen.int()
