"""Which DeepSpeed this is, and which operators were compiled for it: none. DeepSpeed's file: git_version_info.py."""

from refimpl.as_deepspeed import VERSION

version = VERSION
git_hash = git_branch = "refimpl"
installed_ops: dict[str, bool] = {}
compatible_ops = {"deepspeed_not_implemented": False}  # its one name that is no operator
