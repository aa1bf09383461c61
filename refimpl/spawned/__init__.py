"""A folder on the path of scripts that `python -m refimpl.as_deepspeed` runs: their spawned processes look here too."""
