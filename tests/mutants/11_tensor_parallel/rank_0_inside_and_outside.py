"""Inside, rank 0 draws what it has drawn outside.

task: dropout_seed
says: the same seed at two places
"""


def dropout_seed(seed, place, data, tensor, tensor_ranks, sequence):
    stream = tensor if place == "inside" else tensor_ranks + 1 + tensor if sequence else 0
    return seed + data * (2 * tensor_ranks + 1) + stream
