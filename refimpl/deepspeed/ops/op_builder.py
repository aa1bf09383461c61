"""The builders of DeepSpeed's kernels by their names. Nothing is built: `load` gives the module that does the kernel's
work here, and a kernel without one is not compatible. DeepSpeed: op_builder/builder.py, all_ops.py."""

from importlib import import_module
from types import ModuleType

import torch


class OpBuilder:
    """Of one kernel."""

    NAME = "deepspeed_not_implemented"
    here = ""  # the module of this project that does its work

    @staticmethod
    def is_rocm_pytorch() -> bool:
        """Whether this torch was made for AMD's GPUs."""
        return torch.version.hip is not None

    def is_compatible(self, verbose: bool = False) -> bool:
        """Whether this project does what the kernel does."""
        return bool(self.here)

    def load(self, verbose: bool = True) -> ModuleType:
        """The module that does it. Scripts call this ahead of a run, so that DeepSpeed compiles once."""
        if not self.here:
            raise NotImplementedError(
                f"deepspeed.ops.op_builder.{type(self).__name__}: {self.NAME} is not part of this project"
            )
        return import_module(self.here)


OPS = "refimpl.deepspeed.ops."
ALL_OPS: dict[str, type[OpBuilder]] = {
    name: type(builder, (OpBuilder,), {"NAME": name, "here": module, "__doc__": f"Of {name}."})
    for builder, name, module in (
        ("AsyncIOBuilder", "async_io", OPS + "aio"),
        ("CPUAdagradBuilder", "cpu_adagrad", OPS + "adagrad"),
        ("CPUAdamBuilder", "cpu_adam", OPS + "adam"),
        ("CPULionBuilder", "cpu_lion", OPS + "lion"),
        ("FusedAdamBuilder", "fused_adam", OPS + "adam"),
        ("FusedLambBuilder", "fused_lamb", OPS + "lamb"),
        ("FusedLionBuilder", "fused_lion", OPS + "lion"),
        ("SparseAttnBuilder", "sparse_attn", OPS + "sparse_attention"),
        ("EvoformerAttnBuilder", "evoformer_attn", OPS + "deepspeed4science"),
        ("FPQuantizerBuilder", "fp_quantizer", ""),
        ("GDSBuilder", "gds", ""),
        ("InferenceBuilder", "transformer_inference", ""),
        ("QuantizerBuilder", "quantizer", ""),
        ("RandomLTDBuilder", "random_ltd", ""),
        ("StochasticTransformerBuilder", "stochastic_transformer", ""),
        ("TransformerBuilder", "transformer", ""),
        ("UtilsBuilder", "utils", ""),
    )
}
globals().update({op.__name__: op for op in ALL_OPS.values()})
