"""One batch for many numbers of ranks, under DeepSpeed's names.

DeepSpeed: deepspeed/elasticity; ours: refimpl/engine/configuration/elasticity.py.

Its agent, which starts ranks again when some are lost, is torchrun's: `torchrun --nnodes MIN:MAX`.
"""

from refimpl.deepspeed.absent import absent
from refimpl.deepspeed.elasticity import config, constants
from refimpl.deepspeed.elasticity.constants import ELASTICITY, ENABLED, ENABLED_DEFAULT
from refimpl.deepspeed.elasticity.elasticity import (
    compute_elastic_config,
    elasticity_enabled,
    ensure_immutable_elastic_config,
)

__all__ = [
    "ELASTICITY", "ENABLED", "ENABLED_DEFAULT", "DSElasticAgent", "compute_elastic_config", "config", "constants",
    "elasticity_enabled", "ensure_immutable_elastic_config", "is_torch_elastic_compatible",
]  # fmt: skip

DSElasticAgent = absent(
    "deepspeed.elasticity.DSElasticAgent", "torchrun --nnodes MIN:MAX -m refimpl.as_deepspeed script.py has an agent"
)


def is_torch_elastic_compatible() -> bool:
    """Every torch that refimpl runs on has torchrun's agent."""
    return True
