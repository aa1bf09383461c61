"""How ranks meet, by DeepSpeed's names. DeepSpeed: deepspeed/constants.py."""

from refimpl.deepspeed.comm import default_pg_timeout

__all__ = ["CROSS_RANK", "CROSS_SIZE", "LOCAL_RANK", "TORCH_DISTRIBUTED_DEFAULT_PORT", "default_pg_timeout"]

TORCH_DISTRIBUTED_DEFAULT_PORT = 29500
CROSS_RANK, CROSS_SIZE, LOCAL_RANK = "CROSS_RANK", "CROSS_SIZE", "LOCAL_RANK"  # of the environment
