"""Chosen by magnitude in the gradient's dtype, in which different sums are equal.

task: top_k
says: compared after they were rounded
"""


def top_k(grad, error, k):
    whole = grad.float() + error
    chosen = whole.to(grad.dtype).abs().argsort(descending=True, stable=True)[:k].sort()[0]
    values = whole[chosen].to(grad.dtype)
    error.copy_(whole)
    error[chosen] -= values.float()
    return (values, chosen.int())
