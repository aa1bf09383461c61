"""DeepSpeed: deepspeed/sequence/fpdt_layer.py, which Megatron-DeepSpeed imports whatever it trains."""

from refimpl.deepspeed.absent import absent

__all__ = ["FPDT_FFN", "FPDT_Attention", "FPDT_InputConstruct", "FPDT_LogitsLoss"]

FPDT_FFN, FPDT_Attention, FPDT_InputConstruct, FPDT_LogitsLoss = (
    absent(f"deepspeed.sequence.fpdt_layer.{name}", "attention in chunks; deepspeed.sequence.layer shares a sequence")
    for name in __all__
)
