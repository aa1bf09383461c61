"""The mixture-of-experts layer, by name only. DeepSpeed: deepspeed/moe/layer.py."""

from refimpl.deepspeed.later import later

MoE = later("deepspeed.moe.layer.MoE", "mixture of experts")
