"""Stops at the first k that is no better than the one before; the peak has plateaus.

task: stretches
says: the peak is
"""


def stretches(layers, saved):

    def peak(k):
        return -(-layers // k) + k * saved + (k - 1)

    k = 1
    while k < layers and peak(k + 1) < peak(k):
        k += 1
    return [(first, min(first + k, layers)) for first in range(0, layers, k)]
