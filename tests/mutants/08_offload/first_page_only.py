"""Forgets the neighbours behind the data.

task: write_bytes
says: bytes behind the data have changed
"""

from refimpl.grading.drive import PAGE


def write_bytes(disk, start, data):
    end = start + len(data)
    first, last = (start // PAGE, (end - 1) // PAGE)
    memory = disk.buffer((last + 1 - first) * PAGE)
    covered_in_part = {first} if start % PAGE else set()
    for page in covered_in_part:
        at = (page - first) * PAGE
        disk.read(page * PAGE, memory[at : at + PAGE]).wait()
    memory[start - first * PAGE : end - first * PAGE] = data
    disk.write(first * PAGE, memory).wait()
