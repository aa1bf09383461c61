"""The turns end with the last forward, and so do the backwards.

task: one_f_one_b
says: is missing
"""


def one_f_one_b(stage: int, stages: int, micro_batches: int) -> list[Op]:
    forwards = [("F", stage, k) for k in range(micro_batches)]
    ahead = stages - 1 - stage
    order = forwards[:ahead]
    for k in range(max(0, micro_batches - ahead)):
        order += [*forwards[ahead + k : ahead + k + 1], ("B", stage, k)]
    return order
