"""Nothing is computed again.

task: checkpoint
says: fn ran only in forward
"""


def checkpoint(fn, *args):
    return fn(*args)
