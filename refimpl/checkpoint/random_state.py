"""The random numbers to come of this process: torch's on the CPU and on this rank's GPU, Python's and numpy's.

A run that goes on draws what it would have drawn: dropout masks, augmentation, a sampler without a seed. Each rank has
its own; a rank that the saving run did not have keeps what it has. `torch.Generator`s of a script's own are its own
client_state. DeepSpeed leaves all of them to the script.
"""

import random
from typing import Any

import numpy as np
import torch


def get(device: torch.device) -> dict[str, Any]:
    """Numbers, tuples and tensors."""
    kind, keys, *rest = np.random.get_state(legacy=True)  # noqa: NPY002 (what np.random.rand draws from)
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(np.array(keys)), *rest),
    }


def put(state: dict[str, Any], device: torch.device) -> None:
    """Go on from `get()`. A GPU's state is left out where there is no GPU, or was none."""
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)
    random.setstate(state["python"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy(), *rest))  # noqa: NPY002
