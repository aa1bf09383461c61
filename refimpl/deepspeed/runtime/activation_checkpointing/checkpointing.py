"""`deepspeed.checkpointing`: one configuration a process, as DeepSpeed has it, and `checkpoint` by it.

The work is refimpl.activation's; `refimpl.engine.activations` says what each option becomes. What is different, on
purpose: arguments stay usable after the call (DeepSpeed empties them when they are partitioned or sent to the CPU, and
refuses to see them again), any N divides any size, `torch.autograd.grad` works, inputs need no gradient, and fn's
outputs come back as they are (DeepSpeed makes a list of them a tuple, and one of one element that element).
DeepSpeed: deepspeed/runtime/activation_checkpointing/checkpointing.py.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from torch import Tensor

from refimpl.activation.arena import Contiguous
from refimpl.activation.checkpoint import Checkpoint
from refimpl.activation.home import Partitioned
from refimpl.comm.group import Group
from refimpl.deepspeed import comm
from refimpl.deepspeed.accelerator import get_accelerator
from refimpl.deepspeed.runtime.activation_checkpointing.rng import NAME, OFFSET, CudaRNGStatesTracker
from refimpl.deepspeed.runtime.config import DeepSpeedConfig
from refimpl.deepspeed.utils.groups import laid_out
from refimpl.engine.activations import checkpointer
from refimpl.engine.configuration import schema
from refimpl.engine.configuration.quote import readable
from refimpl.engine.configuration.sections import ActivationCheckpointing
from refimpl.ranks.settings import forget_groups


@dataclass
class _Configured:
    """What `configure` has said: DeepSpeed's functions take no object that could hold it."""

    enabled: bool = False
    by_hand: bool = False  # by `configure`, which wins over an engine's section
    section: ActivationCheckpointing = field(default_factory=ActivationCheckpointing)
    mpu: Any = None
    tracker: CudaRNGStatesTracker = field(default_factory=CudaRNGStatesTracker)
    said: set[str] = field(default_factory=set)  # each warning once: every `initialize` applies the section again
    how: Checkpoint = field(init=False)

    def __post_init__(self) -> None:
        self.how = Checkpoint(trackers=(self.tracker,))

    def apply(self, section: ActivationCheckpointing) -> None:
        rank = comm.get_rank() if comm.is_initialized() else 0
        self.how = checkpointer(section, _neighbours(self.mpu), rank, (self.tracker,), self.said)
        self.section = section


_configured = _Configured()
forget_groups.append(lambda: vars(_configured).update(vars(_Configured())))


def detach_variable(inputs: tuple[Any, ...], device: Any = None) -> tuple[Any, ...]:
    """The tensors among `inputs` as leaves, on `device` if one is given, that need a gradient where they did.

    For whoever writes his own checkpointing: a backward that computes again begins with them.
    """
    return tuple(x.to(device).detach().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x for x in inputs)


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """function(*args, **kwargs), computed again in backward instead of kept, as configured."""
    return _configured.how(function, *args, **kwargs)


non_reentrant_checkpoint = checkpoint


