"""The weights are averaged in their own dtype.

task: outer_step
says: it is fp32
"""


def outer_step(params, start, momentum, lr, mu, group):
    for p, begin, m in zip(params, start, momentum, strict=True):
        total = p.clone()
        group.all_reduce(total)
        d = begin - total.float() / group.size
        m.mul_(mu).add_(d)
        begin.sub_(lr * (d + mu * m))
        p.copy_(begin)
