"""What scripts that train with AutoTP import from here; kernels are injected nowhere."""

from refimpl.deepspeed.module_inject import layers

__all__ = ["layers"]
