"""Takes ZeRO-2 to hold all gradients first.

task: peak_gradient_bytes
says: that is a whole gradient: the buckets before are freed already
"""


def peak_gradient_bytes(buckets, ranks, itemsize):
    return sum(-(-n // ranks) * ranks for n in buckets) * itemsize
