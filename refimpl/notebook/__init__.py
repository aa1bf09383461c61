"""For notebooks: `%load_ext refimpl.notebook` adds the magics `%%ranks`, `%%task`, `%hint` and the object `ranks`."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell


def load_ipython_extension(shell: "InteractiveShell") -> None:
    """What `%load_ext` calls."""
    from refimpl.notebook import magic, task

    magic.load(shell)
    task.load(shell)


def __getattr__(name: str) -> Any:
    if name == "Quiz":  # it needs the question bank, which no rank does
        return import_module("refimpl.notebook.quiz").Quiz
    if name == "predict":
        return import_module("refimpl.notebook.prediction").predict
    raise AttributeError(f"module 'refimpl.notebook' has no attribute {name!r}")
