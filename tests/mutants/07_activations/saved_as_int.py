"""What a layer keeps is rounded to whole inputs.

task: stretches
says: the peak is
"""


def stretches(layers, saved):

    def peak(k):
        return -(-layers // k) + k * int(saved) + (k - 1)

    k = min(range(1, layers + 1), key=peak)
    return [(first, min(first + k, layers)) for first in range(0, layers, k)]
