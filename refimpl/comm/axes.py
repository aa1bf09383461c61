"""The axes of a job: which ranks hold which part of the model, which tokens, and who sums what with whom.

    rank = ((pp * DP + dp) * CP + cp) * TP + tp           tensor ranks are neighbours, so they share a node

    tensor      tp        other parts of the same matrices              4 all-reduces a layer and micro-batch
    context     cp        other tokens of the same sequences            keys and values, in every layer
    data        dp        other sequences                               gradients, once a step
    pipeline    pp        other layers                                  activations between neighbours, the least
    replicas    dp x cp   the same part of the model, other tokens: gradients are averaged, ZeRO divides state
    shards      a part of them, such as a node's, if ZeRO divides state over that alone (HSDP, MiCS)
    across      the ranks of other shards that have the same
    model       pp x tp   the other parts of this replica: the gradient's norm, clipping and overflow are of all
    expert      ep        consecutive replicas that hold other experts of the same layers: tokens, there and back
    expert_data           the replicas that hold the same experts: those experts' gradients, once a step

Gradients are averaged over context ranks too, so the loss of each has to be its tokens' share of the replicas' mean:
`parallel/context/loss.py`, or the mean that DeepSpeed's users gather over the ranks of a sequence. DeepSpeed 0.19 adds
the gradients up there, which makes those of its own recipe CP times as large.

What sends most lies innermost: ranks with consecutive numbers share the fastest links. Narayanan et al. 2021,
arXiv:2104.04473, section 3. Megatron-LM: megatron/core/parallel_state.py. DeepSpeed: deepspeed/utils/groups.py.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch.distributed as dist

from refimpl.comm.group import Group
from refimpl.comm.mesh import Mesh
from refimpl.comm.process_group import of_rows

NAMES = ("pp", "dp", "shard", "cp", "tp")  # outermost first; with `shard`, dp counts the groups of shards


@dataclass(frozen=True)
class Axes:
    """This rank's group on each axis; a group of one where an axis is not used."""

    world: Group
    replicas: Group
    context: Group
    tensor: Group
    pipeline: Group
    model: Group
    shards: Group
    across: Group
    data: Group  # the ranks that this one's batches are not given to: one of each sequence's
    expert: Group
    expert_data: Group

    @property
    def feeds(self) -> int:
        """How many different batches a step reads: the context ranks of a sequence are given the same one."""
        return self.replicas.size // self.context.size

    @property
    def feed(self) -> int:
        """Which of them this rank is given."""
        return self.replicas.rank // self.context.size

    @classmethod
    def of_data(cls, world: Group) -> "Axes":
        """Data parallelism alone: every rank is a replica."""
        alone = Group(None, device=world.device)
        return cls(world, world, alone, alone, alone, alone, world, alone, world, alone, world)

    @classmethod
    def of_pipeline(cls, group: Group) -> "Axes":
        """One pipeline and nothing else."""
        alone = Group(None, device=group.device)
        return cls(group, alone, alone, alone, group, group, alone, alone, alone, alone, alone)

    @classmethod
    def of_mesh(cls, mesh: Mesh) -> "Axes":
        """Of a mesh whose axes are among NAMES, in that order. ValueError for another axis."""
        if others := [axis for axis in mesh.axes if axis not in NAMES]:
            raise ValueError(f"a mesh of {list(mesh.axes)}: {others[0]!r} is none of {', '.join(NAMES)}")

        def group(*axes: str) -> Group:
            return mesh.group(*(axis for axis in mesh.axes if axis in axes))

        replicas, in_shards = group("dp", "shard", "cp"), "shard" in mesh.axes
        shards = group("shard", "cp") if in_shards else replicas
        across = group("dp") if in_shards else group()
        parts = group("tp"), group("pp"), group("pp", "tp")
        data = replicas if mesh.axes.get("cp", 1) == 1 else group("dp", "shard")
        return cls(mesh.world, replicas, group("cp"), *parts, shards, across, data, group(), replicas)

    @classmethod
    def of_sizes(cls, sizes: Mapping[str, int], world: Group) -> "Axes":
        """pp, shard, cp and tp ranks on these axes, all others dp. ValueError if they do not divide the world."""
        taken = prod(sizes.get(name, 1) for name in NAMES if name != "dp")
        if taken == 1 and "shard" not in sizes:
            return cls.of_data(world)
        if world.size % taken:
            said = " x ".join(f"{name} {sizes[name]}" for name in NAMES if sizes.get(name, 1) > 1)
            raise ValueError(f"{world.size} ranks are no multiple of {said} = {taken}: start a multiple of {taken}")
        known = {**sizes, "dp": world.size // taken}
        return cls.of_mesh(Mesh({name: known.get(name, 1) for name in NAMES if name != "shard" or name in known}))

    @classmethod
    def of_mpu(cls, mpu: Any, world: Group) -> "Axes":
        """Of Megatron's or DeepSpeed's object, or module: get_data_parallel_group(), get_model_parallel_group(), ...

        An axis that it does not answer for has one rank. A collective. TypeError if it answers for none, with what is
        no group of this rank, or with groups that do not make a mesh.
        """

        def group(*axes: str, **how: bool) -> Group | None:
            names = (f"get_{axis}_parallel_group" for axis in axes)
            name = next((name for name in names if getattr(mpu, name, None) is not None), None)
            return None if name is None else group_of(mpu, name, world, **how)

        alone = Group(None, device=world.device)
        context, tensor = group("sequence", "context"), group("tensor_model", "model")
        replicas = group("sequence_data") or (group("data") if context is None or context.size == 1 else None)
        if replicas is None and hasattr(mpu, "get_context_parallel_group"):  # Megatron-Core's
            replicas = group("data", with_context_parallel=True)
        if replicas is None and context is not None:
            raise TypeError(
                f"mpu: {type(mpu).__name__} shares sequences and has no get_sequence_data_parallel_group: gradients "
                "are averaged over those who read other sequences and those who share one"
            )
        if replicas is None:
            raise TypeError(f"mpu: {type(mpu).__name__} has no get_data_parallel_group that answers")
        model, pipeline = group("model", "tensor_model"), group("pipeline_model", "pipe")
        if context is not None and model is not None and model.ranks == context.ranks:
            tensor = model = None  # in DeepSpeed's parallel_state_sp another name for the ranks of a sequence
        check_mesh(mpu, world, replicas, model or alone)
        parts = tensor or alone, pipeline or alone, model or alone
        return cls(world, replicas, context or alone, *parts, replicas, alone, group("data") or alone, alone, replicas)

    def with_experts(self, ep: int) -> "Axes":
        """The same with the experts dealt out to `ep` replicas. A collective. ValueError as `expert_groups`."""
        expert, expert_data = expert_groups(self.replicas, ep)
        return replace(self, expert=expert, expert_data=expert_data)


def group_of(mpu: Any, name: str, world: Group, **how: bool) -> Group | None:
    """What an mpu answers. TypeError if that is no group of torch's that this rank is in."""
    ask = getattr(mpu, name)
    handle = ask(**how) if callable(ask) else ask
    if handle is not None and not isinstance(handle, dist.ProcessGroup):
        raise TypeError(
            f"mpu: {name} of {type(mpu).__name__} is {handle!r} on rank {world.rank}: it must be a function that "
            "returns a torch.distributed group with this rank in it"
        )
    return None if handle is None else Group(handle, world.ledger, world.device, link=world.link)


def check_mesh(mpu: Any, world: Group, replicas: Group, model: Group) -> None:
    """TypeError, on all ranks alike, unless each rank is in one group of each, and two such meet in it alone."""
    said = world.all_gather_object((replicas.ranks, model.ranks))
    for rank, (same, parts) in enumerate(said):
        agreed = all(said[r][0] == same for r in same) and all(said[r][1] == parts for r in parts)
        if not agreed or set(same) & set(parts) != {rank} or len(same) * len(parts) != world.size:
            raise TypeError(
                f"mpu: {type(mpu).__name__} says on rank {rank} of {world.size} that the same part of the model is on "
                f"ranks {same}, and the other parts of this replica on {parts}: that is no mesh, or ranks disagree"
            )


def expert_groups(data: Group, ep: int) -> tuple[Group, Group]:
    """(the `ep` consecutive ranks of `data` that share out the experts, those that have the same ones as this rank).

    ep 2 of 6 ranks: (0 1) (2 3) (4 5) and (0 2 4) (1 3 5), DeepSpeed's order. A collective. ValueError if ep does not
    divide the ranks.
    """
    if ep < 1 or data.size % ep:
        fit = ", ".join(str(n) for n in range(1, data.size + 1) if data.size % n == 0)
        raise ValueError(
            f"ep_size {ep}: experts are dealt out to the {data.size} data-parallel ranks, so it must be one of {fit}"
        )
    return neighbours(data, ep)


def neighbours(
    group: Group, size: int, make: Callable[[list[list[int]]], dist.ProcessGroup] = of_rows
) -> tuple[Group, Group]:
    """(this rank's block of `size` consecutive ranks, the ranks with its place in every block). A collective.

    `size` divides the group's. `make`: what makes torch's group of a row; see `of_rows` for who needs his own.
    """
    if size in (1, group.size):
        alone = Group(None, group.ledger, group.device)
        return (alone, group) if size == 1 else (group, alone)
    block = make([group.ranks[start : start + size] for start in range(0, group.size, size)])
    line = make([group.ranks[place::size] for place in range(size)])
    return (
        Group(block, group.ledger, group.device, group.deterministic, link=group.link),
        Group(line, group.ledger, group.device, group.deterministic, link=group.link),
    )
