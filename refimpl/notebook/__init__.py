"""For notebooks: `%load_ext refimpl.notebook` adds the magics `%%ranks`, `%%task`, `%hint` and the object `ranks`."""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell


def load_ipython_extension(shell: "InteractiveShell") -> None:
    """What `%load_ext` calls.

    From then on what this process starts is on the CPU, unless it asks for a GPU or REFIMPL_DEVICE says otherwise:
    cells make their tensors there, as the course's do, and NCCL would refuse them.
    """
    os.environ.setdefault("REFIMPL_DEVICE", "cpu")
    from refimpl.notebook import magic, task

    magic.load(shell)
    task.load(shell)


def __getattr__(name: str) -> Any:
    if name == "Quiz":  # it needs the question bank, which no rank does
        return import_module("refimpl.notebook.quiz").Quiz
    if name == "predict":
        return import_module("refimpl.notebook.prediction").predict
    raise AttributeError(f"module 'refimpl.notebook' has no attribute {name!r}")
