"""From a DeepSpeed configuration to a training loop.

Read `config` (DeepSpeed's JSON), `initialize` (one call), `assemble` and `build` (what a configuration becomes),
`engine` (forward, backward, step), `pipeline` (the same of a model in stages), `checkpoint` and `resume`. Beside them
lies what these ask; of two there is a folder:

    configuration/   the keys: each one's answer, its section's schema, its value resolved
    saving/          what of a run goes into a checkpoint, and where else weights go to and come from
"""
