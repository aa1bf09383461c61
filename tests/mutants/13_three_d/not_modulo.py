"""The outermost coordinate is never taken modulo.

task: coordinates
says: a coordinate beyond its axis
"""


def coordinates(axes, rank):
    place, stride = {}, 1
    for name, size in reversed(axes.items()):
        place[name] = rank // stride
        stride *= size
    return {name: place[name] for name in axes}
