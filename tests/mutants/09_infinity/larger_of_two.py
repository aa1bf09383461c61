"""Of two numbers that are equally good the larger one is taken.

task: checkpoint_steps
says: the smaller one is asked
"""


def checkpoint_steps(step, write, between_failures, nodes):
    best = (2 * write * between_failures / nodes) ** 0.5 / step
    low = max(1, int(best))

    def lost(steps):
        return write / (steps * step) + steps * step * nodes / (2 * between_failures)

    return min((low + 1, low), key=lost)
