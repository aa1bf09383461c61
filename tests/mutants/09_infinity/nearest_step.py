"""The nearest whole number, which is not always the one that loses less.

task: checkpoint_steps
says: the nearer one is not always the better
"""


def checkpoint_steps(step, write, between_failures, nodes):
    return max(1, round((2 * write * between_failures / nodes) ** 0.5 / step))
