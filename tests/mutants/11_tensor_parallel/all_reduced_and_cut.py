"""The whole gradient is summed on every rank: twice the bytes.

task: gather_tokens
says: uses all_reduce, expected only reduce_scatter
"""


def gather_tokens(x, group):
    return _exchange(x, group, _all_tokens, lambda grad, group: _total(grad, group).chunk(group.size, 1)[group.rank])
