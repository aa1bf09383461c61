"""ZeRO-3's parameters as DeepSpeed's users see them: `Init`, `GatheredParameters`, and what a parameter answers.

    p.ds_id, ds_shape, ds_numel     of the whole parameter
    p.ds_status                     NOT_AVAILABLE, INFLIGHT or AVAILABLE
    p.ds_tensor                     what this rank has of it, one-dimensional, in the training dtype: as the fragments
                                    of deepspeed.utils.safe_get_local_*; may be written: see fragment.py
    p.partition_numel()             its elements; DeepSpeed counts padding too
    p.ds_secondary_tensor           with zero_hpz_partition_size > 1 this rank's second shard of its unit; else, and of
                                    one that stays whole, None
    p.ds_zero_param_process_group   the ranks that share it
    p.ds_persist                    whether it stays whole, as small ones do: AVAILABLE then, and `partition` lets it be
    p.all_gather(), p.partition()   make it whole, and let it go; collectives

As in DeepSpeed only a parameter of ZeRO-3 has these: `hasattr(p, "ds_id")` tells (any answers for its second shard).
The `ds_` ones a tensor answers too that backward hands out in a parameter's place (`ctx.saved_tensors`): see `leaf_of`.
Parameters of a module are gathered together, as a unit, and share its status. DeepSpeed:
deepspeed/runtime/zero/partition_parameters.py.
"""

from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from refimpl.comm.group import Group
from refimpl.deepspeed.accelerator import get_accelerator
from refimpl.deepspeed.runtime.zero.fragment import Fragment
from refimpl.engine.assemble import connect
from refimpl.engine.configuration.read import read_json
from refimpl.offload.homes import Host
from refimpl.zero import init
from refimpl.zero.gather.secondary import Secondary
from refimpl.zero.gather.unit import Unit, unit_of
from refimpl.zero.gather.watch import leaf_of
from refimpl.zero.init import GatheredParameters
from refimpl.zero.parameter import Managed, stage_of
from refimpl.zero.zero3 import Zero3

__all__ = [
    "GatheredParameters", "Init", "MiCS_Init", "ZeroParamStatus", "ZeroParamType", "get_accelerator",
    "register_external_parameter", "restore_init_context", "shutdown_init_context", "unregister_external_parameter",
    "zero_wrapper_for_fp_tensor_constructor",
]  # fmt: skip


PLUS = ("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_param_parallel_group")


class ZeroParamType(Enum):
    """What is done with a parameter."""

    NORMAL = 1  # the same on every rank
    PARTITIONED = 2  # sharded
    REMOTE = 3  # on another device


class ZeroParamStatus(Enum):
    """Where a sharded parameter is."""

    AVAILABLE = 1  # whole
    NOT_AVAILABLE = 2  # only in shards
    INFLIGHT = 3  # on its way


class Init(init.Init):
    """Shard a model while it is built, over the launcher's ranks, in `dtype` or the dtype that the configuration says.

    Without either it is built in its own dtype and cast by `initialize`: the same bits, more memory on the way.
    `module`: one that is built already, sharded at once. `mpu`: whose data-parallel group it is, unless one is given.
    `remote_device`: "cpu" keeps the shards at the host till `initialize`, as offload_param in the configuration does,
    whichever its device; "nvme" is that, too, beside an offload_param that says where on the disk they rest then.
    `mem_efficient_linear` and `pin_memory` change nothing here.
    """

    open: ClassVar[list["Init"]] = []  # whose blocks are not over, the outermost first

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: Group | torch.distributed.ProcessGroup | None = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: Mapping[str, Any] | str | Path | None = None,
        config: Mapping[str, Any] | str | Path | None = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: Any = None,
        **more: Any,
    ) -> None:
        _refuse(more)
        given = config if config_dict_or_path is None else config_dict_or_path
        raw = given if given is None or isinstance(given, Mapping) else read_json(Path(given))
        rests = None if raw is None else _offloaded(raw)
        if remote_device not in (None, "none", "cpu", "cuda", rests):
            raise NotImplementedError(
                f"zero.Init: remote_device={remote_device!r}: not part of this project; leave it out, or give "
                "zero_optimization.offload_param the same device in the configuration"
            )
        if raw is not None:
            dtype, remote_device = dtype or _dtype(raw), rests or remote_device
        group = data_parallel_group
        if group is None and mpu is not None and enabled:
            group = mpu.get_data_parallel_group()
        if isinstance(group, torch.distributed.ProcessGroup):
            group = Group(group)
        home = Host() if remote_device in ("cpu", "nvme") else None
        super().__init__((group or connect()) if enabled else group, dtype, enabled, home)
        for each in module.modules() if module is not None and enabled else []:
            self._built(each)

    def __enter__(self) -> "Init":
        super().__enter__()
        self.open.append(self)
        return self

    def __exit__(self, *error: object) -> None:
        self.open.remove(self)
        super().__exit__(*error)


def shutdown_init_context() -> None:
    """What is built from here on is whole, inside `with Init():` too, until `restore_init_context`."""
    for each in reversed(Init.open):
        init.Init.__exit__(each)


def restore_init_context() -> None:
    """The blocks that are not over shard again what is built."""
    for each in Init.open:
        init.Init.__enter__(each)


class MiCS_Init(Init):
    """As `Init`: the model is sharded over all ranks while it is built, and by `initialize` over mics_shard_size."""


