"""A rank whose tensors live on a device that pretends to be another: what mixes devices is an error, without a GPU.

Collectives take the device's tensors alone, as NCCL does, and pass through the host.
"""

import os
import subprocess
import types
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import cpp_extension
from torch.utils._pytree import tree_leaves

from refimpl.comm import control, group, route
from refimpl.comm.collectives import Op
from refimpl.comm.composed import Composed
from refimpl.comm.streams import Streams
from refimpl.comm.transport import Transport
from refimpl.comm.work import Steps
from refimpl.ranks.travel import dumps

SOURCE = Path(__file__).parent / "device.cpp"


def built(folder: Path) -> Path:
    """The device's library, made by g++ in `folder`."""
    library = folder / "device.so"
    include = [f"-isystem{path}" for path in cpp_extension.include_paths()]
    where = [flag for path in cpp_extension.library_paths() for flag in (f"-L{path}", f"-Wl,-rpath,{path}")]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    made = ["g++", "-std=c++20", "-O0", "-fPIC", "-shared", abi, *include, str(SOURCE), "-o", str(library)]
    subprocess.run([*made, *where, "-ltorch_cpu", "-lc10"], check=True, capture_output=True, text=True)
    return library


def load(library: Path) -> None:
    """From now on this process has the device "pretend"."""
    torch.ops.load_library(library)
    torch.utils.rename_privateuse1_backend("pretend")
    module = types.ModuleType("torch.pretend")
    vars(module).update(
        is_available=lambda: True,
        device_count=lambda: 1,
        current_device=lambda: 0,
        _is_in_bad_fork=lambda: False,
        manual_seed_all=lambda seed: None,  # numbers that no generator is named for are the CPU's
        get_rng_state=lambda device=0: torch.get_rng_state(),
        set_rng_state=lambda state, device=0: torch.set_rng_state(state),
        device=lambda index: nullcontext(),
        get_amp_supported_dtype=lambda: [torch.bfloat16, torch.float16],
    )
    torch._register_device_module("pretend", module)
    torch.utils.generate_methods_for_privateuse1_backend()
    # `module.to` keeps its parameters, and so what is tied, as between the CPU and a GPU.
    torch.__future__.set_swap_module_params_on_conversion(True)
    torch.utils.swap_tensors = torch._C._swap_tensor_impl
    nn.Module._load_from_state_dict = in_place(nn.Module._load_from_state_dict)  # type: ignore[method-assign]


def in_place(load: Callable[..., None]) -> Callable[..., None]:
    """It copies into parameters and buffers, as on a GPU, where they need not be swapped to move."""

    def loaded(*args: Any) -> None:
        with mock.patch.object(torch.__future__, "get_swap_module_params_on_conversion", return_value=False):
            load(*args)

    return loaded


def live_on(library: Path) -> None:
    """... and it is where this rank's tensors live."""
    load(library)
    os.environ["REFIMPL_DEVICE"] = "pretend:0"
    vars(group)["backend_of"] = lambda handle, device: "gloo" if handle else "none"
    vars(group)["libraries_of"] = lambda handle: {"pretend": "gloo"} if handle else {}
    whole = route.Route._library

    def library_of(self: route.Route, handle: Any, wish: str, deterministic: bool) -> Transport:
        return Staged(handle, "gloo", self.streams) if handle else whole(self, handle, wish, deterministic)

    route.Route._library = library_of  # type: ignore[method-assign]
    vars(control)["dumps"] = at_the_host


def at_the_host(message: Any) -> bytes:
    """A pickled object for other ranks. RuntimeError if a tensor in it is this rank's device's: they have another."""
    if any(isinstance(t, Tensor) and t.device.type == "pretend" for t in tree_leaves(message)):
        raise RuntimeError("an object with a tensor of this rank's device: the others would unpickle it onto theirs")
    return dumps(message)


def away(*tensors: Tensor) -> list[Tensor]:
    """Copies at the host. RuntimeError if one is there already."""
    if any(t.device.type != "pretend" for t in tensors):
        raise RuntimeError("a collective of tensors on the CPU: NCCL has no way for it")
    return [t.cpu() for t in tensors]


class Staged(Composed):
    """gloo's transport, of copies."""

    def __init__(self, handle: dist.ProcessGroup, backend: str, streams: Streams) -> None:
        super().__init__(handle, backend, streams)
        self.in_halves = False  # as on a GPU, whose stream goes on by itself

    def all_reduce(self, x: Tensor, op: Op) -> Steps:
        (here,) = away(x)
        yield from super().all_reduce(here, op)
        x.copy_(here)

    def reduce_scatter(self, out: Tensor, x: Tensor, op: Op) -> Steps:
        result, here = away(out, x)
        yield from super().reduce_scatter(result, here, op)
        out.copy_(result)

    def all_gather(self, chunks: list[Tensor], x: Tensor) -> Steps:
        *here, mine = away(*chunks, x)
        yield from super().all_gather(here, mine)
        for chunk, there in zip(chunks, here, strict=True):
            chunk.copy_(there)

    def all_to_all(self, out: Tensor, x: Tensor, out_splits: list[int] | None, in_splits: list[int] | None) -> Steps:
        result, here = away(out, x)
        yield from super().all_to_all(result, here, out_splits, in_splits)
        out.copy_(result)

    def broadcast(self, x: Tensor, root: int) -> Steps:
        (here,) = away(x)
        yield from super().broadcast(here, root)
        x.copy_(here)

    def send(self, x: Tensor, to: int) -> Steps:
        return super().send(*away(x), to)

    def recv(self, x: Tensor, source: int) -> Steps:
        away(x)
        return super().recv(x, source)

    def send_recv(self, x: Tensor, to: int, out: Tensor, source: int) -> Steps:
        (here, _) = away(x, out)
        return super().send_recv(here, to, out, source)