def configure(
    mpu_: Any = None,
    deepspeed_config: Mapping[str, Any] | str | Path | schema.DeepSpeedConfig | None = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Decide for every later `checkpoint`. What is given here wins over the section in `deepspeed_config`.

    `mpu_` has get_tensor_model_parallel_group() or get_model_parallel_group(): the ranks that share activations; None:
    those that share the layers of the last engine.
    AssertionError for contiguous_checkpointing without num_checkpoints, as in DeepSpeed; ValueError for a wrong value.
    """
    if mpu_ is not None:
        _configured.mpu = mpu_
    section = ActivationCheckpointing()
    if deepspeed_config is not None:
        is_read = isinstance(deepspeed_config, schema.DeepSpeedConfig)
        read = deepspeed_config if is_read else DeepSpeedConfig(deepspeed_config, mpu_)  # type: ignore[arg-type]
        section = read.activation_checkpointing  # type: ignore[union-attr]
    given = {
        "partition_activations": partition_activations,
        "contiguous_memory_optimization": contiguous_checkpointing,
        "number_checkpoints": num_checkpoints,
        "cpu_checkpointing": checkpoint_in_cpu,
        "synchronize_checkpoint_boundary": synchronize,
        "profile": profile,
    }
    section = _changed(section, {key: value for key, value in given.items() if value is not None})
    if section.contiguous_memory_optimization and section.number_checkpoints is None:
        raise AssertionError("contiguous_checkpointing needs num_checkpoints, the number of layers that checkpoint")
    _configured.apply(section)
    _configured.enabled = _configured.by_hand = True


def adopt(section: ActivationCheckpointing) -> None:
    """The section of the last engine that asks for anything, unless `configure` was called; with this engine's ranks.

    Megatron's files leave number_checkpoints out: its scripts give it to `configure`, which then counts.
    """
    if section != ActivationCheckpointing() and not _configured.by_hand:
        _configured.section, _configured.enabled = section, True
    if _configured.enabled:
        _configured.apply(_configured.section)


def is_configured() -> bool:
    """Whether `configure` was called, or an engine's configuration has the section."""
    return _configured.enabled


def reset() -> None:
    """Give back the memory of contiguous checkpointing. Nothing else is kept between iterations."""
    home = _configured.how.home
    home = home.then if isinstance(home, Partitioned) else home
    if isinstance(home, Contiguous):
        home.arenas.clear()


def partition_activations_in_checkpoint(partition_activation: bool) -> None:
    """Switch `partition_activations`, and leave the other options."""
    _configured.apply(_changed(_configured.section, {"partition_activations": partition_activation}))


def set_num_layers(nlayers: int) -> None:
    """Set `number_checkpoints`, and leave the other options."""
    _configured.apply(_changed(_configured.section, {"number_checkpoints": nlayers}))


def get_cuda_rng_tracker() -> CudaRNGStatesTracker:
    """The generators by name that `checkpoint` sets back for its second run."""
    return _configured.tracker


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seed the default generator alike on all model-parallel ranks, and one named model-parallel-rng apart on each."""
    _configured.tracker.reset()
    get_accelerator().manual_seed(seed)
    _configured.tracker.add(NAME, seed + OFFSET + _neighbours(_configured.mpu).rank)


def model_parallel_reconfigure_tp_seed(seed: int) -> None:
    """Seed model-parallel-rng anew, apart on each model-parallel rank."""
    with _configured.tracker.fork():
        get_accelerator().manual_seed(seed + OFFSET + _neighbours(_configured.mpu).rank)


def _changed(section: ActivationCheckpointing, given: Mapping[str, Any]) -> ActivationCheckpointing:
    """The section with these values. ValueError for one that it cannot have."""
    try:
        return ActivationCheckpointing(**{**section.model_dump(), **given})
    except ValidationError as error:
        raise ValueError("\n".join(readable(error, "activation_checkpointing."))) from None


def _neighbours(mpu: Any) -> Group:
    """The ranks of this one's model-parallel group; without an mpu those that share the last engine's layers."""
    for name in ("get_tensor_model_parallel_group", "get_model_parallel_group"):
        if hasattr(mpu, name):
            return Group(getattr(mpu, name)())
    return laid_out().tensor if comm.is_initialized() else Group(None)


def __getattr__(name: str) -> Any:
    """DeepSpeed's module variables, to be read. GPT-NeoX and SwissArmyTransformer take those with an underscore."""
    values = {
        "_CUDA_RNG_STATE_TRACKER": _configured.tracker,
        "_MODEL_PARALLEL_RNG_TRACKER_NAME": NAME,
        "_set_cuda_rng_state": get_accelerator().set_rng_state,
        "PARTITION_ACTIVATIONS": _configured.section.partition_activations,
        "CONTIGUOUS_CHECKPOINTING": _configured.section.contiguous_memory_optimization,
        "CPU_CHECKPOINT": _configured.section.cpu_checkpointing,
        "SYNCHRONIZE": _configured.section.synchronize_checkpoint_boundary,
        "PROFILE_TIME": _configured.section.profile,
        "num_layers": _configured.section.number_checkpoints,
        "mpu": _configured.mpu,
        "deepspeed_checkpointing_enabled": _configured.enabled,
    }
    if name not in values:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return values[name]
