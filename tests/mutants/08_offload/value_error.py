"""What is wrong is told by a ValueError.

task: CheckedBlocks
says: is a ValueError, not an OSError
"""

import zlib


class CheckedBlocks(CheckedBlocks):
    def read(self, k, memory):
        self.disk.read(k * self.size, memory).wait()
        if self.sums.get(k) != zlib.crc32(memory.numpy()):
            raise ValueError(f"block {k} is not what was written there")
