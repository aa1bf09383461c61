"""The sum of the first write is kept for ever.

task: CheckedBlocks
says: is as it was written last, and yet
"""

import zlib


class CheckedBlocks(CheckedBlocks):
    def write(self, k, memory):
        self.sums.setdefault(k, zlib.crc32(memory.numpy()))
        self.disk.write(k * self.size, memory).wait()
