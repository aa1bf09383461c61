"""A value as an error quotes it: short, and safe for what a broken file holds (depth or length without end)."""

import reprlib
from typing import Any

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 80
_SHORT.maxdict = _SHORT.maxlist = 8
_SHORT.maxlevel = 4


def quote(value: Any) -> str:
    """`repr(value)`, cut in the middle where it is long."""
    try:
        return _SHORT.repr(value)
    except ValueError:  # Python prints no integer of more than 4300 digits
        return f"a {type(value).__name__} too long to print"
