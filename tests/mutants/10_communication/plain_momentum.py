"""Momentum without Nesterov.

task: outer_step
says: no Nesterov
"""


def outer_step(params, start, momentum, lr, mu, group):
    for p, begin, m in zip(params, start, momentum, strict=True):
        d = begin - p.float()
        group.all_reduce(d)
        d /= group.size
        m.mul_(mu).add_(d)
        begin.sub_(lr * m)
        p.copy_(begin)
