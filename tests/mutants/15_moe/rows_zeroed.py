"""Clears the rows when they have left.

task: dispatch
says: rows was changed: it is an input
"""

_right = dispatch


def dispatch(rows, counts, group):
    found = _right(rows, counts, group)
    rows.detach().zero_()
    return found
