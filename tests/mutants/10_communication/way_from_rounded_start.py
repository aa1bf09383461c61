"""The way begins at what start is in 16 bits.

task: outer_step
says: start was rounded to the params' dtype first
"""


def outer_step(params, start, momentum, lr, mu, group):
    for p, begin, m in zip(params, start, momentum, strict=True):
        d = (begin.to(p.dtype) - p).float()
        group.all_reduce(d)
        d /= group.size
        m.mul_(mu).add_(d)
        begin.sub_(lr * (d + mu * m))
        p.copy_(begin)
