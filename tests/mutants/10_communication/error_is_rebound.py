"""A name is bound anew: the caller keeps the old tensor.

task: top_k
says: it is as before
"""


def top_k(grad, error, k):
    whole = grad.float() + error
    chosen = whole.abs().argsort(descending=True, stable=True)[:k].sort()[0]
    values = whole[chosen].to(grad.dtype)
    error = whole.clone()
    error[chosen] -= values.float()
    return (values, chosen.int())
