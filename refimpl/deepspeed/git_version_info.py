"""Which DeepSpeed is meant. DeepSpeed: git_version_info.py."""

from refimpl.as_deepspeed import VERSION

version = VERSION
git_hash = git_branch = "refimpl"
