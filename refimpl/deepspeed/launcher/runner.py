"""DeepSpeed's launcher (deepspeed/launcher/runner.py) is `refimpl.ranks.launcher`."""

from refimpl.ranks.launcher import main, parser

__all__ = ["DEEPSPEED_ENVIRONMENT_NAME", "main", "parser"]

DEEPSPEED_ENVIRONMENT_NAME = ".deepspeed_env"  # a file of environment variables that DeepSpeed's launcher forwards

if __name__ == "__main__":
    main()
