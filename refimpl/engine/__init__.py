"""From a DeepSpeed configuration to a training loop.

Read `initialize` (one call), `build` (what a configuration becomes), `engine` (forward, backward, step) and `pipeline`
(the same of a model in stages). Beside them lies what these ask; two subjects have folders of their own:

    configuration/   DeepSpeed's JSON: every key answered, and resolved into small typed configurations
    saving/          checkpoints: what of a run goes into one, how it is written, and comes back into any layout
"""
