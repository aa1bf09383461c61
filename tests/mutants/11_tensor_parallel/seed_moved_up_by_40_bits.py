"""The seed is moved up to make room for the ranks' numbers, and a large one leaves the range of generators.

task: dropout_seed
says: expected at least the 4294967295 given, and less than 2**63
"""


def dropout_seed(seed, place, data, tensor, tensor_ranks, sequence):
    stream = 1 + tensor if place == "inside" else tensor_ranks + 1 + tensor if sequence else 0
    return seed * 2**40 + data * (2 * tensor_ranks + 1) + stream
