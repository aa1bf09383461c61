"""Forwards ahead are made without a look at how many micro-batches there are.

task: one_f_one_b
says: the micro-batches are 0 to
"""


def one_f_one_b(stage: int, stages: int, micro_batches: int) -> list[Op]:
    ahead = stages - 1 - stage
    order = [("F", stage, k) for k in range(ahead)]
    for k in range(micro_batches):
        order += [("F", stage, ahead + k)] if ahead + k < micro_batches else []
        order += [("B", stage, k)]
    return order
