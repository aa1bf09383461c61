"""All-reduced inside, then across.

task: two_level_all_reduce
says: every rank has all of it to send across
"""


def two_level_all_reduce(x, near, far):
    near.all_reduce(x)
    far.all_reduce(x)
