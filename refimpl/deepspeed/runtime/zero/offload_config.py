"""The devices of offload, as scripts name them. DeepSpeed: deepspeed/runtime/zero/offload_config.py."""

from enum import StrEnum


class OffloadDeviceEnum(StrEnum):
    """Where optimizer states or parameters rest."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"
