"""Data is put into a buffer that is still being read into.

task: write_bytes
says: were being read into it
"""

from refimpl.grading.drive import PAGE


def write_bytes(disk, start, data):
    end = start + len(data)
    first, last = (start // PAGE, (end - 1) // PAGE)
    memory = disk.buffer((last + 1 - first) * PAGE)
    covered_in_part = {first} if start % PAGE else set()
    covered_in_part |= {last} if end % PAGE else set()
    ways = []
    for page in covered_in_part:
        at = (page - first) * PAGE
        ways.append(disk.read(page * PAGE, memory[at : at + PAGE]))
    memory[start - first * PAGE : end - first * PAGE] = data
    for way in ways:
        way.wait()
    disk.write(first * PAGE, memory).wait()
