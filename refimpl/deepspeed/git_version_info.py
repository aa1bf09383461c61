"""Which DeepSpeed this is, and which of its operators there are; none is compiled. DeepSpeed: git_version_info.py."""

import torch
from torch.cuda import nccl

from refimpl.as_deepspeed import VERSION
from refimpl.deepspeed.ops.op_builder import ALL_OPS, OpBuilder

version = VERSION
git_hash = git_branch = "refimpl"
installed_ops = dict.fromkeys(ALL_OPS, False)
compatible_ops = {name: op().is_compatible() for name, op in ALL_OPS.items()} | {OpBuilder.NAME: False}


def _of(version: str | None) -> str:
    """Its first two numbers; "0.0" where there is none."""
    return ".".join(version.split(".")[:2]) if version else "0.0"


torch_info = {
    "version": _of(torch.__version__),
    "cuda_version": _of(torch.version.cuda),
    "hip_version": _of(torch.version.hip),
    "nccl_version": _of(".".join(map(str, nccl.version())) if torch.version.cuda else None),  # type: ignore[no-untyped-call]
}
accelerator_name = ""  # that its kernels were built for
