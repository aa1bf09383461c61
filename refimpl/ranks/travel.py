"""Pickles that another process can read: what that process could not import travels by value.

That is cloudpickle's work. Without it, on a machine that has torch and little else, plain pickle carries what can be
imported, and says what to do about the rest.
"""

import io
import pickle
import types
from typing import Any

from torch import Tensor

from refimpl.ranks.views import reduced

try:
    from refimpl.ranks import by_value
except ModuleNotFoundError:
    by_value = None  # type: ignore[assignment]


def dumps(obj: object) -> bytes:
    """TypeError for what cannot travel: without cloudpickle a lambda, a closure, anything of a script."""
    if by_value is not None:
        return by_value.dumps(obj)
    try:
        _Importable(file := io.BytesIO()).dump(obj)
    except (pickle.PicklingError, AttributeError) as error:
        raise TypeError(
            f"{error}: plain pickle cannot carry it to a rank. Install cloudpickle, or put functions at the top of a "
            "module that the ranks can import, and hand them what they need as arguments"
        ) from None
    return file.getvalue()


def loads(message: bytes) -> Any:
    return pickle.loads(message)


def survives(obj: object) -> bool:
    """Whether obj can be pickled and read back: an exception with an `__init__` of its own often cannot."""
    try:
        loads(dumps(obj))
    except Exception:
        return False
    return True


class _Importable(pickle.Pickler):
    """Refuses what pickle would name and no rank would find: a rank's `__main__` is not the caller's."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, Tensor):
            return reduced(obj)
        if isinstance(obj, types.FunctionType | type) and obj.__module__ == "__main__":
            raise pickle.PicklingError(f"{obj.__qualname__} is defined in a script")
        return NotImplemented
