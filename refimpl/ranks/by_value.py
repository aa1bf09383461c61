"""cloudpickle, for more than it sends by value itself.

It already sends lambdas, closures and all of `__main__` (scripts, notebook cells) by value. Here the functions and
classes of modules that no import would find do too, such as a test file's under pytest's importlib mode. And code
keeps the file that it came from, which cloudpickle 3.1.3 forgets: errors name it, with the line. A module of a class of
its own goes by its name, as others do: cloudpickle takes torch.distributed.config for used, and cannot send it, where a
function has the names `torch`, `distributed` and `config`.
"""

import importlib
import io
import sys
import types
from collections import ChainMap
from collections.abc import Callable
from functools import lru_cache
from importlib.machinery import EXTENSION_SUFFIXES
from typing import Any, ClassVar

import cloudpickle  # type: ignore[import-untyped]
from torch import Tensor

from refimpl.ranks.views import reduced


def dumps(obj: object) -> bytes:
    pickler = _Pickler(file := io.BytesIO())
    try:
        pickler.dump(obj)
    finally:
        for module in pickler.by_value:
            cloudpickle.unregister_pickle_by_value(module)
    return file.getvalue()


def _code(code: types.CodeType) -> tuple[Any, ...]:
    make, args, *_ = cloudpickle.Pickler.dispatch_table[types.CodeType](code)
    return _from, (code.co_filename, make, args)


def _from(file: str, make: Callable[..., types.CodeType], args: tuple[Any, ...]) -> types.CodeType:
    return make(*args).replace(co_filename=file)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    dispatch_table: ClassVar = ChainMap({types.CodeType: _code}, cloudpickle.Pickler.dispatch_table)

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.by_value: list[types.ModuleType] = []
        self.seen = {"__main__"}

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, Tensor):
            return reduced(obj)
        if isinstance(obj, types.FunctionType | type | types.ModuleType):
            name = obj.__name__ if isinstance(obj, types.ModuleType) else obj.__module__
            module = sys.modules.get(name)
            file = _file(module)
            if module and file and name not in self.seen and not _importable(module.__name__, file, tuple(sys.path)):
                cloudpickle.register_pickle_by_value(module)
                self.by_value.append(module)
            self.seen.add(name)
            if isinstance(obj, types.ModuleType) and type(obj) is not types.ModuleType and obj not in self.by_value:
                return importlib.import_module, (name,)
        return super().reducer_override(obj)


def _file(module: types.ModuleType | None) -> str | None:
    """A module's own source; None for one that only goes by its name, though no finder may know it.

    Those are what is built in, frozen (Python 3.14's collections.abc), compiled (torch._C._distributed_c10d, which
    import torch makes, has torch._C's file), and namespaces.
    """
    file = getattr(module, "__file__", None)
    frozen = getattr(getattr(module, "__spec__", None), "origin", None) == "frozen"
    return None if file is None or frozen or file.endswith(tuple(EXTENSION_SUFFIXES)) else file


@lru_cache(1024)  # a rank's every report asks for the same few
def _importable(module: str, file: str, sys_path: tuple[str, ...]) -> bool:
    """Whether another process with this sys.path would import the same file under the same name."""
    path, origin, name = None, None, ""
    for part in module.split("."):
        name = f"{name}.{part}".lstrip(".")
        specs = (finder.find_spec(name, path) for finder in sys.meta_path)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is None:
            return False
        path, origin = spec.submodule_search_locations, spec.origin
    return origin == file
