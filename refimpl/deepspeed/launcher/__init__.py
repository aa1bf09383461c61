"""Ranks are started by torchrun, srun or mpirun; DeepSpeed's own launcher is not part of this project."""
