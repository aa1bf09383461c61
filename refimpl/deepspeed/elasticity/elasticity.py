"""What a scheduler asks before it starts ranks.

DeepSpeed until 0.19.7: deepspeed/elasticity/elasticity.py; ours: refimpl/engine/configuration/elasticity.py.
"""

import os
import re
from collections.abc import Mapping
from typing import Any

from refimpl.deepspeed.elasticity.config import ElasticityConfigError, ElasticityError
from refimpl.deepspeed.elasticity.constants import MINIMUM_DEEPSPEED_VERSION
from refimpl.engine.configuration import elasticity
from refimpl.engine.configuration.batch import MICRO
from refimpl.engine.configuration.quote import quote
from refimpl.engine.configuration.sections import Elasticity

__all__ = ["compute_elastic_config", "elasticity_enabled", "ensure_immutable_elastic_config"]


def compute_elastic_config(
    ds_config: Mapping[str, Any], target_deepspeed_version: str, world_size: int = 0, return_microbatch: bool = False
) -> tuple[int, list[int]] | tuple[int, list[int], int]:
    """(batch, numbers of data-parallel ranks that share it), and the micro-batch where there is a world size.

    world_size: data-parallel ranks; where it is 0 and return_microbatch asks, WORLD_SIZE in the environment says it, of
    all ranks. (DeepSpeed divides by zero there in version 0.1, and in 0.2 wants WORLD_SIZE in any case.)
    ElasticityError for a section that is off or wrong, ranks that do not share the batch, and too old a DeepSpeed.
    """
    section = _section(ds_config)
    if _numbers(target_deepspeed_version) < _numbers(MINIMUM_DEEPSPEED_VERSION):
        raise ElasticityError(
            f"target_deepspeed_version {target_deepspeed_version}: elasticity begins with {MINIMUM_DEEPSPEED_VERSION}"
        )
    shared = elasticity.shared(section)
    if world_size == 0 and return_microbatch:
        world_size = _of_environment(section.model_parallel_size)
    if world_size == 0:
        return shared.batch, list(shared.ranks)
    return shared.batch, list(shared.ranks), shared.triple(world_size)[MICRO]


def elasticity_enabled(ds_config: Mapping[str, Any]) -> bool:
    """Whether the section is there and on."""
    return bool((ds_config.get("elasticity") or {}).get("enabled"))


def ensure_immutable_elastic_config(runtime_elastic_config_dict: Mapping[str, Any]) -> None:
    """ElasticityConfigError where DEEPSPEED_ELASTICITY_CONFIG is set and says something else than this section."""
    elasticity.check_scheduler(_section({"elasticity": runtime_elastic_config_dict}))


def _section(ds_config: Mapping[str, Any]) -> Elasticity:
    if not isinstance(ds_config, Mapping):
        raise ValueError(f"ds_config: must be a dictionary, not {quote(ds_config)}")
    section = elasticity.read(ds_config)
    if section is None:
        raise ElasticityConfigError("elasticity.enabled: must be true, to train elastically; it is off or not there")
    return section


def _numbers(version: str) -> list[int]:
    """ "0.19.8+ours" -> [0, 19, 8]."""
    return [int(digits) for digits in re.findall(r"\d+", version)[:3]]


def _of_environment(model_parallel_size: int) -> int:
    """Data-parallel ranks, by WORLD_SIZE."""
    ranks = os.environ.get("WORLD_SIZE", "")
    if not ranks.isdecimal() or int(ranks) < model_parallel_size:
        raise ElasticityConfigError(
            f"WORLD_SIZE = {ranks!r} in the environment: give compute_elastic_config world_size"
        )
    return int(ranks) // model_parallel_size
