"""Names that scripts import before they know whether they need them: there, and refused by name when used."""

from typing import Any


def absent(name: str, what: str) -> type[Any]:
    """A class (or, called as one, a function) that says on use that `what` is not part of this project."""

    def refuse(self: object, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(f"{name}: not part of this project: {what}")

    return type(name.rpartition(".")[2], (), {"__init__": refuse, "__doc__": f"Not part of this project: {what}."})
