"""DeepSpeed's launcher (deepspeed/launcher/runner.py) is `refimpl.ranks.launcher`."""

from refimpl.deepspeed.absent import absent
from refimpl.ranks.launcher import HOSTFILE, hostfile, main, parser

__all__ = [
    "DEEPSPEED_ENVIRONMENT_NAME", "DLTS_HOSTFILE", "EXPORT_ENVS", "fetch_hostfile", "main", "parse_inclusion_exclusion",
    "parser",
]  # fmt: skip

DEEPSPEED_ENVIRONMENT_NAME = ".deepspeed_env"  # a file of environment variables that DeepSpeed's launcher forwards
DLTS_HOSTFILE = HOSTFILE
EXPORT_ENVS: list[str] = []  # of those that it forwards: here every node's launcher has its own environment
fetch_hostfile = hostfile
parse_inclusion_exclusion = absent(
    "deepspeed.launcher.runner.parse_inclusion_exclusion", "give the launcher --include and --exclude"
)

if __name__ == "__main__":
    main()
