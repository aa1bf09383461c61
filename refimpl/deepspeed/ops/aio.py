"""What `AsyncIOBuilder().load()` gives. DeepSpeed: ops/aio/__init__.py, csrc/aio (DeepNVMe)."""

from refimpl.deepspeed.absent import absent
from refimpl.deepspeed.ops.op_builder import ALL_OPS

AsyncIOBuilder = ALL_OPS["async_io"]
aio_handle = absent(
    "AsyncIOBuilder().load().aio_handle",
    'files that a script reads and writes itself; refimpl.offload does it for what "device": "nvme" puts on a disk',
)
