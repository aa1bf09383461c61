"""Reading a torch.save file of somebody else's without running what it says.

A pickle is a program for a small machine, and one instruction calls any function of any module by name. So the names
are the door: this unpickler looks each up in a list of what DeepSpeed's checkpoints are made of, and refuses every
other with the name. DeepSpeed's own classes become `Shell`s, which hold the attributes and have no methods. What is
left that a file can do is to make dictionaries, numbers and tensors. torch's `weights_only` is the same idea with a
longer list, and does not know DeepSpeed's classes.
"""

import pickle
import types
import zipfile
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from refimpl.checkpoint.errors import CheckpointError, naming


class Shell:
    """Stands for an object of a class that is not loaded: its attributes and what it was made of."""

    def __init__(self, *args: Any) -> None:
        self.args = args


def plain_tensor(rebuild: Callable[..., Tensor], kind: Any, args: tuple[Any, ...], state: Any) -> Tensor:
    """In place of torch._tensor._rebuild_from_type_v2: without the attributes that somebody has hung on the tensor."""
    return rebuild(*args)


def parameter(data: Tensor, requires_grad: bool, hooks: Any) -> Tensor:
    """In place of torch._utils._rebuild_parameter."""
    return data


ALLOWED: dict[str, Any] = {
    "collections.OrderedDict": OrderedDict,
    "collections.defaultdict": defaultdict,
    "builtins.dict": dict,
    "builtins.list": list,
    "builtins.set": set,
    "builtins.int": int,
    "builtins.float": float,
    "torch.Size": torch.Size,
    "torch.Tensor": Tensor,
    "torch.device": torch.device,
    "torch._utils._rebuild_tensor_v2": torch._utils._rebuild_tensor_v2,
    "torch._utils._rebuild_parameter": parameter,
    "torch._tensor._rebuild_from_type_v2": plain_tensor,
    "deepspeed.runtime.fp16.loss_scaler.LossScaler": Shell,
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler": Shell,
    "deepspeed.runtime.zero.config.ZeroStageEnum": int,
    "deepspeed.utils.tensor_fragment.fragment_address": Shell,
} | {f"torch.{name}": getattr(torch, name) for name in ("float32", "float16", "bfloat16", "float64", "int64", "int32")}


class Refused(pickle.UnpicklingError):
    """A file names something that is not in `ALLOWED`."""


class Restricted(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            module = "builtins" if module == "__builtin__" else module  # as protocol 2 calls it
            return ALLOWED[f"{module}.{name}"]
        except KeyError:
            raise Refused(
                f"asks for {module}.{name}, which no checkpoint of DeepSpeed needs and nothing here will run. If that "
                "is part of a client_state of yours, save the checkpoint again without it"
            ) from None


def load(path: Path) -> Any:
    """What a torch.save file holds; tensors stay on the disk until they are read. CheckpointError for anything else."""
    module = types.SimpleNamespace(Unpickler=Restricted, UnpicklingError=pickle.UnpicklingError, __name__="restricted")
    with naming(path):
        with path.open("rb") as file:
            if file.read(4) != b"PK\x03\x04":
                raise CheckpointError(f"{path}: cut short, or not written by torch.save of torch 1.6 or later")
        try:
            with zipfile.ZipFile(path) as archive:  # torch does not look at the checksums that it writes
                if (bad := archive.testzip()) is not None:
                    raise CheckpointError(
                        f"{path}: damaged, the checksum of {bad} differs; bring back the file that was saved"
                    )
            with torch.serialization._open_zipfile_reader(str(path)) as archive:
                if archive.has_record("constants.pkl"):  # torch.load would hand it to torch.jit, which runs it
                    raise CheckpointError(f"{path}: a TorchScript program, no checkpoint; nothing here will run it")
            return torch.load(path, map_location="cpu", weights_only=False, mmap=True, pickle_module=module)
        except Refused as error:
            raise CheckpointError(f"{path}: {error}") from None
        except (RuntimeError, OSError, EOFError, KeyError, zipfile.BadZipFile, pickle.UnpicklingError) as error:
            raise CheckpointError(
                f"{path}: damaged or cut short ({error}); bring back the file that was saved"
            ) from error
