"""The engine's autocast, for a forward that does not go through it. DeepSpeed: deepspeed/runtime/torch_autocast.py."""

from contextlib import AbstractContextManager
from typing import Any

from refimpl.engine.engine import Engine
from refimpl.engine.precision import autocast

__all__ = ["autocast_if_enabled"]


def autocast_if_enabled(engine: Engine) -> AbstractContextManager[Any]:
    """As the section `torch_autocast` says: a loss that a script computes by the engine's module, say."""
    return autocast(engine._config, engine.device)
