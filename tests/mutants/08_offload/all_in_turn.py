"""Read, update, write, one after the other.

task: update_parts
says: the read of 1 has not begun: the disk idles meanwhile
"""


def update_parts(disk, places, update):
    memory = disk.buffer(max((nbytes for _, nbytes in places), default=0))
    for k, (offset, nbytes) in enumerate(places):
        disk.read(offset, memory[:nbytes]).wait()
        update(k, memory[:nbytes])
        disk.write(offset, memory[:nbytes]).wait()
