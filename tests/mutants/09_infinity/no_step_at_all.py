"""Zero steps where the best interval is shorter than half of one.

task: checkpoint_steps
says: 0 steps between two checkpoints
"""


def checkpoint_steps(step, write, between_failures, nodes):
    return round((2 * write * between_failures / nodes) ** 0.5 / step)
