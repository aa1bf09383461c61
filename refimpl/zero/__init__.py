"""DDP and the three stages of ZeRO, each a complete class that reads as a small diff of the one before.

Read `flat` (buckets), `stage` (what all have in common), then `ddp`, `zero1`, `zero2`, `zero3`; `gradients` and
`update` are a gradient's way and its end. What else a stage needs lies in a folder by its subject:

    loop/        a training loop: how a stage begins, acts by itself, and what a script calls, reads and changes
    reduction/   gradients: how a bucket fills and travels, plain or compressed, and rests until the step
    optimizer/   fp32 masters and states by slices, and which optimizers may be cut so
    gather/      ZeRO-3's units: gathered before a module needs them, ahead where the trace allows, freed behind it
    agreement/   what must be alike on all ranks, and the ranks beside and beyond the data-parallel ones
    offload/     the update of what rests at the host or on a disk: part by part, whole, or one step late
"""
