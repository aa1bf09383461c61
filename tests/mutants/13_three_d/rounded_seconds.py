"""Seconds are rounded to thousandths.

task: best_layout
says: there is a faster one
"""


def best_layout(gpus, node, model, memory, bytes_of, seconds_of):
    found = {}
    for tp in (n for n in range(1, node + 1) if node % n == 0 and model["heads"] % n == 0 and (gpus % n == 0)):
        for pp in (n for n in range(1, model["layers"] + 1) if model["layers"] % n == 0 and gpus // tp % n == 0):
            rest = gpus // tp // pp
            for cp in (n for n in range(1, rest + 1) if rest % n == 0 and model["tokens"] % (2 * n) == 0):
                layout = (rest // cp, pp, cp, tp)
                if model["batch"] % layout[0] == 0 and bytes_of(layout) <= memory:
                    found[round(seconds_of(layout), 3), -layout[0], tp, pp] = layout
    if not found:
        raise ValueError(f"no layout of {gpus} GPUs fits {memory} bytes")
    return found[min(found)]
