"""Each sends to its two children in a binary tree: as fast as doubling up to 6 ranks, slower from 7 on.

task: tree_broadcast
says: it takes 4 rounds, expected ceil(log2 7) = 3
"""


def tree_broadcast(group, x, root=0):
    me = (group.rank - root) % group.size
    if me:
        group.recv(x, ((me - 1) // 2 + root) % group.size)
    for child in (2 * me + 1, 2 * me + 2):
        if child < group.size:
            group.send(x, (child + root) % group.size, async_op=True).wait()
