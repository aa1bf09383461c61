"""The four classes of the exercises that train a model by themselves: `refimpl demo --yours` puts them to work."""

from refimpl.plan.formulas import Strategy

LADDER: dict[Strategy, tuple[str, str]] = {
    "ddp": ("02_ddp", "Ddp"),
    "zero1": ("04_zero1", "ShardedOptimizer"),
    "zero2": ("05_zero2", "GradientShards"),
    "zero3": ("06_zero3", "Zero3"),
}
