"""The next read is waited for before this place is handed out.

task: read_ahead
says: place 1 was waited for before place 0 was handed out
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
            if ahead is not None:
                ahead.wait()
            yield now.memory
    finally:
        if ahead is not None:
            ahead.wait()
