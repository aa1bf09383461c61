"""What such an engine can do. The one of this project's own checkpoints is refimpl/checkpoint, and takes no other.

DeepSpeed: deepspeed/runtime/checkpoint_engine/checkpoint_engine.py.
"""

import os
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any


@dataclass
class CheckpointCommitInfo:
    """Of which checkpoint the files are."""

    tag: str
    save_dir: str
    save_latest: bool


class CheckpointEngine(ABC):
    """Saves dictionaries of tensors to files and loads them."""

    name: str | None = None

    def __init__(self, config_params: Any = None) -> None:
        self.config_params = config_params

    @abstractmethod
    def create(self, info: CheckpointCommitInfo) -> None:
        """A checkpoint begins."""

    @abstractmethod
    def save(self, state_dict: Any, path: str) -> None: ...

    @abstractmethod
    def load(self, path: str, map_location: Any = None) -> Any: ...

    @abstractmethod
    def commit(self, info: CheckpointCommitInfo) -> bool:
        """All its files are there."""

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        os.makedirs(path, exist_ok=exist_ok)

    def is_data_parallel_writer(self, dp_rank: int) -> bool:
        """Whether one that holds what its replicas hold writes it."""
        return dp_rank == 0

    def preserves_storage_sharing(self) -> bool:
        """Whether tensors over one storage are written as such."""
        return True
