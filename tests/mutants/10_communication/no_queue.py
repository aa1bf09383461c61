"""Every bucket starts when it is full.

task: best_buckets
says: until the one before has arrived
"""


def best_buckets(nbytes, backward, alpha, beta, most):

    def exposed(number):
        done = 0.0
        for i in range(1, number + 1):
            done = backward * i / number + alpha + beta * nbytes / number
        return done - backward

    best = min(range(1, most + 1), key=exposed)
    return (best, exposed(best))
