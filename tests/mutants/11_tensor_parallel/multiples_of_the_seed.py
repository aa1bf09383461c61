"""A replica multiplies the seed: of a seed of 0 all replicas have the same.

task: dropout_seed
says: the same seed for other samples
"""


def dropout_seed(seed, place, data, tensor, tensor_ranks, sequence):
    stream = 1 + tensor if place == "inside" else tensor_ranks + 1 + tensor if sequence else 0
    return seed * (1 + data) * 1000003 + stream
