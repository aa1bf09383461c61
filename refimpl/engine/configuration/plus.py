"""From the ZeRO++ and MiCS keys to the stage's own configuration: see `refimpl.zero.gather.plus` for what each does.

As in DeepSpeed they are of stage 3 alone and have no effect in the others; engine/config.py drops them, with a warning.
DeepSpeed: deepspeed/runtime/zero/config.py.
"""

from dataclasses import replace

from refimpl.engine.configuration.keys import ConfigError
from refimpl.engine.configuration.schema import DeepSpeedConfig
from refimpl.zero.config import LoCo, ZeroConfig


def with_plus(zero: ZeroConfig, settings: DeepSpeedConfig) -> ZeroConfig:
    """`zero` with what the configuration asks for. ConfigError names the key."""
    section, loco = settings.zero_optimization, settings.zero_optimization.zeropp_loco_param
    try:
        return replace(
            zero,
            zero_quantized_weights=section.zero_quantized_weights,
            zero_quantized_nontrainable_weights=section.zero_quantized_nontrainable_weights,
            zero_hpz_partition_size=max(1, section.zero_hpz_partition_size),
            zero_quantized_gradients=section.zero_quantized_gradients,
            zeropp_loco_param=None if loco is None else LoCo(loco.err_beta, loco.reset_T),
            mics_hierarchical_params_gather=section.mics_hierarchical_params_gather,
        )
    except ValueError as error:
        raise ConfigError(str(error).replace("ZeroConfig.", "zero_optimization.")) from error
