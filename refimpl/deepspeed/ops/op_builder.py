"""What Megatron-DeepSpeed asks of the builder of kernels; nothing is built. DeepSpeed: op_builder/builder.py."""

import torch


class OpBuilder:
    """The base of DeepSpeed's builders, of which there are none here."""

    @staticmethod
    def is_rocm_pytorch() -> bool:
        """Whether this torch was made for AMD's GPUs."""
        return torch.version.hip is not None


class CPUAdamBuilder(OpBuilder):
    """Of DeepSpeedCPUAdam's kernel, which scripts build beforehand (sd-scripts)."""

    def load(self, verbose: bool = True) -> None:
        """Nothing: torch's own kernel does the work."""
