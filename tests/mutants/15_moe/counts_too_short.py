"""bincount without minlength: experts at the end are missing.

task: permute
says: the counts
"""


def permute(x, experts, number):
    flat = experts.flatten()
    routes = flat.argsort(stable=True)[int((flat < 0).sum()) :]
    return (x[routes // experts.shape[1]], routes, flat[routes].bincount())
