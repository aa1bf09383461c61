"""What is trained, by which optimizer and on which schedule: the caller's, or what the configuration names.

DeepSpeed's counterpart: `_configure_basic_optimizer` and `_configure_lr_scheduler` in deepspeed/runtime/engine.py.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from refimpl.comm.axes import Axes
from refimpl.engine.configuration import arguments
from refimpl.engine.configuration.arguments import flag
from refimpl.engine.configuration.keys import ConfigError
from refimpl.engine.configuration.sections import Optimizer as OptimizerSection
from refimpl.engine.configuration.sections import Scheduler as SchedulerSection
from refimpl.engine.heads import BY_HEADS, forget_heads, mark_heads
from refimpl.engine.names import optimizer_named, schedule_named
from refimpl.parallel.pipeline.module import PipelineModule
from refimpl.zero.flat import groups_of
from refimpl.zero.gather.saved import every_name

Parameters = Iterable[Tensor] | Iterable[dict[str, Any]]
MakeOptimizer = Callable[[list[Any]], Optimizer]
T = TypeVar("T")


class Ungrouped(dict[str, Any]):
    """The group of tensors that came in none: a caller's callable gets them as they came."""


def names_of(model: nn.Module, parameters: Parameters | None, optimizer: Any) -> list[dict[str, Any]]:
    """What is to be optimized, in groups, by its names in the model before it is cut."""
    if isinstance(optimizer, Optimizer):
        if optimizer.state:
            raise ConfigError(
                f"optimizer: this {type(optimizer).__name__} has stepped, and has state of the whole model's tensors, "
                "of which each rank keeps a part: make it anew"
            )
        groups_of(optimizer, model)  # refuses another model's
        parameters = optimizer.param_groups
    names = {p: name for name, p in model.named_parameters()}
    return [type(group)(group, params=[names[p] for p in group["params"]]) for group in trainable(model, parameters)]


