"""One seed a place: the heads of all ranks are dropped alike.

task: dropout_seed
says: the same seed for other heads
"""


def dropout_seed(seed, place, data, tensor, tensor_ranks, sequence):
    stream = 1 if place == "inside" else tensor_ranks + 1 + tensor if sequence else 0
    return seed + data * (2 * tensor_ranks + 1) + stream
