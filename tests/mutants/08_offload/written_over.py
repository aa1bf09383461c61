"""The next read begins in a buffer whose write is still under way.

task: update_parts
says: is still under way: wait for that first
"""


def update_parts(disk, places, update):
    buffers = [disk.buffer(max((nbytes for _, nbytes in places), default=0)) for _ in range(3)]
    reading = {}
    writing = {}

    def begin(k):
        if k < len(places):
            offset, nbytes = places[k]
            reading[k] = disk.read(offset, buffers[k % 3][:nbytes])

    try:
        begin(0)
        for k, (offset, nbytes) in enumerate(places):
            begin(k + 1)
            reading.pop(k).wait()
            memory = buffers[k % 3][:nbytes]
            update(k, memory)
            writing[k] = disk.write(offset, memory)
    finally:
        for transfer in (*reading.values(), *writing.values()):
            transfer.wait()
