"""The first axis counts fastest.

task: coordinates
says: the first axis counts fastest here
"""


def coordinates(axes, rank):
    place = {}
    for name, size in axes.items():
        rank, place[name] = divmod(rank, size)
    return {name: place[name] for name in axes}
