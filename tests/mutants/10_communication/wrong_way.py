"""Away from where the ranks went.

task: outer_step
says: the sign
"""


def outer_step(params, start, momentum, lr, mu, group):
    for p, begin, m in zip(params, start, momentum, strict=True):
        d = p.float() - begin
        group.all_reduce(d)
        d /= group.size
        m.mul_(mu).add_(d)
        begin.sub_(lr * (d + mu * m))
        p.copy_(begin)
