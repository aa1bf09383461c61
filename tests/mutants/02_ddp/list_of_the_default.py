"""A list as default argument is made once: the buckets of the call before are in it.

task: assign_buckets
says: is a list kept from the call before?
"""


def assign_buckets(params, limit, buckets=[]):  # noqa: B006
    room = 0
    for p in reversed(params):
        if p.requires_grad:
            if room < p.numel() or not buckets:
                buckets.append([])
                room = limit
            buckets[-1].append(p)
            room -= p.numel()
    return buckets
