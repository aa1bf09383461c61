"""Each write is waited for before the next part is updated.

task: update_parts
says: the write of part 0 was waited for before 1 is updated
"""


def update_parts(disk, places, update):
    buffers = [disk.buffer(max((nbytes for _, nbytes in places), default=0)) for _ in range(3)]
    reading = {}
    writing = {}

    def begin(k):
        if k - 3 in writing:
            writing.pop(k - 3).wait()
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
            disk.write(offset, memory).wait()
    finally:
        for transfer in (*reading.values(), *writing.values()):
            transfer.wait()
