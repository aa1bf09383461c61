"""The `activation_checkpointing` section becomes a `Checkpoint`: `engine.activation_checkpoint(block, x)`.

    partition_activations             home.Partitioned over the model-parallel neighbours
    cpu_checkpointing                 home.Host
    contiguous_memory_optimization    arena.Contiguous, for number_checkpoints inputs; in host memory with the one above
    synchronize_checkpoint_boundary   the device is waited for before and after each run
    profile                           each run's milliseconds, on rank 0

They combine. DeepSpeed reads the section only in `deepspeed.checkpointing.configure`, so a file that has it and a
script that does not call that are without effect there; here `deepspeed.initialize` calls it.
DeepSpeed: deepspeed/runtime/activation_checkpointing/checkpointing.py and config.py.
"""

import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch

from refimpl.activation.arena import Contiguous
from refimpl.activation.checkpoint import Checkpoint, Run
from refimpl.activation.home import Home, Host, Partitioned
from refimpl.activation.state import Tracker
from refimpl.comm.group import Group
from refimpl.engine.keys import ConfigWarning
from refimpl.engine.sections import ActivationCheckpointing

PATH = "activation_checkpointing"


def checkpointer(
    section: ActivationCheckpointing, neighbours: Group, rank: int, trackers: tuple[Tracker, ...] = ()
) -> Checkpoint:
    """What the section asks for. `neighbours`: the ranks that compute the same activations as this one.

    A warning on rank 0 for an arena without a size, as many files ask for one, and when there are no neighbours to
    share with.
    """
    home: Home | None = Host() if section.cpu_checkpointing else None
    if section.contiguous_memory_optimization and section.number_checkpoints is not None:
        home = Contiguous(section.number_checkpoints, torch.device("cpu") if section.cpu_checkpointing else None)
    elif section.contiguous_memory_optimization and rank == 0:
        no_effect(
            "contiguous_memory_optimization",
            f"needs {PATH}.number_checkpoints, the number of layers that are checkpointed in one forward",
        )
    if section.partition_activations:
        if neighbours.size == 1 and rank == 0:
            no_effect(
                "partition_activations",
                "no other rank computes the same activations (there is no model parallelism), so there is nobody to "
                "share them with",
            )
        home = Partitioned(neighbours, then=home)
    if not (section.synchronize_checkpoint_boundary or section.profile):
        return Checkpoint(home, trackers=trackers)
    around = partial(boundary, waits=section.synchronize_checkpoint_boundary, tells=section.profile and rank == 0)
    return Checkpoint(home, trackers=trackers, around=around)


def no_effect(key: str, reason: str) -> None:
    """A warning that this key of the section is accepted, and why it changes nothing."""
    warnings.warn(f"{PATH}.{key} = True: {reason}; the key has no effect", ConfigWarning, stacklevel=3)


@contextmanager
def boundary(run: Run, waits: bool, tells: bool) -> Iterator[None]:
    """Around one run of a checkpointed function. A time is the device's only if it is waited for."""
    waits = waits and torch.cuda.is_available()
    if waits:
        torch.cuda.synchronize()
    start = time.perf_counter()
    try:
        yield
    finally:
        if waits:
            torch.cuda.synchronize()
        if tells:
            print(f"activation checkpoint | {run}: {(time.perf_counter() - start) * 1e3:.2f} ms", flush=True)
