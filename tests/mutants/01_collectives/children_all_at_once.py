"""All children are sent to at once, and waited for at the end.

task: tree_broadcast
says: sends under way at once
"""


def tree_broadcast(group, x, root=0):
    place = (group.rank - root) % group.size
    distance, works = 1, []
    while distance < group.size:
        if place < distance and place + distance < group.size:
            works.append(group.send(x, (place + distance + root) % group.size, async_op=True))
        elif distance <= place < 2 * distance:
            group.recv(x, (place - distance + root) % group.size)
        distance *= 2
    for work in works:
        work.wait()
