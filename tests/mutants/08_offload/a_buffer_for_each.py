"""A new buffer for each place.

task: read_ahead
says: expected 2 of
"""


def read_ahead(disk, places):
    ahead = None

    def begin(k):
        if k == len(places):
            return None
        offset, nbytes = places[k]
        return disk.read(offset, disk.buffer(nbytes))

    try:
        ahead = begin(0)
        for k in range(len(places)):
            now, ahead = (ahead, None)
            now.wait()
            ahead = begin(k + 1)
            yield now.memory
    finally:
        if ahead is not None:
            ahead.wait()
