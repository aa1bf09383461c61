"""Divided by the nodes at the end.

task: two_level_all_reduce
says: once too often
"""


def two_level_all_reduce(x, near, far):
    size = -(-len(x) // near.size)
    whole = x.new_zeros(size * near.size)
    whole[: len(x)] = x
    mine = x.new_empty(size)
    near.reduce_scatter(mine, whole)
    far.all_reduce(mine)
    near.all_gather(whole, mine)
    whole /= far.size
    x.copy_(whole[: len(x)])
