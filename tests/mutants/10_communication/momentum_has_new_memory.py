"""The momentum is given new memory by .data.

task: outer_step
says: momentum[0] lies in other memory now
"""


def outer_step(params, start, momentum, lr, mu, group):
    for p, s, m in zip(params, start, momentum, strict=True):
        mean = p.float().clone()
        group.all_reduce(mean)
        mean /= group.size
        d = s - mean
        m.data = mu * m + d
        s.sub_(lr * (d + mu * m))
        p.copy_(s)
