"""The last micro-batch's backward first, as a stack would.

task: one_f_one_b
says: stands before its own forward
"""


def one_f_one_b(stage: int, stages: int, micro_batches: int) -> list[Op]:
    forwards = [("F", stage, k) for k in range(micro_batches)]
    ahead = stages - 1 - stage
    order = forwards[:ahead]
    for k in range(micro_batches):
        order += [*forwards[ahead + k : ahead + k + 1], ("B", stage, micro_batches - 1 - k)]
    return order
