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
from refimpl.comm.board import stacklevel
from refimpl.comm.group import Group
from refimpl.engine.configuration.keys import ConfigWarning
from refimpl.engine.configuration.sections import ActivationCheckpointing

PATH = "activation_checkpointing"


def checkpointer(
    section: ActivationCheckpointing,
    neighbours: Group,
    rank: int,
    trackers: tuple[Tracker, ...] = (),
    said: set[str] | None = None,
) -> Checkpoint:
    """What the section asks for. `neighbours`: the ranks that compute the same activations as this one.

    A warning on rank 0 for each key without effect, unless it is in `said`, where it is noted.
    """
    said = set() if said is None else said
    for note in without_effect(section, neighbours) if rank == 0 else ():
        if note not in said:
            said.add(note)
            warnings.warn(f"{PATH}.{note}; the key has no effect", ConfigWarning, stacklevel=stacklevel())
    home: Home | None = Host() if section.cpu_checkpointing else None
    if section.contiguous_memory_optimization and section.number_checkpoints is not None:
        home = Contiguous(section.number_checkpoints, torch.device("cpu") if section.cpu_checkpointing else None)
    if section.partition_activations:
        home = Partitioned(neighbours, then=home)
    if not (section.synchronize_checkpoint_boundary or section.profile):
        return Checkpoint(home, trackers=trackers)
    around = partial(boundary, waits=section.synchronize_checkpoint_boundary, tells=section.profile and rank == 0)
    return Checkpoint(home, trackers=trackers, around=around)


def without_effect(section: ActivationCheckpointing, neighbours: Group) -> Iterator[str]:
    """The keys that are accepted, and why they change nothing: an arena without a size, as many files ask for one, and
    activations that nobody shares.
    """
    if section.contiguous_memory_optimization and section.number_checkpoints is None:
        yield (
            f"contiguous_memory_optimization = True: needs {PATH}.number_checkpoints, the number of layers that are "
            "checkpointed in one forward"
        )
    if section.partition_activations and neighbours.size == 1:
        yield (
            "partition_activations = True: no other rank computes the same activations (there is no model "
            "parallelism), so there is nobody to share them with"
        )


@contextmanager
def boundary(run: Run, waits: bool, tells: bool) -> Iterator[None]:
    """Around one run of a checkpointed function. A time is the device's only if it is waited for."""
    waits = waits and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # or there is nothing to wait for
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
