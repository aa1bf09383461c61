"""Counts what all stretches keep, not the one that runs again.

task: stretches
says: stretches of 1, expected
"""


def stretches(layers, saved):

    def peak(k):
        return -(-layers // k) + layers * saved + k * layers + (k - 1)

    k = min(range(1, layers + 1), key=peak)
    return [(first, min(first + k, layers)) for first in range(0, layers, k)]
