"""`make gpu-check`: what only a GPU can show, in nine minutes, one part a process, and a report even when a part fails.

`python -m refimpl.gpu` needs torch, numpy (torch.distributed sends objects by it) and the standard library. Without a
GPU `--device cpu` runs every part in miniature, which tests the program and shows nothing about GPUs.
"""
