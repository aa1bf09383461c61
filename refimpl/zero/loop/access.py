"""Single parameters by name: the fp32 weight, the gradient and the optimizer's state, whole or this rank's part.

Of an fp64 model all of it is fp64.

Everything that a stage keeps for a parameter lies in a flat buffer that its bucket describes, [P] on every rank or
[S] on each: `part` is the view of it that is here, `whole` brings all parts together (a broadcast from each rank that
has one), `put` writes it back. DeepSpeed: deepspeed/utils/tensor_fragment.py, `safe_get_full_fp32_param` and its kin.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from refimpl.offload.homes import is_here
from refimpl.zero.built import Built
from refimpl.zero.flat import Bucket
from refimpl.zero.gather.unit import whole as whole_units
from refimpl.zero.parameter import DATA

if TYPE_CHECKING:
    from refimpl.zero.gradients import Gradients


class ByName(Built):
    """A stage's parameters one by one, each given as itself or by its name.

    `full_...` and `set_full_...` are for all ranks: collectives, most of them.
    """

    def named_shards(self) -> Iterator[tuple[str, Tensor]]:
        """This rank's part of every trained parameter, fp32, by the parameter's name: see `local_parameter`."""
        for p in self.gradients.bucket_of:
            yield self.names[p], self.local_parameter(p)

    def full_parameter(self, p: nn.Parameter | str) -> Tensor:
        """The fp32 weight: the master, where there is one. -> p's shape, in memory of its own."""
        p = self.parameter(p)
        bucket = self.home(p)
        if bucket is None:
            weight: Tensor = DATA.__get__(p)
            return weight.to(exact(weight.dtype), copy=True)
        return whole(bucket, self.weights(bucket), p)

    def set_full_parameter(self, p: nn.Parameter | str, value: Tensor) -> None:
        """Replace the fp32 weight, and what is rounded from it, by `value`: the same on every rank."""
        p = self.parameter(p)
        self.refuse_shape(p, value)
        bucket = self.home(p)
        if bucket is not None and bucket.shelf is not None:
            with whole_units([p]):
                put(bucket, bucket.full, p, value)
                bucket.keep()
        elif bucket is not None:
            for flat in self.copies(bucket):
                put(bucket, flat, p, value)
            bucket.changed()
        if bucket is None:
            DATA.__get__(p).copy_(value)
        elif bucket in self.update.masters and (self.update.is_away() or bucket.shelf is not None):
            self.update.put_state(
                bucket, p, "", bucket.cut(value, p, bucket.part(self.update.owned[bucket], p).numel())
            )

    def full_gradient(self, p: nn.Parameter | str) -> Tensor | None:
        """The gradient since the last step, the mean over ranks, fp32, also of what waits for a later backward.

        None if no rank has any.
        """
        p = self.parameter(p)
        bucket = self.gradients.bucket_of.get(p)
        if bucket is None:
            return None
        self.view.settle()
        total, waiting = self.gradients.reduced(bucket), mean_waiting(self.gradients, bucket, p)
        if total is None:
            return waiting
        reduced = whole(bucket, total, p)
        if waiting is not None:
            return reduced + waiting
        used = bool(reduced.any()) or somewhere(self.gradients, bucket, p in self.gradients.used)
        return reduced if used else None

    def set_full_gradient(self, p: nn.Parameter | str, value: Tensor) -> None:
        """Replace the gradient since the last step by `value`: the same on every rank."""
        p = self.parameter(p)
        self.view.write(p, value)

    def full_state(self, p: nn.Parameter | str, key: str) -> Tensor | None:
        """The optimizer's state `key` of p ("exp_avg"), fp32, in p's shape; None if it has none yet.

        What is not cut like p (a count of steps, Adafactor's rows and columns) has its own shape.
        """
        p = self.parameter(p)
        bucket = self.gradients.bucket_of.get(p)
        if bucket is None:
            return None
        part = self.update.state_part(bucket, p, key)
        known = self.known_state(bucket, p, part)
        if not isinstance(known, str):
            return None if known is None else known.to(bucket.device)
        return whole(bucket, self.spread(bucket, p, torch.empty(0) if part is None else part), p)

    def set_full_state(self, p: nn.Parameter | str, key: str, value: Tensor) -> None:
        """Replace the optimizer's state `key` of p by `value`, in p's shape. KeyError if there is none yet.

        ValueError for a state that is not cut like p: it may be of its neighbours too.
        """
        p = self.parameter(p)
        bucket = self.gradients.bucket_of.get(p)
        part = None if bucket is None else self.update.state_part(bucket, p, key)
        known = None if bucket is None else self.known_state(bucket, p, part)
        if bucket is None or known is None:
            raise self.no_state(p, key)
        if isinstance(known, Tensor):
            raise ValueError(
                f"state {key!r} of {self.names[p]} has no element for each of the parameter's: change optimizer.state"
            )
        self.refuse_shape(p, value)
        if part is not None:
            with torch.no_grad():
                self.update.put_state(bucket, p, key, bucket.cut(value, p, part.numel()))

    def known_state(self, bucket: Bucket, p: nn.Parameter, part: Tensor | None) -> Tensor | str | None:
        """A state of p of which this rank has `part`: "cut" if it is cut like p, else itself; None if no rank has it.

        A collective: a rank that has nothing of p may have no state there.
        """
        start, end = self.update.slices.span(bucket, p)
        mine: Tensor | str | None = None
        if part is not None and part.shape != (end - start,):
            mine = part.cpu()  # on the way no rank's GPU is another's
        elif part is not None and start < end:
            mine = "cut"
        return next((one for one in bucket.group.all_gather_object(mine) if one is not None), None)

    def local_parameter(self, p: nn.Parameter | str) -> Tensor:
        """This rank's part of the fp32 weight: a flat view, to be changed with `copy_` and its like."""
        p = self.parameter(p)
        self.refuse_away(p)
        bucket = self.home(p)
        return DATA.__get__(p).view(-1) if bucket is None else bucket.part(self.weights(bucket), p)

    def local_gradient(self, p: nn.Parameter | str) -> Tensor:
        """This rank's part of the mean gradient: a flat view. RuntimeError if there is none, or it is on a disk."""
        p = self.parameter(p)
        resting, bucket = self.gradients.resting, self.trained(p)
        if resting is not None and bucket in resting.squares:
            self.refuse_away(p)
        return self.view.mine(p)

    def local_state(self, p: nn.Parameter | str, key: str) -> Tensor | None:
        """This rank's part of the optimizer's state `key`: a flat view; None if it has none yet."""
        p = self.parameter(p)
        self.refuse_away(p)
        bucket = self.gradients.bucket_of.get(p)
        return None if bucket is None else self.update.slices.state_part(bucket, p, key)

    def read_local(self, p: nn.Parameter | str, key: str = "") -> Tensor | None:
        """A copy of this rank's part of the fp32 weight, of the mean gradient ("grad"), or of the state `key`; flat.

        Wherever it rests. None if there is none.
        """
        p = self.parameter(p)
        bucket = self.trained(p)
        if key == "grad":
            self.view.refuse_waiting(p)
            total = self.gradients.reduced(bucket)
            return None if total is None else bucket.part(total, p).clone()
        part = self.update.state_part(bucket, p, key) if key else bucket.part(self.update.weights(bucket), p)
        return None if part is None else part.clone()

    def write_local(self, p: nn.Parameter | str, value: Tensor, key: str = "") -> None:
        """Replace what `read_local` reads. A weight of the model follows with the next step, as in DeepSpeed.

        ValueError for another number of elements. KeyError for a state that this rank has nothing of.
        """
        p = self.parameter(p)
        bucket = self.trained(p)
        if value.numel() != (numel := self.numel_here(bucket, p, key)):
            raise ValueError(f"{self.names[p]}: {value.numel()} elements for this rank's part of {numel}")
        if key == "grad":
            self.view.change(p, lambda part: part.copy_(value.reshape(-1)))
        else:
            self.update.put_state(bucket, p, key, value.reshape(-1))

    def numel_here(self, bucket: Bucket, p: nn.Parameter, key: str) -> int:
        """How many elements `read_local` reads. Raises where there is nothing to replace."""
        if key == "grad":
            return self.view.mine(p).numel()
        start, end = self.update.slices.span(bucket, p)
        if not key:
            return end - start
        if (part := self.update.state_part(bucket, p, key)) is None:
            raise self.no_state(p, key)
        return part.numel()

    def trained(self, p: nn.Parameter) -> Bucket:
        """The bucket of what is trained. RuntimeError for what is not: nothing of it is kept for an update."""
        if p not in self.gradients.bucket_of:
            raise RuntimeError(
                f"{self.names[p]} is not trained: it has neither a gradient nor a state; full_parameter reads it"
            )
        return self.gradients.bucket_of[p]

    def refuse_shape(self, p: nn.Parameter, value: Tensor) -> None:
        if value.shape != p.shape:
            raise ValueError(
                f"{self.names[p]}: a value of shape {tuple(value.shape)} for a parameter of shape {tuple(p.shape)}"
            )

    def no_state(self, p: nn.Parameter, key: str) -> KeyError:
        name = self.names[p]
        return KeyError(f"the optimizer has no state {key!r} of {name}: take a step first, if the name is right")

    def refuse_away(self, p: nn.Parameter) -> None:
        """A view of what rests on a disk would be of nothing."""
        if self.update.is_away():
            raise RuntimeError(
                f"{self.names[p]}: what was asked for rests on a disk, there is no view of it: read_local copies it, "
                "write_local replaces it"
            )

    def parameter(self, p: nn.Parameter | str) -> nn.Parameter:
        """The parameter of this name. KeyError for one that is not the model's; RuntimeError while states are away.

        RuntimeError too where what is here is of no one step.
        """
        self.parked.refuse()
        self.update.refuse_torn()
        if not isinstance(p, str) and p in self.names:
            return p
        for known, name in self.names.items():
            if name == p and isinstance(p, str):
                return known
        raise KeyError(f"{p if isinstance(p, str) else tuple(p.shape)}: not a parameter of the stage's model")

    def home(self, p: nn.Parameter) -> Bucket | None:
        """The buffer that p lies in, if any."""
        return self.gradients.bucket_of.get(p)

    def weights(self, bucket: Bucket) -> Tensor:
        """The most exact weights of a bucket: fp32 masters ([P] or [S]) or the owned slice."""
        return self.update.weights(bucket)

    def put_weights(self, bucket: Bucket, flat: Tensor) -> None:
        """`weights(bucket)` was changed, in place or in the copy that it is: let it be the bucket's."""
        if bucket in self.update.masters:
            self.update.restore(bucket, flat)
        elif bucket.shelf is not None:
            bucket.shelf.write(0, flat)
        bucket.changed()

    def copies(self, bucket: Bucket) -> list[Tensor]:
        """Every buffer here that holds the weights of a bucket."""
        held = [self.weights(bucket), self.update.owned.get(bucket), bucket.full]
        return [flat for flat in held if flat is not None and is_here(flat)]

    def spread(self, bucket: Bucket, p: nn.Parameter, part: Tensor) -> Tensor:
        """A buffer as long as the bucket's owned slice with `part` in p's place."""
        weights = self.weights(bucket)
        flat = torch.zeros_like(weights, dtype=exact(weights.dtype))
        bucket.part(flat, p).copy_(part)
        return flat


