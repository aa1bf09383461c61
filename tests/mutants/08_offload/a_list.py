"""A list of all places, read before the first is used.

task: read_ahead
says: expected a generator
"""


def read_ahead(disk, places):
    found = []
    for offset, nbytes in places:
        memory = disk.buffer(nbytes)
        disk.read(offset, memory).wait()
        found.append(memory)
    return found
