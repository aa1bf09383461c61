"""In fp32 .float() is no copy.

task: top_k
says: grad was changed
"""


def top_k(grad, error, k):
    whole = grad.float()
    whole += error
    chosen = whole.abs().argsort(descending=True, stable=True)[:k].sort()[0]
    values = whole[chosen].to(grad.dtype)
    error.copy_(whole)
    error[chosen] -= values.float()
    return (values, chosen.int())
