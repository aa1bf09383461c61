"""accelerate takes each rank for a job of its own where there is no GPU and nobody names a backend to it."""

import sys
import warnings

import torch.distributed as dist


def tell() -> None:
    """Warn where it does: every rank would read all of the data, and write the one file as the main process."""
    state = sys.modules.get("accelerate.state")
    known = state.PartialState._shared_state.get("num_processes") if state else None
    if known is not None and known != (size := dist.get_world_size()):
        warnings.warn(
            f"accelerate counts {known} process where {size} ranks train: each reads all of the data, and takes itself "
            'for the main process. Without a GPU name a backend to it: InitProcessGroupKwargs(backend="gloo") among '
            "the kwargs_handlers of Accelerator, or use_cpu=True of TrainingArguments",
            stacklevel=3,
        )
