"""As many forwards ahead as there are stages from here on, this one too.

task: one_f_one_b
says: too many forwards run ahead
"""


def one_f_one_b(stage: int, stages: int, micro_batches: int) -> list[Op]:
    forwards = [("F", stage, k) for k in range(micro_batches)]
    ahead = stages - stage
    order = forwards[:ahead]
    for k in range(micro_batches):
        order += [*forwards[ahead + k : ahead + k + 1], ("B", stage, k)]
    return order
