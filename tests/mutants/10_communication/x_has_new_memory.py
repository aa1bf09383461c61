"""x is given the buffer's memory.

task: two_level_all_reduce
says: x lies in other memory now
"""


def two_level_all_reduce(x, near, far):
    P, n = (near.size, x.numel())
    s = -(-n // P)
    buf = x.new_zeros(s * P)
    buf[:n] = x
    mine = x.new_empty(s)
    near.reduce_scatter(mine, buf)
    far.all_reduce(mine)
    near.all_gather(buf, mine)
    x.data = buf[:n]
