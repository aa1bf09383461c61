"""async_op=True, and wait() in the next line: nobody comes to the recv.

task: ring_reduce_scatter
says: every rank waits for its send, and none has received yet: recv first, then wait()
"""


def ring_reduce_scatter(group, x):
    chunks = x.chunk(group.size)
    mine = chunks[group.rank - 1].clone()
    for step in range(2, group.size + 1):
        group.send(mine, (group.rank + 1) % group.size, async_op=True).wait()
        arrived = torch.empty_like(mine)
        group.recv(arrived, (group.rank - 1) % group.size)
        mine = arrived + chunks[(group.rank - step) % group.size]
    return mine
