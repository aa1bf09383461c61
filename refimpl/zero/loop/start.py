"""How a stage begins, and what it refuses: all ranks take rank 0's model, and every parameter is an ordinary one."""

import zlib
from collections.abc import Iterable, Mapping
from itertools import zip_longest

import torch
from torch import Tensor, nn, optim

from refimpl.comm import levels
from refimpl.comm.first import take_first
from refimpl.comm.group import Group
from refimpl.zero.agreement.settings import settings
from refimpl.zero.config import ZeroConfig
from refimpl.zero.experts import apart
from refimpl.zero.parameter import DATA, Freed, Managed, stage_of

# In what a rank's ZeroConfig may differ: where its state rests; and an operator of the user's may have no words.
OWN = {
    "optimizer_home", "gradient_home", "parameter_home", "offload_ratio", "sub_group_size", "max_in_host",
    "compression",
}  # fmt: skip


def ranks_of(model: nn.Module) -> Group:
    """All ranks of the job; of a process that is alone, on the device that has the model's parameters."""
    world = levels.world()
    device = next((p.device for p in model.parameters() if not p.is_meta), world.device)
    return Group(None, world.ledger, device) if world.handle is None and device != world.device else world


def module_of(model: nn.Module | Iterable[nn.Parameter]) -> nn.Module:
    """The model, or bare parameters as one: `nn.ParameterList` would copy another tensor, and take anything."""
    if isinstance(model, nn.Module):
        return model
    given = list(model)
    if others := [type(p).__name__ for p in given if not isinstance(p, nn.Parameter)]:
        raise TypeError(f"model: a {others[0]} among its parameters: give nn.Parameter objects, also to the optimizer")
    return nn.ParameterList(given)


@torch.no_grad()
def share(
    model: nn.Module,
    done: set[nn.Parameter],
    group: Group,
    dtype: torch.dtype | None,
    experts: Mapping[nn.Parameter, Group],
) -> None:
    """Rank 0's values of all other parameters and of buffers. These parameters are cast too; buffers never are.

    Frozen ones are laid row by row, as all that lie in buckets: ZeRO-3 has them there, and products round by strides.
    """
    loose = [p for p in model.parameters() if p not in done]
    for p in loose:
        DATA.__set__(p, row_by_row(DATA.__get__(p)))
    ranks = {DATA.__get__(p): experts.get(p, group) for p in loose}
    ranks |= dict.fromkeys(model.buffers(), group)
    ranks |= {buffer: those for _, module, those in apart(model, experts) for buffer in module.buffers()}
    for tensor, those in ranks.items():
        take_first([tensor], those, "start")
    for p in loose:
        if dtype is not None and p.is_floating_point():
            DATA.__set__(p, DATA.__get__(p).to(dtype))


def row_by_row(tensor: Tensor) -> Tensor:
    """`contiguous()`, with a new tensor's strides too: one channel in channels_last counts as such with its own."""
    return tensor.contiguous().view(-1).view(tensor.shape)


def refuse_foreign(names: Mapping[nn.Parameter, str], trains: bool) -> None:
    """A stage takes ordinary parameters that no other has; without an optimizer it may be built in inference mode."""
    for p, name in names.items():
        if (other := stage_of(p)) is not None:
            raise ValueError(
                f"parameter {name} belongs to a {type(other).__name__} already: call its release() (an engine's "
                "destroy()) first, or give each stage a model of its own"
            )
        if type(p) not in (nn.Parameter, Managed, Freed):
            remedy = "run a forward first, so that it has a shape" if nn.parameter.is_lazy(p) else "use nn.Parameter"
            if type(p).__name__ == "DTensor":
                remedy = "torch's fully_shard, or its tensor parallelism, has cut it: leave that out"
            raise TypeError(f"parameter {name} is a {type(p).__name__}: {remedy}")
        if p.is_meta:
            raise ValueError(f"parameter {name} is on the meta device: give the model memory and values first")
        if p.is_inference() or (trains and torch.is_inference_mode_enabled()):
            raise RuntimeError(
                f"parameter {name}: it was made, or its stage is built, under torch.inference_mode(), so it cannot be "
                "trained: do both outside, or under torch.no_grad()"
            )
        if p.is_complex():
            raise TypeError(f"parameter {name} is complex: keep its real and imaginary parts in two parameters")
    refuse_in_backward(names)


