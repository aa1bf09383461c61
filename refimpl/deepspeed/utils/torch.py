"""Which torch this is. DeepSpeed: deepspeed/utils/torch.py."""

import torch


def required_torch_version(min_version: float | str | None = None, max_version: float | str | None = None) -> bool:
    """Whether torch is at least `min_version` and at most `max_version`, each major.minor, such as 2.1."""
    if min_version is None and max_version is None:
        raise ValueError("required_torch_version: give min_version, max_version or both")
    here = of(torch.__version__)
    return (min_version is None or of(min_version) <= here) and (max_version is None or here <= of(max_version))


def of(version: float | str) -> tuple[int, int]:
    """(major, minor) of such as 2.11.0+cpu."""
    major, minor = str(version).split(".")[:2]
    return int(major), int(minor)
