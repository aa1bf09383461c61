"""An error of a write that is waited for within the loop is swallowed.

task: update_parts
says: a transfer failed, and nobody was told
"""

from contextlib import ExitStack, suppress


def update_parts(disk, places, update):
    buffers = [disk.buffer(max((nbytes for _, nbytes in places), default=0)) for _ in range(3)]
    reading = {}
    writing = {}

    def begin(k):
        if k - 3 in writing:
            with suppress(OSError):
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
            writing[k] = disk.write(offset, memory)
    finally:
        with ExitStack() as last:
            for transfer in (*reading.values(), *writing.values()):
                last.callback(transfer.wait)
