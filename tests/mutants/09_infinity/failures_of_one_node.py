"""The time between two failures of one node, where a job on many is meant.

task: checkpoint_steps
says: the failures of one node were taken for those of the job
"""


def checkpoint_steps(step, write, between_failures, nodes):
    return max(1, round((2 * write * between_failures) ** 0.5 / step))
