"""The gradients are scaled once more, not unscaled.

task: unscale_and_clip
says: it is multiplied by the scale
"""


def unscale_and_clip(grads, scale, limit):
    exact = [g.double() * scale for g in grads]
    norm = sum(float(g.square().sum()) for g in exact) ** 0.5
    factor = min(1.0, limit / norm) if norm else 1.0
    return [(g * factor).float() for g in exact], norm
