"""The L1 norm.

task: unscale_and_clip
says: it is the sum of magnitudes: an L2 norm is the root of the sum of squares
"""


def unscale_and_clip(grads, scale, limit):
    exact = [g.double() / scale for g in grads]
    norm = sum(float(g.abs().sum()) for g in exact)
    factor = min(1.0, limit / norm) if norm else 1.0
    return [(g * factor).float() for g in exact], norm