def found_again(model: nn.Module, named: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same groups of what this rank has of them."""
    whole = model.name_in_whole if isinstance(model, PipelineModule) else str
    here = {whole(name): p for name, p in every_name(model)}
    here |= {model.first_of(p): p for p in model.repeated} if isinstance(model, PipelineModule) else {}
    return [type(group)(group, params=[here[name] for name in group["params"] if name in here]) for group in named]


def hand_over(optimizer: Optimizer, groups: list[dict[str, Any]]) -> None:
    """What this rank has of an optimizer's groups, to a caller's who made it before the model was cut."""
    for group, here in zip(optimizer.param_groups, groups, strict=True):
        group["params"] = here["params"]


def trainable(model: nn.Module, parameters: Parameters | None, is_stage: bool = False) -> list[Any]:
    """The tensors or parameter groups to optimize; all of the model's by default. Frozen ones wait to be unfrozen.

    is_stage: others may have all that is trained, as pipeline stages and ranks with other experts.

    ValueError when one of them is not a parameter of `model`: its gradient would never be reduced.
    """
    known = set(model.parameters())
    given = list(model.parameters()) if parameters is None else list(parameters)
    make: type[dict[str, Any]] = Ungrouped if any(isinstance(g, Ungrouped) for g in given) else dict
    groups = [make(g) for g in given if isinstance(g, dict)] or [Ungrouped(params=given)]
    if len(groups) < len(given) and any(isinstance(g, dict) for g in given):
        raise ValueError("model_parameters: tensors beside groups: put them in a group too, {'params': [...]}")
    for number, group in enumerate(groups):
        if "params" not in group:
            raise ValueError(f"model_parameters: group {number} has no 'params', only {', '.join(group) or 'nothing'}")
        tensors = group["params"]
        tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        for tensor in tensors:
            if not isinstance(tensor, Tensor):
                kind = type(tensor).__name__
                raise ValueError(f"model_parameters: group {number} has a {kind}, no tensor: pass model.parameters()")
            if tensor not in known:
                raise ValueError(
                    f"model_parameters: group {number} has a tensor {tuple(tensor.shape)} that `model` does not have: "
                    "give its own alone, or hand over as model one nn.ModuleList of both modules"
                )
        group["params"] = tensors
    if not is_stage and parameters is not None and not any(group["params"] for group in groups):
        raise ValueError("model_parameters: empty: an iterator that was used up before? Pass list(model.parameters())")
    if not is_stage and not any(tensor.requires_grad for group in groups for tensor in group["params"]):
        raise ValueError("model_parameters: nothing to train; every parameter has requires_grad=False")
    return groups


def make_optimizer(
    client: Optimizer | MakeOptimizer | None, section: OptimizerSection | None, parameters: list[Any]
) -> Optimizer:
    """The caller's optimizer, or what its callable makes of `parameters`, or the one that the file names.

    A callable gets tensors where tensors were given, groups where groups were, as in DeepSpeed.
    """
    if isinstance(client, Optimizer):
        return client
    if client is not None:
        if not callable(client):
            raise TypeError(
                f"optimizer: a {type(client).__name__} is neither a torch.optim.Optimizer nor what makes one. "
                "Of a wrapper, hand over the optimizer inside"
            )
        tensors = [p for group in parameters if isinstance(group, Ungrouped) for p in group["params"]]
        made = client(tensors or parameters)  # torch takes an empty group, as of a pipeline's stage, but no empty list
        if not isinstance(made, Optimizer):
            raise TypeError(f"optimizer: the callable returned {type(made).__name__}, not a torch.optim.Optimizer")
        return made
    assert section is not None
    return named_optimizer(section.type, parameters, section.params)


def named_optimizer(name: str, parameters: list[Any], params: Mapping[str, Any]) -> Optimizer:
    """An optimizer by DeepSpeed's or torch's name; `names.optimizer_named` says what the names mean."""
    make, options = optimizer_named(name, params)
    return checked("optimizer", make, parameters, options)


def mark_hidden(model: nn.Module, section: OptimizerSection | None, axes: Axes) -> None:
    """Where the file names Muon: which parameters are its own and which AdamW's, by their names, as in DeepSpeed.

    What has a mark, `parameter.use_muon`, keeps it. DeepSpeed goes by the first name of what is tied, which is GPT-2's
    `wte`, and not `lm_head`: `set_optimizer_flags` in deepspeed/__init__.py.
    """
    if section is None or section.type.lower() != "muon":
        return
    named = list(every_name(model))
    outer = {p for name, p in named if any(word in name.lower() for word in ("embed", "lm_head"))}
    for _, p in named:
        if not hasattr(p, "use_muon"):
            p.use_muon = p.ndim > 1 and p not in outer  # type: ignore[attr-defined]
    forget_heads(model)
    by_heads = flag(f"optimizer.params.{BY_HEADS}", section.params.get(BY_HEADS, False))
    if by_heads and axes.tensor.size == 1:  # tensor ranks have parts of heads: `check_whole` refuses Muon for them
        mark_heads(model, axes.pipeline)


def make_scheduler(client: Any | None, section: SchedulerSection | None, optimizer: Optimizer) -> Any | None:
    """The caller's schedule, or what its callable makes of the optimizer, or the one that the file names, or None.

    ValueError for two schedules: DeepSpeed then drops the one that the file names without a word.
    """
    if client is not None and section is not None:
        raise ValueError("lr_scheduler: given twice, as an argument and as `scheduler` in config; keep one")
    if client is not None:
        schedule = client(optimizer) if callable(client) else client
        if isinstance(schedule, LRScheduler) and schedule.optimizer.param_groups is not optimizer.param_groups:
            raise ValueError(
                f"lr_scheduler: {type(schedule).__name__} moves the rates of another optimizer, not of the one that "
                "trains; give a callable that makes it: lambda optimizer: ..."
            )
        return schedule
    if section is None:
        return None
    return checked("scheduler", schedule_named(section.type), optimizer, section.params)


def checked(section: str, make: Callable[..., T], first: Any, params: Mapping[str, Any]) -> T:
    """make(first, **params), after a check of the parameters. ConfigError names the parameter, else the section."""
    values = arguments.read(section, make, params)
    try:
        return make(first, **values)
    except Exception as error:  # whatever a class of torch has to say about its arguments
        raise ConfigError(f"{section}.params: {getattr(make, '__name__', make)}: {error}") from error
