"""A replica's seeds begin a thousand after those of the one before.

task: dropout_seed
says: 600 tensor ranks
"""


def dropout_seed(seed, place, data, tensor, tensor_ranks, sequence):
    stream = 1 + tensor if place == "inside" else tensor_ranks + 1 + tensor if sequence else 0
    return seed + data * 1000 + stream
