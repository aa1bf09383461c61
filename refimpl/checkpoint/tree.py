"""What is not a tensor, to JSON and back exactly: the schedule, the random states, whatever a client keeps.

JSON has no tuple, no number as a key, no infinity and no tensor. Each of these becomes an object with one key that
begins with "$", and its inverse is in the same line of the table below; a tensor goes beside the JSON, under its path.

    (1, None)       {"$tuple": [1, null]}
    {0: "a"}        {"$dict": [[0, "a"]]}
    inf             {"$float": "inf"}
    a tensor        {"$tensor": "client_state.rng"}       the tensor itself into the safetensors file

numpy's numbers and arrays go as tensors, dates and times as ISO 8601 has them (a zone is its offset), a defaultdict's
factory by its name, if it is one of Python's types (`FACTORIES`), an enum's member by its class and name: it comes back
if whoever reads has the class. So do a named tuple, an object that is its attributes and no more, such as a dataclass
or mmengine's histories, and a dictionary of a class of its own, such as yacs' (by_class.py). Anything else (a function,
a lock, an array of objects) is refused when it is saved, under its path: to bring it back one would have to run what
the file says, which is what a pickle is. DeepSpeed's client_state is pickled.
"""

import base64
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from datetime import date, datetime, time, timedelta
from enum import Enum
from math import isfinite
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.torch_version import TorchVersion

from refimpl.checkpoint.by_class import is_named_tuple, is_plain, member, named, named_tuple, plain_object, with_items
from refimpl.checkpoint.errors import CheckpointError
from refimpl.checkpoint.place import dtype_named
from refimpl.checkpoint.tensors import NAMES

PLAIN = (type(None), bool, int, str)
FACTORIES = {kind.__name__: kind for kind in (bool, int, float, str, list, set, dict)}
DEEPEST = 200  # levels, far below what Python's own recursion reaches; whoever holds itself gets there too


