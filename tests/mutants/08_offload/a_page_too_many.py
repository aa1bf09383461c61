"""The page behind data that ends where a page ends is written as well.

task: write_bytes
says: pages written: 0 to 1, expected 0, once
"""

from refimpl.grading.drive import PAGE


def write_bytes(disk, start, data):
    end = start + len(data)
    first, last = (start // PAGE, end // PAGE)
    memory = disk.buffer((last + 1 - first) * PAGE)
    covered_in_part = {first} if start % PAGE else set()
    covered_in_part |= {last}
    for page in covered_in_part:
        at = (page - first) * PAGE
        disk.read(page * PAGE, memory[at : at + PAGE]).wait()
    memory[start - first * PAGE : end - first * PAGE] = data
    disk.write(first * PAGE, memory).wait()
