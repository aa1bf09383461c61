"""What comes back by the name of its class: an enum's member, a named tuple, an object that is its attributes.

The class must be there already when the file is read, nothing is imported for a file's sake, and none of its methods
is called: an object gets its attributes, a dictionary of a class of its own (yacs' CfgNode, an EasyDict) its items as
well. One that is its own `__dict__`, as an AttrDict often is, is so again.
"""

import sys
from enum import Enum
from functools import reduce
from typing import Any

from refimpl.checkpoint.errors import CheckpointError


def is_plain(kind: type) -> bool:
    """Whether attributes, and items of a dict, are all that an object of this class has and says it keeps."""
    base = dict if issubclass(kind, dict) else object
    special = ("__new__", "__del__", "__reduce__", "__reduce_ex__")
    ordinary = all(getattr(kind, name, None) is getattr(base, name, None) for name in special)
    slots = any(vars(owner).get("__slots__") for owner in kind.__mro__)
    has_attributes = kind.__dictoffset__ != 0 and not slots and not hasattr(kind, "state_dict")
    return ordinary and has_attributes and imported(kind.__module__, kind.__qualname__) is kind


def is_named_tuple(kind: type) -> bool:
    plain = issubclass(kind, tuple) and hasattr(kind, "_fields") and kind.__dictoffset__ == 0
    return plain and imported(kind.__module__, kind.__qualname__) is kind


def named(value: Any) -> list[Any]:
    """The name of its class and its attributes; those of a dict are None where they are its items."""
    attributes = object.__getattribute__(value, "__dict__")
    return [type(value).__module__, type(value).__qualname__, None if attributes is value else attributes]


def with_items(value: dict[Any, Any]) -> list[Any]:
    return [*named(value), dict(dict.items(value))]


def plain_object(content: list[Any]) -> object:
    """An object of a class by its attributes."""
    module, qualname, attributes, *items = content
    kind = imported(module, qualname)
    if not (isinstance(kind, type) and is_plain(kind) and issubclass(kind, dict) == bool(items)):
        raise unknown(f"an object of {module}.{qualname}")
    made: Any = (dict if items else object).__new__(kind)
    if items:
        dict.update(made, *items)
    if attributes is None:
        object.__setattr__(made, "__dict__", made)
    else:
        object.__getattribute__(made, "__dict__").update(attributes)
    return made


def named_tuple(content: list[Any]) -> tuple[Any, ...]:
    module, qualname, *items = content
    kind = imported(module, qualname)
    if not (isinstance(kind, type) and is_named_tuple(kind)):
        raise unknown(f"a {module}.{qualname}")
    made: tuple[Any, ...] = tuple.__new__(kind, items)
    return made


def member(place: list[str]) -> Enum:
    module, qualname, name = place
    found = imported(module, qualname)
    if not (isinstance(found, type) and issubclass(found, Enum) and name in found.__members__):
        raise unknown(f"{module}.{qualname}.{name}")
    return found[name]


def imported(module: str, qualname: str) -> Any:
    """A class that is imported already, else None."""
    try:
        return reduce(lambda owner, part: vars(owner)[part], qualname.split("."), sys.modules[module])
    except (KeyError, TypeError):
        return None


def unknown(what: str) -> CheckpointError:
    return CheckpointError(f"the checkpoint holds {what}, which this program does not have: import its class first")
