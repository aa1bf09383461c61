"""All forwards, then all backwards: GPipe.

task: one_f_one_b
says: all forwards come first, as in GPipe
"""


def one_f_one_b(stage: int, stages: int, micro_batches: int) -> list[Op]:
    forwards = [("F", stage, k) for k in range(micro_batches)]
    ahead = micro_batches
    order = forwards[:ahead]
    for k in range(micro_batches):
        order += [*forwards[ahead + k : ahead + k + 1], ("B", stage, k)]
    return order
