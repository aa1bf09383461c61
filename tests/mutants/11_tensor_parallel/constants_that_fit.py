"""100 ranks are the most that there is room for.

task: dropout_seed
says: the same seed
"""


def dropout_seed(seed, place, data, tensor, tensor_ranks, sequence):
    if place == "inside":
        return seed + 1000 * data + 1 + tensor
    return seed + 1000 * data + (101 + tensor if sequence else 0)
