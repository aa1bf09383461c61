"""Checkpoints on the disk: what lies in the folder, and all that can be done with it without a model and without ranks.

    errors      what fails on one rank is an error on all, with the file and the remedy
    atomic      files and folders that are whole whenever they have their name
    manifest    checkpoint.json: which files, which sizes, which checksums
    tensors     safetensors files, written and read in pieces
    tree        numbers, tuples, dictionaries and tensors in them, to JSON and back exactly
    place       which elements of a parameter lie in which rank's file
    write       begun by one process, a file pair a rank, finished by the process that began
    find        which checkpoint is meant: a tag, or the file `latest`
    folder      one checkpoint, opened: any piece of any parameter, whoever wrote it
    export      whole weights out of one, for other libraries
    prune       which ones to keep
    background, random_state                          a save beside training; the random numbers to come
    from_deepspeed, deepspeed_files, unpickle         DeepSpeed's own files, read without running them

What of a run goes into a checkpoint, and how it gets back into one, is in refimpl/engine.
"""