def encode(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """`value` as JSON; its tensors are put into `tensors` by their path. CheckpointError names what cannot be kept."""
    kind = type(value)
    if path.count(".") > DEEPEST:
        raise refused(f"{path[:60]}...", f"more than {DEEPEST} levels, or itself", "keep it flatter")
    if kind in PLAIN or (kind is float and isfinite(value)):
        return value
    if kind is list:
        return [encode(item, f"{path}.{i}", tensors) for i, item in enumerate(value)]
    if kind is dict and all(type(key) is str and not key.startswith("$") for key in value):
        return {key: encode(item, f"{path}.{key}", tensors) for key, item in value.items()}
    if kind in (Tensor, nn.Parameter):
        if value.layout != torch.strided or value.dtype not in NAMES or value.is_meta:
            what = f"a tensor of {value.dtype}, {value.layout}, on {value.device}"
            raise refused(path, what, "keep a dense one of an ordinary dtype, with data")
        while path in tensors:  # {"a.b": t} and {"a": {"b": t}}, or the keys 1 and "1": one path, two tensors
            path += "'"
        tensors[path] = value.detach()
        return {"$tensor": path}
    if (name := kind_of(value)) is not None:
        return {name: inner(KINDS[name][1](value), path, tensors)}
    what = f"{kind.__module__}.{kind.__qualname__}"
    remedy = "keep its " + (
        "state_dict()"
        if hasattr(kind, "state_dict")
        else "plain value: .tolist(), str(...), vars(...) or OmegaConf.to_container(...)"
    )
    raise refused(path, what, remedy)


def kind_of(value: Any) -> str | None:
    """What a value is called in JSON; None for what cannot be kept."""
    if isinstance(value, np.ndarray | np.generic):
        plain = value.dtype.kind in "biufc" and value.dtype.itemsize <= 8 and value.dtype.isnative
        return None if not plain else "$number" if isinstance(value, np.generic) else "$array"
    if type(value) is defaultdict and value.default_factory not in (None, *FACTORIES.values()):
        return None
    if isinstance(value, float):  # no number in JSON, or of a class of its own, as the gradient's norm is
        return "$float"
    if isinstance(value, Enum):
        return "$enum" if value.name in type(value).__members__ else None  # flags put together have no name
    found = next((name for name, (known, _, _) in KINDS.items() if type(value) is known), None)
    if found is None and is_plain(type(value)):
        return "$mapping" if isinstance(value, dict) else "$object"
    return "$named" if found is None and is_named_tuple(type(value)) else found


def as_tensor(value: Any) -> list[Tensor]:
    """A number or an array of numpy's, copied, in a list."""
    return [torch.from_numpy(np.array(value, order="C"))]


def refused(path: str, what: str, remedy: str) -> CheckpointError:
    return CheckpointError(
        f"{path}: holds {what}; a checkpoint keeps tensors, numbers, strings, bytes, times, paths, enums, None, "
        f"lists, tuples, sets, dictionaries and namespaces of them. Here, {remedy}"
    )


def inner(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """The list that stands for a tuple or the pairs of a dictionary, encoded: pairs by their key."""
    if not isinstance(value, list):
        return value
    if value and all(isinstance(pair, Pair) for pair in value):
        return [[encode(k, f"{path}.key", tensors), encode(v, f"{path}.{k}", tensors)] for k, v in value]
    return [encode(item, f"{path}.{i}", tensors) for i, item in enumerate(value)]


class Pair(tuple[Any, Any]):
    """A key and its value."""


def pairs(mapping: Any) -> list[Pair]:
    return [Pair(item) for item in mapping.items()]


# How it is called in JSON: (what it is, to a list or a string, and back)
KINDS: dict[str, tuple[type, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "$float": (float, float.__repr__, float),
    "$tuple": (tuple, list, tuple),
    "$dict": (dict, pairs, dict),
    "$ordered": (OrderedDict, pairs, OrderedDict),
    "$counter": (Counter, pairs, lambda items: Counter(dict(items))),
    "$defaults": (
        defaultdict,
        lambda value: [value.default_factory and value.default_factory.__name__, dict(value)],
        lambda items: defaultdict(items[0] and FACTORIES[items[0]], items[1]),
    ),
    "$deque": (deque, lambda value: [value.maxlen, *value], lambda items: deque(items[1:], items[0])),
    "$frozen": (frozenset, lambda value: sorted(value, key=repr), frozenset),
    "$complex": (complex, lambda value: [value.real, value.imag], lambda items: complex(*items)),
    "$datetime": (datetime, datetime.isoformat, datetime.fromisoformat),
    "$date": (date, date.isoformat, date.fromisoformat),
    "$time": (time, time.isoformat, time.fromisoformat),
    "$timedelta": (
        timedelta,
        lambda value: [value.days, value.seconds, value.microseconds],
        lambda items: timedelta(*items),
    ),
    "$path": (type(Path()), str, Path),
    "$set": (set, lambda value: sorted(value, key=repr), set),
    "$size": (torch.Size, list, torch.Size),
    "$version": (TorchVersion, str, TorchVersion),
    "$dtype": (torch.dtype, lambda dtype: str(dtype).removeprefix("torch."), dtype_named),
    "$device": (torch.device, str, torch.device),
    "$array": (np.ndarray, as_tensor, lambda items: items[0].numpy()),
    "$number": (np.generic, as_tensor, lambda items: items[0].numpy()[()]),
    "$namespace": (Namespace, lambda value: pairs(vars(value)), lambda items: Namespace(**dict(items))),
    "$simple": (SimpleNamespace, lambda value: pairs(vars(value)), lambda items: SimpleNamespace(**dict(items))),
    "$range": (range, lambda value: [value.start, value.stop, value.step], lambda items: range(*items)),
    "$enum": (Enum, lambda value: [type(value).__module__, type(value).__qualname__, value.name], member),
    "$object": (Pair, named, plain_object),
    "$mapping": (Pair, with_items, plain_object),
    "$named": (Pair, lambda value: [type(value).__module__, type(value).__qualname__, *value], named_tuple),
    "$bytes": (bytes, lambda value: base64.b64encode(value).decode(), base64.b64decode),
}


def decode(value: Any, tensor: Callable[[str], Tensor]) -> Any:
    """The inverse of `encode`; `tensor` gives a tensor by its path."""
    if isinstance(value, list):
        return [decode(item, tensor) for item in value]
    if not isinstance(value, dict):
        return value
    name = next(iter(value), "")
    if name == "$tensor":
        return tensor(value[name])
    if name not in KINDS:
        return {key: decode(item, tensor) for key, item in value.items()}
    return KINDS[name][2](decode(value[name], tensor))
