"""The formula of a slow link for every link.

task: best_buckets
says: holds where the link is slower
"""


def best_buckets(nbytes, backward, alpha, beta, most):

    def exposed(number):
        done = 0.0
        for i in range(1, number + 1):
            done = max(done, backward * i / number) + alpha + beta * nbytes / number
        return done - backward

    best = max(1, min(most, round((backward / alpha) ** 0.5))) if alpha else most
    return (best, exposed(best))
