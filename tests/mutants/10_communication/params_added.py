"""The sum of the ranks' weights is taken for their mean.

task: outer_step
says: the ranks' params were added, not averaged
"""


def outer_step(params, start, momentum, lr, mu, group):
    for p, begin, m in zip(params, start, momentum, strict=True):
        total = p.float().clone()
        group.all_reduce(total)
        d = begin - total
        m.mul_(mu).add_(d)
        begin.sub_(lr * (d + mu * m))
        p.copy_(begin)
