"""A value as an error quotes it: short, and safe for what a broken file holds (depth or length without end)."""

import reprlib
from typing import Any

from pydantic import ValidationError

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 80
_SHORT.maxdict = _SHORT.maxlist = 8
_SHORT.maxlevel = 2  # a section is known by its first keys


def quote(value: Any) -> str:
    """`repr(value)`, cut in the middle where it is long."""
    try:
        return _SHORT.repr(value)
    except ValueError:  # Python prints no integer of more than 4300 digits
        return f"a {type(value).__name__} too long to print"


def readable(error: ValidationError, prefix: str = "") -> list[str]:
    """One line a wrong value: full path, `prefix` in front, what is wrong, what was given."""
    lines = []
    for problem in error.errors(include_url=False):
        path = ".".join(str(part) for part in problem["loc"])
        message = problem["msg"].removeprefix("Value error, ")
        lines.append(f"{prefix}{path}: {message}; got {quote(problem['input'])}" if path else message)
    return lines
