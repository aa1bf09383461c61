"""Keeps a copy of x, which the stage keeps already.

task: split_linear
says: between forward and backward it keeps
"""

_right = split_linear


def split_linear(x, weight, bias, later):
    return _right(x.clone(), weight, bias, later)
