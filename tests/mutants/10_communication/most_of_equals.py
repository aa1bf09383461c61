"""Searched from above: of equally good numbers the largest, with the most messages.

task: best_buckets
says: the smallest is asked
"""


def best_buckets(nbytes, backward, alpha, beta, most):
    def exposed(number):
        done = 0.0
        for i in range(1, number + 1):
            done = max(done, backward * i / number) + alpha + beta * nbytes / number
        return done - backward

    best = min(range(most, 0, -1), key=exposed)
    return best, exposed(best)
