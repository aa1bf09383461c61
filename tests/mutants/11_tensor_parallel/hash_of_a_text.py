"""hash() of the place.

task: dropout_seed
says: hash() of a text is another number in each process
"""


def dropout_seed(seed, place, data, tensor, tensor_ranks, sequence):
    own = place == "inside" or sequence
    return seed + hash((place, data, tensor if own else -1)) % 2**60
