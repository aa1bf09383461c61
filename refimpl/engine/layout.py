"""The axes that a configuration asks for, and what must be so before an engine is built on them.

Ranks that disagree would wait for each other for ever.
"""

from collections.abc import Collection, Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from refimpl.comm.axes import Axes
from refimpl.engine.configuration.keys import ConfigError
from refimpl.engine.configuration.schema import DeepSpeedConfig
from refimpl.engine.configuration.values import whole_number
from refimpl.optim.one_bit_lamb import OneBitLamb
from refimpl.optim.travelling import Travelling

# What ranks would wait for each other for ever over, and what would let their weights part in silence.
ALIKE = (
    "zero_optimization", "gradient_accumulation_steps", "train_micro_batch_size_per_gpu", "train_batch_size",
    "managed_gradient_accumulation", "gradient_clipping", "gradient_allreduce_op", "gradient_compression",
    "prescale_gradients", "gradient_predivide_factor", "communication_data_type",
    "seq_parallel_communication_data_type", "data_types", "fp16", "bf16", "torch_autocast", "optimizer", "scheduler",
    "tensor_parallel", "expert_parallel", "sparse_attention", "compression_training", "checkpoint",
)  # fmt: skip


# Which key asks for an axis.
AXIS_KEYS = {
    "pp": "pipeline.stages",
    "cp": "sequence_parallel_size",
    "tp": "tensor_parallel.autotp_size",
    "shard": "zero_optimization.mics_shard_size",
}


def axes_asked(raw: Mapping[str, Any]) -> dict[str, int]:
    """The ranks on each axis that a configuration names, 1 where it names none, see `Axes`.

    What is no size is left for `load_config` to refuse.
    """
    sections = {name: raw.get(name) for name in ("pipeline", "tensor_parallel", "zero_optimization")}
    inside = {name: section if isinstance(section, Mapping) else {} for name, section in sections.items()}
    found = {
        "pp": inside["pipeline"].get("stages"),
        "cp": raw.get("sequence_parallel_size"),
        "tp": inside["tensor_parallel"].get("autotp_size"),
    }
    known = {axis: whole_number(size) for axis, size in found.items()}
    shard = whole_number(inside["zero_optimization"].get("mics_shard_size"), otherwise=0)
    if shard and shard % known["cp"] == 0:
        known["shard"] = shard // known["cp"]  # context ranks share their replica's state too
    return known


def check_layout(config: DeepSpeedConfig, axes: Axes, own_stages: bool) -> None:
    """ConfigError where the file asks for another layout than there is: a PipelineModule and an mpu have their own."""
    asked = {
        "pipeline.stages": (None if own_stages else config.pipeline.stages, axes.pipeline.size),
        "tensor_parallel.autotp_size": (config.tensor_parallel.autotp_size, axes.tensor.size),
        "sequence_parallel_size": (config.sequence_parallel_size, axes.context.size),
    }
    wrong = [(key, size, there) for key, (size, there) in asked.items() if (size or 1) > 1 and size != there]
    if config.data_parallel_size not in (None, axes.feeds):
        wrong.append(("data_parallel_size", config.data_parallel_size, axes.feeds))
    together = axes.world.size // axes.feeds
    if config.elasticity is not None and config.elasticity.model_parallel_size != together:
        wrong.append(("elasticity.model_parallel_size", config.elasticity.model_parallel_size, together))
    if (shard := config.zero_optimization.mics_shard_size) > 0 and shard != axes.shards.size:
        wrong.append(("zero_optimization.mics_shard_size", shard, axes.shards.size))
    if wrong:
        raise ConfigError(
            "\n".join(f"{key} = {size}, but the ranks are laid out with {there}" for key, size, there in wrong)
        )


def check_agreed(config: DeepSpeedConfig, axes: Axes) -> None:
    """ConfigError on all ranks where they were given other configurations, by the keys that differ."""
    said = axes.world.all_gather_object(leaves(config.model_dump(include=set(ALIKE), mode="json")))
    wrong = []
    for key in dict.fromkeys(key for one in said for key in one):
        values = [one.get(key, "nothing") for one in said]
        if any(value != values[0] for value in values):
            each = ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))
            wrong.append(f"{key} differs between ranks: {each}; give all of them the same configuration")
    if wrong:
        raise ConfigError("\n".join(wrong))


def leaves(values: Any, path: str = "") -> dict[str, Any]:
    """What is no section, by its full path."""
    if not isinstance(values, dict):
        return {path: values}
    return {k: v for name, inside in values.items() for k, v in leaves(inside, f"{path}.{name}".lstrip(".")).items()}


def check_whole(optimizer: Optimizer | None, axes: Axes, copies: Collection[nn.Parameter]) -> None:
    """ConfigError for an optimizer that would see parts where it needs whole parameters. A collective of one kind.

    copies: see `counted_elsewhere`. A momentum that travels compressed would no longer be the same in all copies: they
    share the scales of their blocks with numbers that are not copies.
    """
    name, travels = type(optimizer).__name__, isinstance(optimizer, Travelling)
    by_layer = getattr(optimizer, "layerwise", False) or isinstance(optimizer, OneBitLamb)
    if axes.tensor.size > 1 and (travels or by_layer):
        parts, alike = "parts of the layers that it treats as wholes", "copies that it would not compress alike"
        raise ConfigError(
            f"optimizer.type {name}: tensor ranks have {parts if by_layer else alike}; set tensor_parallel.autotp_size "
            "to 1"
        )
    if travels and any(axes.model.all_gather_object(bool(copies))):
        raise ConfigError(
            f"optimizer.type {name}: pipeline stages that share a layer would not compress it alike; tie no layers"
        )
