"""A caller that stops early leaves a read under way.

task: read_ahead
says: after the caller closed the generator the read of place 2 is still under way
"""


def read_ahead(disk, places):
    buffers = [disk.buffer(max((nbytes for _, nbytes in places), default=0)) for _ in range(2)]
    ways = []
    for k in range(len(places) + 1):
        if k < len(places):
            offset, nbytes = places[k]
            ways.append(disk.read(offset, buffers[k % 2][:nbytes]))
        if k > 0:
            ways[k - 1].wait()
            yield ways[k - 1].memory
