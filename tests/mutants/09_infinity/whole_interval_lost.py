"""As if a failure lost a whole interval.

task: checkpoint_steps
says: the formula's 2 is missing
"""


def checkpoint_steps(step, write, between_failures, nodes):
    return max(1, round((write * between_failures / nodes) ** 0.5 / step))
