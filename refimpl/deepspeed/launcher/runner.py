"""The one name that others import from DeepSpeed's launcher (deepspeed/launcher/runner.py)."""

DEEPSPEED_ENVIRONMENT_NAME = ".deepspeed_env"  # a file of environment variables that DeepSpeed's launcher forwards
