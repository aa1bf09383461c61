"""The error is cleared where something was sent, which was rounded.

task: top_k
says: was rounded to 16 bits
"""


def top_k(grad, error, k):
    whole = grad.float() + error
    chosen = whole.abs().argsort(descending=True, stable=True)[:k].sort()[0]
    values = whole[chosen].to(grad.dtype)
    error.copy_(whole)
    error[chosen] = 0
    return (values, chosen.int())
