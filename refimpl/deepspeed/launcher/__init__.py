"""DeepSpeed's launcher, for one machine or for each of several: torchrun starts the ranks."""
