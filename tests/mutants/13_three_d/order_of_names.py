"""The names come out last first.

task: coordinates
says: the axes are in another order than in `axes`
"""


def coordinates(axes, rank):
    place = {}
    for name, size in reversed(axes.items()):
        rank, place[name] = divmod(rank, size)
    return place
