"""Names that scripts import before they know whether they need them: there, and refused by name when used."""

from typing import Any


def later(name: str, what: str) -> type[Any]:
    """A class (or, called as one, a function) that says on use that `what` is not implemented yet."""

    def refuse(self: object, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(f"{name}: not implemented yet: {what}")

    return type(name.rpartition(".")[2], (), {"__init__": refuse, "__doc__": f"Not implemented yet: {what}."})
