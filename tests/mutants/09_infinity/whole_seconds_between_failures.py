"""Divides the seconds between failures by //.

task: checkpoint_steps
says: divide by /, not //
"""


def checkpoint_steps(step, write, between_failures, nodes):
    mtbf = between_failures // nodes
    low = max(1, int((2 * write * mtbf) ** 0.5 / step))
    return min((low, low + 1), key=lambda n: write / (n * step) + n * step / (2 * mtbf))
