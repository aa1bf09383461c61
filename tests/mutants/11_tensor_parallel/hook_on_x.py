"""A hook on x itself, which sees all of x's gradient.

task: enter
says: x's other use is summed over the ranks too
"""


def enter(x, group):
    x.register_hook(lambda grad: _total(grad, group))
    return x
