"""How scripts write files of their own beside a checkpoint. DeepSpeed: deepspeed/runtime/checkpoint_engine."""

from refimpl.deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointCommitInfo, CheckpointEngine
from refimpl.deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

__all__ = ["CheckpointCommitInfo", "CheckpointEngine", "TorchCheckpointEngine"]
