"""The sums of sectors are put together by xor.

task: CheckedBlocks
says: block 0 is not what was written, and nobody noticed
"""

import zlib


def xored(memory):
    total = 0
    for at in range(0, len(memory), 512):
        total ^= zlib.crc32(memory[at : at + 512].numpy())
    return total


class CheckedBlocks(CheckedBlocks):
    def write(self, k, memory):
        self.sums[k] = xored(memory)
        self.disk.write(k * self.size, memory).wait()

    def read(self, k, memory):
        self.disk.read(k * self.size, memory).wait()
        if self.sums.get(k) != xored(memory):
            raise OSError(f"block {k} is not what was written there")
