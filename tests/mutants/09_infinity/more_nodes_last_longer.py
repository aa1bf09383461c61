"""Failures become rarer with every node.

task: checkpoint_steps
says: a job on more nodes fails sooner
"""


def checkpoint_steps(step, write, between_failures, nodes):
    return max(1, round((2 * write * between_failures * nodes) ** 0.5 / step))
