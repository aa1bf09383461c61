"""ZeRO from scratch: a small, complete, readable DeepSpeed. Names are imported when they are first used."""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from refimpl.activation.checkpoint import Checkpoint, checkpoint
    from refimpl.as_deepspeed import alias_deepspeed
    from refimpl.comm.group import Group
    from refimpl.engine.engine import Engine
    from refimpl.engine.initialize import initialize
    from refimpl.launch import join, run
    from refimpl.measure.ledger import Ledger
    from refimpl.measure.memory import MemoryMeter
    from refimpl.model.gpt import GPT, GPTConfig
    from refimpl.optim.diloco import DiLoCo
    from refimpl.optim.local_sgd import LocalSGD
    from refimpl.parallel.context.loss import token_mean
    from refimpl.zero.config import ZeroConfig
    from refimpl.zero.ddp import DDP
    from refimpl.zero.zero1 import Zero1
    from refimpl.zero.zero2 import Zero2
    from refimpl.zero.zero3 import Zero3

__version__ = "0.1.0"

__all__ = [
    "DDP", "GPT", "Checkpoint", "DiLoCo", "Engine", "GPTConfig", "Group", "Ledger", "LocalSGD", "MemoryMeter", "Zero1",
    "Zero2", "Zero3", "ZeroConfig", "alias_deepspeed", "checkpoint", "initialize", "join", "run", "token_mean",
]  # fmt: skip

# So that `import refimpl.launch`, which every rank and every fork server does, loads nothing else.
_HOMES = {
    "DDP": "zero.ddp",
    "GPT": "model.gpt",
    "Checkpoint": "activation.checkpoint",
    "DiLoCo": "optim.diloco",
    "Engine": "engine.engine",
    "GPTConfig": "model.gpt",
    "Group": "comm.group",
    "Ledger": "measure.ledger",
    "LocalSGD": "optim.local_sgd",
    "MemoryMeter": "measure.memory",
    "Zero1": "zero.zero1",
    "Zero2": "zero.zero2",
    "Zero3": "zero.zero3",
    "ZeroConfig": "zero.config",
    "alias_deepspeed": "as_deepspeed",
    "checkpoint": "activation.checkpoint",
    "initialize": "engine.initialize",
    "join": "launch",
    "run": "launch",
    "token_mean": "parallel.context.loss",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'refimpl' has no attribute {name!r}")
    return getattr(import_module(f"refimpl.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """`refimpl.checkpoint` is the function, whatever was imported: `refimpl/checkpoint/` is reached by `from` alone."""

    @property
    def checkpoint(self) -> Any:
        return __getattr__("checkpoint")

    @checkpoint.setter
    def checkpoint(self, package: ModuleType) -> None:
        """Called by Python when it has imported that package."""

    def __reduce__(self) -> tuple[Any, ...]:
        """A function of a script that names the package travels to the ranks."""
        return import_module, (self.__name__,)


sys.modules[__name__].__class__ = _Package
