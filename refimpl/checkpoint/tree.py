"""What is not a tensor, to JSON and back exactly: the schedule, the random states, whatever a client keeps.

JSON has no tuple, no number as a key, no infinity and no tensor. Each of these becomes an object with one key that
begins with "$", and its inverse is in the same line of the table below; a tensor goes beside the JSON, under its path.

    (1, None)       {"$tuple": [1, null]}
    {0: "a"}        {"$dict": [[0, "a"]]}
    inf             {"$float": "inf"}
    a tensor        {"$tensor": "client_state.rng"}       the tensor itself into the safetensors file

Anything else (an object, a function, a numpy array) is refused when it is saved, under its path: to bring it back one
would have to run what the file says, which is what a pickle is. DeepSpeed's client_state is pickled.
"""

import base64
from collections import Counter, OrderedDict
from collections.abc import Callable
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn

from refimpl.checkpoint.errors import CheckpointError
from refimpl.checkpoint.place import dtype_named
from refimpl.checkpoint.tensors import NAMES

PLAIN = (type(None), bool, int, str)
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
    for name, (known, to, _) in KINDS.items():
        if kind is known:
            return {name: inner(to(value), path, tensors)}
    what = f"{kind.__module__}.{kind.__qualname__}"
    remedy = "keep its plain value: .item(), .tolist(), torch.from_numpy(...), str(...) or vars(...)"
    raise refused(path, what, remedy)


def refused(path: str, what: str, remedy: str) -> CheckpointError:
    return CheckpointError(
        f"{path}: holds {what}; a checkpoint keeps tensors, numbers, strings, bytes, None, lists, tuples, sets and "
        f"dictionaries of them. Here, {remedy}"
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
    "$float": (float, repr, float),
    "$tuple": (tuple, list, tuple),
    "$dict": (dict, pairs, dict),
    "$ordered": (OrderedDict, pairs, OrderedDict),
    "$counter": (Counter, pairs, lambda items: Counter(dict(items))),
    "$set": (set, lambda value: sorted(value, key=repr), set),
    "$size": (torch.Size, list, torch.Size),
    "$dtype": (torch.dtype, lambda dtype: str(dtype).removeprefix("torch."), dtype_named),
    "$device": (torch.device, str, torch.device),
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
