"""Halving ends when a millionth is left.

task: balanced
says: is possible
"""


def balanced(weights, stages):
    def cuts(limit):
        bounds, total = [0], 0.0
        for i, w in enumerate(weights):
            if i > bounds[-1] and (total + w > limit or len(weights) - i == stages - len(bounds)):
                bounds.append(i)
                total = 0.0
            total += w
        return [*bounds, len(weights)]

    low, high = max(weights), sum(weights)
    for _ in range(100):
        if high - low > 1e-6:
            middle = (low + high) / 2
            low, high = (low, middle) if len(cuts(middle)) <= stages + 1 else (middle, high)
    return cuts(high)