def exact(dtype: torch.dtype) -> torch.dtype:
    """In which values of `dtype` are given: fp32, of an fp64 model fp64."""
    return torch.promote_types(dtype, torch.float32)


@torch.no_grad()
def whole(bucket: Bucket, flat: Tensor, p: nn.Parameter) -> Tensor:
    """p's piece of flat ([P], or [S] on each rank): an exact copy, in p's shape, on p's device. A collective."""
    if flat.numel() == bucket.padded:
        return bucket.piece(flat, p).to(bucket.device, exact(flat.dtype), copy=True)
    result = torch.empty(p.numel(), dtype=exact(flat.dtype), device=bucket.device)
    at = 0
    for rank in range(bucket.group.size):
        start, end = bucket.span(p, rank)
        if start < end:
            here = result[at : at + end - start]
            if rank == bucket.group.rank:
                here.copy_(flat[start:end])
            bucket.group.broadcast(here, rank, tag="full parameter")
            at += end - start
    return result.view(p.shape)


@torch.no_grad()
def mean_waiting(gradients: "Gradients", bucket: Bucket, p: nn.Parameter) -> Tensor | None:
    """What `no_sync` keeps of p's gradient, as its reduction will make it: fp32, a copy; None if no rank keeps any.

    A collective: a rank that did not use p, or anything, has nothing, and counts as zero.
    """
    mine = gradients.waiting(p)
    if not somewhere(gradients, bucket, mine is not None):
        return None
    wide = exact(p.dtype)
    total = torch.zeros(p.shape, dtype=wide, device=bucket.device) if mine is None else mine.to(wide, copy=True)
    bucket.group.all_reduce(total, "sum", tag="full gradient")
    is_sum = gradients.config.gradient_allreduce_op == "sum"
    if gradients.across is not None:
        gradients.across.all_reduce(total, "sum" if is_sum else "mean", tag="full gradient")
    return total if is_sum else total / gradients.group.size


def somewhere(gradients: "Gradients", bucket: Bucket, here: bool) -> bool:
    """Whether it is so on any rank that has the bucket, of whatever replica. A collective."""
    near = any(bucket.group.all_gather_object(here))
    return near if gradients.across is None else any(gradients.across.all_gather_object(near))


@torch.no_grad()
def put(bucket: Bucket, flat: Tensor, p: nn.Parameter, value: Tensor) -> None:
    """Write `value`, in p's shape, to what flat holds of p here."""
    mine = bucket.part(flat, p)
    mine.copy_(bucket.cut(value, p, mine.numel()))
