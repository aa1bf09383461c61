"""What is asked of the monitors, apart from an engine. DeepSpeed: deepspeed/monitor/config.py."""

from collections.abc import Mapping
from typing import Any

from refimpl.engine.config import load_config
from refimpl.engine.configuration.monitors import Monitors as DeepSpeedMonitorConfig

__all__ = ["DeepSpeedMonitorConfig", "get_monitor_config"]


def get_monitor_config(param_dict: Mapping[str, Any]) -> DeepSpeedMonitorConfig:
    """The monitors' sections of a whole configuration. ConfigError names a wrong key, or a monitor that is not here."""
    sections = {
        key: param_dict[key] for key in ("tensorboard", "wandb", "csv_monitor", "comet", "trackio") if key in param_dict
    }
    return load_config({"train_batch_size": 1, **sections}, world_size=1).monitor_config