def _dtype(raw: Mapping[str, Any]) -> torch.dtype | None:
    """bf16 or fp16, whichever section is enabled."""
    dtypes = {"bf16": torch.bfloat16, "bfloat16": torch.bfloat16, "fp16": torch.float16}
    sections = {key: raw.get(key) for key in dtypes}
    return next((dtypes[k] for k, s in sections.items() if isinstance(s, Mapping) and s.get("enabled") is True), None)


def _offloaded(raw: Mapping[str, Any]) -> str | None:
    """Where the configuration has parameters rest, if it says."""
    found: Any = raw
    for key in ("zero_optimization", "offload_param", "device"):
        found = found.get(key) if isinstance(found, Mapping) else None
    return None if found is None else str(found)


def _refuse(more: Mapping[str, Any]) -> None:
    wanted = [name for name, value in more.items() if value]
    if wanted and all(name in PLUS for name in wanted):
        raise NotImplementedError(f"zero.Init: {', '.join(wanted)}: say it in the configuration of `initialize`")
    if wanted:
        raise NotImplementedError(f"zero.Init: {', '.join(wanted)}: not part of this project; leave it out")


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Nothing to do: a parameter that another module reads is noticed when it is read."""
    if not isinstance(parameter, nn.Parameter):
        raise RuntimeError(f"register_external_parameter: a torch.nn.Parameter, not {type(parameter).__name__}")


unregister_external_parameter = register_external_parameter

_orig_torch_arange = torch.arange


def zero_wrapper_for_fp_tensor_constructor(
    fn: Callable[..., Tensor], *args: Any, **kwargs: Any
) -> Callable[..., Tensor]:
    """`fn`: `Init` casts parameters, and leaves torch's constructors alone. transformers replaces this function."""
    return fn


# What a sharded parameter answers. The class is refimpl's own; these names are DeepSpeed's, so they are given here.


def _unit(p: nn.Parameter) -> Unit | None:
    """None for one that stays whole. AttributeError for one that is not ZeRO-3's."""
    unit = unit_of(p)
    if unit is None and not isinstance(stage_of(p), Zero3):
        raise AttributeError("this parameter is not sharded: only ZeRO-3's have DeepSpeed's attributes")
    return unit


def _units(params: Iterable[nn.Parameter]) -> list[Unit]:
    return [unit for unit in dict.fromkeys(map(_unit, params)) if unit is not None]


def _of(p: nn.Parameter, answer: Any) -> Any:
    """`answer`, if p is ZeRO-3's."""
    _unit(p)
    return answer


def _set_mine(p: nn.Parameter, value: Tensor) -> None:
    _of(p, Fragment.of(p)).data = value


def _ranks(p: nn.Parameter) -> Any:
    unit, stage = _unit(p), stage_of(p)
    return unit.group.handle if unit is not None else stage.group.handle if stage is not None else None


def _status(p: nn.Parameter) -> ZeroParamStatus:
    unit = _unit(p)
    if unit is None:
        return ZeroParamStatus.AVAILABLE
    if unit.is_free:
        return ZeroParamStatus.NOT_AVAILABLE
    return ZeroParamStatus.INFLIGHT if unit.in_flight else ZeroParamStatus.AVAILABLE


def _all_gather(p: nn.Parameter, param_list: Iterable[nn.Parameter] | None = None, async_op: bool = False) -> None:
    """Make p, or all of `param_list`, whole: until `partition`, or until the module that uses it is done with it."""
    units = _units(param_list or [p])
    for unit in units:
        unit.start()
    for unit in units:
        unit.wait()
        unit.is_shown = True


def _partition(
    p: nn.Parameter, param_list: Iterable[nn.Parameter] | None = None, has_been_updated: bool = False
) -> None:
    """Let p, or all of `param_list`, go; with `has_been_updated`, take over rank 0's values first."""
    for unit in _units(param_list or [p]):
        if has_been_updated:
            unit.adopt(root=0)
        unit.free()


def _second(p: nn.Parameter) -> Secondary | None:
    unit = unit_of(p)
    return unit.way if unit is not None and isinstance(unit.way, Secondary) else None


def _answers(name: str, answer: Callable[[nn.Parameter], Any], put: Callable[..., None] | None = None) -> None:
    setattr(Managed, name, property(answer, put))


_answers("ds_id", lambda p: _of(p, id(p)))
_answers("ds_shape", lambda p: _of(p, p.shape))
_answers("ds_numel", lambda p: _of(p, p.numel()))
_answers("ds_status", _status)
_answers("ds_tensor", lambda p: _of(p, Fragment.of(p)), _set_mine)
_answers("partition_numel", lambda p: _of(p, Fragment.of(p).numel))
_answers("ds_persist", lambda p: _unit(p) is None)
_answers("ds_process_group", _ranks)
_answers("ds_secondary_tensor", lambda p: None if (way := _second(p)) is None else way.mine)
_answers("ds_zero_param_process_group", lambda p: None if (way := _second(p)) is None else way.block.handle)
_answers("all_gather", lambda p: _of(p, partial(_all_gather, p)))
_answers("partition", lambda p: _of(p, partial(_partition, p)))


def _in_place_of(name: str, tensor: Tensor) -> Any:
    """What the parameter answers that `tensor` was saved as."""
    leaf = leaf_of(tensor)
    if not isinstance(leaf, Managed):
        raise AttributeError(f"'{type(tensor).__name__}' object has no attribute '{name}'")
    return getattr(leaf, name)


for _name in [name for name in vars(Managed) if name.startswith("ds_")]:
    setattr(Tensor, _name, property(partial(_in_place_of, _name)))
