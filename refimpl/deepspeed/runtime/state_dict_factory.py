"""The loaders of Megatron's checkpoints for another number of tensor ranks, refused by name when they are used.

DeepSpeed: deepspeed/runtime/state_dict_factory.py.
"""

from refimpl.deepspeed.absent import absent

NAME = "deepspeed.runtime.state_dict_factory.SDLoaderFactory"
WHAT = (
    "merging and cutting Megatron's mp_rank files. What an engine has saved engine.load_checkpoint reads at any number "
    "of ranks; other weights are loaded into the whole model, before tensor_parallel.autotp_size cuts it"
)


class SDLoaderFactory:
    """Not part of this project: both functions say so."""

    get_sd_loader = absent(f"{NAME}.get_sd_loader", WHAT)
    get_sd_loader_json = absent(f"{NAME}.get_sd_loader_json", WHAT)
