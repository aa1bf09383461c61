"""Only the first and the last 512 bytes are summed.

task: CheckedBlocks
says: of 1000 changed bits go unnoticed
"""

import zlib


class CheckedBlocks(CheckedBlocks):
    def write(self, k, memory):
        self.sums[k] = (zlib.crc32(memory.numpy()[:512]), zlib.crc32(memory.numpy()[-512:]))
        self.disk.write(k * self.size, memory).wait()

    def read(self, k, memory):
        self.disk.read(k * self.size, memory).wait()
        if self.sums.get(k) != (zlib.crc32(memory.numpy()[:512]), zlib.crc32(memory.numpy()[-512:])):
            raise OSError(f"block {k} is not what was written there")
