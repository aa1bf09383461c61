"""The list holds one buffer several times: each message overwrites the one before.

task: ring_all_gather
says: all others are the one that came last: each needs memory of its own
"""


def ring_all_gather(group, x):
    chunks, moving = [x] * group.size, x.clone()
    for step in range(1, group.size):
        arrived = torch.empty_like(x)
        work = group.send(moving, (group.rank + 1) % group.size, async_op=True)
        group.recv(arrived, (group.rank - 1) % group.size)
        work.wait()
        moving.copy_(arrived)
        chunks[(group.rank - step) % group.size] = moving
    return torch.cat(chunks)