def refuse_in_backward(names: Mapping[nn.Parameter, str]) -> None:
    """ValueError for an optimizer that takes the gradient before the stage does, or finds none."""
    for p, name in names.items():
        if hasattr(p, "_in_backward_optimizers"):
            raise ValueError(
                f"parameter {name} has an optimizer that steps in backward (torch's _apply_optimizer_in_backward), "
                "where the stage takes the gradient away: give the stage one optimizer of all parameters instead"
            )


def refuse_different(
    group: Group,
    params: Mapping[str, nn.Parameter],
    in_group: Mapping[nn.Parameter, int],
    optimizer: optim.Optimizer | None,
    config: ZeroConfig,
    stage: str,
) -> None:
    """Buckets are laid out on each rank by itself, and padded: other models could travel as long as this one.

    With another learning rate on one rank the weights of DDP would part; with other clipping shards would be of no one
    step. A collective; a few bytes, as long as all is well. ValueError on every rank. torch: DDP's
    `_verify_param_shape_across_processes`, which knows shapes alone.
    """
    of_stage = {("ZeroConfig:", key): repr(value) for key, value in vars(config).items() if key not in OWN}
    given = {("the stage:", "class"): stage} | settings(optimizer, type(optimizer)) | of_stage
    mine = [(name, *described(p, in_group.get(p))) for name, p in params.items()], [(*k, v) for k, v in given.items()]
    if len(set(group.all_gather_object(zlib.crc32(repr(mine).encode())))) == 1:
        return
    first, *others = group.all_gather_object(mine)
    rank, theirs = next((rank, those) for rank, those in enumerate(others, 1) if those != first)
    pairs = (pair for both in zip(first, theirs, strict=True) for pair in zip_longest(*both, fillvalue=("nothing",)))
    here, there = next(pair for pair in pairs if pair[0] != pair[1])
    raise ValueError(
        f"the ranks have different models, optimizers or settings. rank {group.ranks[0]}: {' '.join(here)}; rank "
        f"{group.ranks[rank]}: {' '.join(there)}. Build the same modules in the same order on every rank, train the "
        "same of them, and give the optimizer and the stage the same options"
    )


def described(p: nn.Parameter, number: int | None) -> tuple[str, str, str]:
    """Shape, dtype and what becomes of it, in words."""
    trained = f"in the optimizer's group {number}" if number is not None and p.requires_grad else "not trained"
    return str(list(p.shape)), str(p.dtype), trained


def refuse_unfit(model: nn.Module, names: dict[nn.Parameter, str]) -> None:
    """What torch's DDP wraps is reduced by it, too, and its hooks have no effect here; see `refuse_shared_memory`."""
    for name, module in model.named_modules():
        if isinstance(module, nn.parallel.DistributedDataParallel):
            raise ValueError(
                f"{name or 'the model'} is torch's DistributedDataParallel, which reduces every gradient once more, "
                "and whose communication hook has no effect here: hand over its .module, and for fewer bytes set "
                "communication_data_type or compression (gradient_compression in the JSON)"
            )
    refuse_not_dense({p: f"parameter {name}" for p, name in names.items()})
    refuse_not_dense({buffer: f"buffer {name}" for name, buffer in model.named_buffers()})
    refuse_shared_memory(names)


def refuse_not_dense(words: Mapping[Tensor, str]) -> None:
    """TypeError for what does not lie in one memory of its shape, and so has no flat place in a bucket or message."""
    for tensor, what in words.items():
        if tensor.layout is not torch.strided or tensor.is_quantized:
            kind = "quantized" if tensor.is_quantized else tensor.layout
            raise TypeError(
                f"{what} is {kind}, which cannot be sent and saved as it lies: keep its parts (indices and values) as "
                "dense ones, or the tensor in a plain attribute, which is each rank's own affair"
            )


def refuse_shared_memory(names: dict[nn.Parameter, str]) -> None:
    """Two parameters on one memory would part: each gets a place of its own."""
    first: dict[int, str] = {}
    for p, name in names.items():
        if type(p) in (nn.Parameter, Managed) and p.numel() and not p.is_meta:
            other = first.setdefault(p.data_ptr(), name)
            if other != name:
                raise ValueError(
                    f"parameters {other} and {name} share their memory, but are two objects, and would be trained "
                    "apart: tie them by assigning the parameter itself (b.weight = a.weight)"
                )
