"""Each read begins when the one before has been used.

task: read_ahead
says: while place 0 is used nothing is read
"""


def read_ahead(disk, places):
    memory = disk.buffer(max((nbytes for _, nbytes in places), default=0))
    for offset, nbytes in places:
        disk.read(offset, memory[:nbytes]).wait()
        yield memory[:nbytes]
