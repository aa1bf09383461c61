"""A sharded parameter cast before there is a stage, as by `model.to(torch.bfloat16)`: each rank casts its own shard.

    p.data.to(dtype)         a tensor of p's shape and of `dtype`, without values, cut as p is: a `Cast` looks after it
    p.data = p.data.to(...)  p is of that dtype from now on

No rank needs another for it, and the bits are those of a model that was cast whole. Whoever computes with the tensor in
between is told to make it p's data first. In a constructor under `Init`, where p is gathered to be read, what is
converted has values, and they are taken.
DeepSpeed casts the empty tensor that stands for the parameter. Its `ds_tensor` keeps the dtype that `zero.Init` gave
it, which the next gather brings back (deepspeed/runtime/zero/partition_parameters.py, `get_allgather_dtype`).
"""

from typing import TYPE_CHECKING, Any, NoReturn

from torch import Tensor

if TYPE_CHECKING:
    from refimpl.zero.gather.unit import Unit
    from refimpl.zero.parameter import Freed, Managed


class Cast:
    """This rank's shard [S] of a tensor that was converted from the parameter of `unit`; to that tensor its unit."""

    def __init__(self, unit: "Unit", mine: Tensor) -> None:
        self.unit, self.mine = unit, mine

    def now(self) -> Tensor:
        return self.mine

    def asked(self, what: str) -> bool:
        """Whether it can be had now: it never can."""
        return False

    def copy_of(self, tensor: "Freed", what: str) -> Tensor:
        self.wanted(tensor, what)

    def wanted(self, tensor: "Freed", what: str) -> NoReturn:
        """RuntimeError: `what` computes with it."""
        raise RuntimeError(
            f"parameter of {self.unit.name}, as {tensor.dtype}: {what} needs its values, of which this rank has 1/N. "
            "Make it the parameter's (model.to(dtype), or p.data = p.data.to(dtype)), and compute with that inside "
            "`with GatheredParameters(parameters):`"
        )


def converted(func: Any, what: str, p: "Freed", nothing: Tensor, *args: Any, **kwargs: Any) -> Any:
    """What func, a conversion that a script calls `what`, makes of p, which is freed: `nothing`, one NaN, expanded."""
    first = nothing.as_strided((1,) * p.dim(), (1,) * p.dim())
    like = func(first, *args, **kwargs)
    if like is first:
        return p  # it is there, and of that kind already
    if p.zero_unit.asked(what):
        return func(p, *args, **kwargs)
    if not isinstance(like, Tensor):
        return like  # p.type() is a word
    unit = p.zero_unit.unit if isinstance(p.zero_unit, Cast) else p.zero_unit
    if p.stage or len(unit.params) > 1 or like.device != p.device:  # several: of a stage that has let go
        p.zero_unit.wanted(p, what)
    tensor = like.expand(p.shape).as_subclass(type(p))
    tensor.zero_unit = Cast(unit, p.zero_unit.now().to(like.dtype, copy=True))
    return tensor


def became(unit: "Unit", p: "Managed", value: Tensor) -> bool:
    """Whether p, which no stage has, is cast by `p.data = value`, and is now: by its `Cast`, or in a constructor."""
    cast = getattr(value, "zero_unit", None)
    if isinstance(cast, Cast) and cast.unit is unit and unit.is_free:
        unit.become(cast.mine)
        return True
    alike, alone = (value.device, value.shape) == (p.device, p.shape), len(unit.params) == 1
    if isinstance(cast, Cast) or value.dtype == p.dtype or not (alike and alone) or unit.held or not unit.is_whole:
        return False
    unit.keep()
    unit.free()
    unit.become(unit.now().to(value.dtype))
    unit.wait()
    p.data.copy_(value)
    return True
