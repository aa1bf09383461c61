"""Sequence parallelism makes no difference.

task: dropout_seed
says: the same seed for other tokens
"""


def dropout_seed(seed, place, data, tensor, tensor_ranks, sequence):
    stream = 1 + tensor if place == "inside" else 0
    return seed + data * (2 * tensor_ranks + 1) + stream
