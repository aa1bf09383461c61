"""Whole pages are written, and what stood beside the data is not read first.

task: write_bytes
says: read the page that it covers in part first
"""

from refimpl.grading.drive import PAGE


def write_bytes(disk, start, data):
    end = start + len(data)
    first, last = (start // PAGE, (end - 1) // PAGE)
    memory = disk.buffer((last + 1 - first) * PAGE)
    memory[start - first * PAGE : end - first * PAGE] = data
    disk.write(first * PAGE, memory).wait()
