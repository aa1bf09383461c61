"""Every rank draws for itself, where tensors are whole too.

task: dropout_seed
says: or their copies of it drift apart
"""


def dropout_seed(seed, place, data, tensor, tensor_ranks, sequence):
    stream = 1 + tensor if place == "inside" else tensor_ranks + 1 + tensor
    return seed + data * (2 * tensor_ranks + 1) + stream
