"""The choice does not see the error.

task: top_k
says: the largest of grad alone
"""


def top_k(grad, error, k):
    whole = grad.float() + error
    chosen = grad.float().abs().argsort(descending=True, stable=True)[:k].sort()[0]
    values = whole[chosen].to(grad.dtype)
    error.copy_(whole)
    error[chosen] -= values.float()
    return (values, chosen.int())
