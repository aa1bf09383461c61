"""The tree is right, but it always starts at rank 0.

task: tree_broadcast
says: it is the x of rank 0, not of the root
"""


def tree_broadcast(group, x, root=0):
    distance = 1
    while distance < group.size:
        if group.rank < distance and group.rank + distance < group.size:
            group.send(x, group.rank + distance)
        elif distance <= group.rank < 2 * distance:
            group.recv(x, group.rank - distance)
        distance *= 2
