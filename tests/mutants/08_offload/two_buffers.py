"""Two buffers: the read of the next part must wait for the write of the one before.

task: update_parts
says: the write of part 0 was waited for before 1 is updated
"""


def update_parts(disk, places, update):
    buffers = [disk.buffer(max((nbytes for _, nbytes in places), default=0)) for _ in range(2)]
    reading = {}
    writing = {}

    def begin(k):
        if k - 2 in writing:
            writing.pop(k - 2).wait()
        if k < len(places):
            offset, nbytes = places[k]
            reading[k] = disk.read(offset, buffers[k % 2][:nbytes])

    try:
        begin(0)
        for k, (offset, nbytes) in enumerate(places):
            begin(k + 1)
            reading.pop(k).wait()
            memory = buffers[k % 2][:nbytes]
            update(k, memory)
            writing[k] = disk.write(offset, memory)
    finally:
        for transfer in (*reading.values(), *writing.values()):
            transfer.wait()
