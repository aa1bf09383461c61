"""data and tensor are added: (0, 1) draws as (1, 0) does.

task: dropout_seed
says: the same seed for other samples
"""


def dropout_seed(seed, place, data, tensor, tensor_ranks, sequence):
    own = place == "inside" or sequence
    return seed + 100 * (place == "inside") + data + (tensor if own else 0)
