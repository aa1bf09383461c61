"""All ranks and places draw alike.

task: dropout_seed
says: the same seed
"""


def dropout_seed(seed, place, data, tensor, tensor_ranks, sequence):
    return seed
