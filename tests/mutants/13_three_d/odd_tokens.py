"""A sequence on one rank may have an odd number of tokens.

task: best_layout
says: a ValueError is expected
"""


def best_layout(gpus, node, model, memory, bytes_of, seconds_of):

    def divisors(n):
        return [d for d in range(1, n + 1) if n % d == 0]

    best = None
    for dp in divisors(gpus):
        for pp in divisors(gpus // dp):
            for cp in divisors(gpus // dp // pp):
                tp = gpus // dp // pp // cp
                layout = (dp, pp, cp, tp)
                if (
                    node % tp
                    or model["heads"] % tp
                    or model["layers"] % pp
                    or model["batch"] % dp
                    or (cp > 1 and model["tokens"] % (2 * cp))
                ):
                    continue
                if bytes_of(layout) > memory:
                    continue
                key = (seconds_of(layout), -dp, tp, pp)
                if best is None or key < best[0]:
                    best = (key, layout)
    if best is None:
        raise ValueError("nothing fits")
    return best[1]
