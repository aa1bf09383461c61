"""Of equally good stretches the largest.

task: stretches
says: of equally good ones the smallest is asked
"""


def stretches(layers, saved):
    k = min(range(layers, 0, -1), key=lambda k: -(-layers // k) + k * saved + (k - 1))
    return [(f, min(f + k, layers)) for f in range(0, layers, k)]
