"""A collective is called, and autograd sees nothing of it.

task: leave
says: has no gradient to pass on
"""


def leave(x, group):
    return _total(x.detach(), group)
