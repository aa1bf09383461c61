"""AutoTP's switch, and its layers for `isinstance`. DeepSpeed: deepspeed/module_inject/layers.py.

Ours: refimpl/parallel/autotp.py, refimpl/parallel/tensor.py.
"""

from refimpl.parallel.tensor import ColumnParallelLinear as LinearLayer
from refimpl.parallel.tensor import RowParallelLinear as LinearAllreduce

__all__ = ["LinearAllreduce", "LinearLayer", "set_autotp_mode"]


def set_autotp_mode(training: bool = False) -> None:
    """Nothing to do for training. NotImplementedError for inference."""
    if not training:
        raise NotImplementedError("set_autotp_mode(training=False): not part of this project: inference kernels")
