"""Two rounds, which are enough for 4 ranks.

task: tree_broadcast
says: of 5 ranks
"""


def tree_broadcast(group, x, root=0):
    place = (group.rank - root) % group.size
    distance = 1
    while distance < min(group.size, 4):
        if place < distance and place + distance < group.size:
            group.send(x, (place + distance + root) % group.size)
        elif distance <= place < 2 * distance:
            group.recv(x, (place - distance + root) % group.size)
        distance *= 2
