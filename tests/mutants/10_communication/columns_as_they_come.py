"""P is not made orthonormal.

task: power_sgd
says: not orthonormal
"""


def power_sgd(grad, error, q, group):
    whole = grad + error
    p = whole @ q
    group.all_reduce(p)
    p /= group.size
    new = whole.T @ p
    group.all_reduce(new)
    q.copy_(new / group.size)
    mean = p @ q.T
    error.copy_(whole - mean)
    return mean
