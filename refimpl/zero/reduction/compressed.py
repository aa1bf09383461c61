"""Gradients that travel compressed: what DDP's or ZeRO-1's `reduce` becomes with `ZeroConfig.compression`.

A bucket's gradients, without the padding between them, are handed to an `Exchange`, whose mean goes where that of the
stage's own reduction would: buckets, overlap, accumulation, clipping and the loss scale are as without. Memory: 8 bytes
a parameter for errors, fp32, on every rank (4 of them, what a skipped step goes back to); sums are formed in fp32,
of gradients in fp64 too. What becomes of an error:

    a step is made              what was not sent of this rank's gradients, unclipped, is added to the next ones
    a step is skipped (inf)     is as before it, bit for bit: nothing of the bad gradient stays
    gradients are dropped       is as before them: `zero_grad` before a step, a backward that raised
    a parameter unused by all   is as before: the update leaves the parameter alone, whatever was sent of it
                                (of one bit an element something always is, and the gradient's norm counts it)
    the loss scale changes      is measured in the new one
    a checkpoint                is each rank's own: goes on bit for bit on as many ranks, begins at zero on others;
                                PowerSGD's Q is everybody's, and goes on wherever the rank r is the same

ZeRO-2 and ZeRO-3 have no room for it: an error is as large as a whole gradient. In ZeRO-3 ZeRO++'s quantised reduction
is the way. Karimireddy et al. 2019, arXiv:1901.09847. DeepSpeed has it for its 1-bit optimizers alone, up to 0.19.6.
"""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from refimpl.comm.work import Steps, Work
from refimpl.compress.compression import Compression
from refimpl.compress.exchange import Exchange, Op
from refimpl.compress.powersgd import LowRank
from refimpl.zero.flat import Bucket
from refimpl.zero.reduction.flights import Reduction
from refimpl.zero.reduction.owing import place, warn_of_loss

if TYPE_CHECKING:
    from refimpl.zero.stage import Stage


class Compressed:
    """The compressed reduction of a stage's buckets, and the errors that this rank keeps of it."""

    def __init__(self, stage: "Stage", compression: Compression) -> None:
        """ValueError for a stage in which no rank may keep a whole gradient."""
        if stage.reduces_always:
            raise ValueError(
                f"compression: {type(stage).__name__} keeps no whole gradient, and an error is as large as one: use "
                "DDP or ZeRO-1 (stages 0 and 1), or zero_quantized_gradients of ZeRO-3"
            )
        self.stage, self.compression = stage, compression
        self.exchanges: dict[Bucket, Exchange] = {}
        self.steps = 0  # made or skipped
        self._scale = 1.0  # the loss scale that errors are measured in
        self._dropped = False  # whether gradients that are not used were sent since the last step
        self._loaded: dict[str, Any] | None = None  # for buckets that have not been reduced yet

    def reduce(self, bucket: Bucket, local: Tensor) -> Reduction:
        """Runs inside backward, the moment a bucket is full. local [P] -> mean over ranks [P], or [S] of ZeRO-1."""
        wire = self.stage.config.communication_data_type
        if self.steps < self.compression.start_step:
            return self.stage.reduce(bucket, local.to(wire or local.dtype))
        self.undo_dropped()
        self.measure()
        exchange = self.exchange(bucket)
        x = packed(bucket, local)
        direct = exchange.out_numel() == exchange.n and x.data_ptr() == local.data_ptr() and x.dtype == torch.float32
        out = x if direct else torch.empty(exchange.out_numel(), device=local.device)
        op: Op = "sum" if self.stage.gradients.op == "sum" else "mean"
        work = exchange.mean(x, out, op)
        whole = self.stage.owned(bucket) is bucket.full
        result = local if whole else bucket.shard(local)
        return Reduction(Work(self.unpack(bucket, work, out, local)), result, memory=local)

    def unpack(self, bucket: Bucket, work: Work, out: Tensor, local: Tensor) -> Steps:
        """When the mean is there: out [n], or of this rank's chunk, to its places in local [P]."""
        yield lambda: [work]
        if out.data_ptr() == local.data_ptr():
            return
        here = local if len(out) == sum(p.numel() for p in bucket.params) else bucket.shard(local)
        places = [bucket.part(here, p) for p in bucket.params]
        parts: list[Tensor] = list(out.split([len(place) for place in places]))  # type: ignore[no-untyped-call]
        torch._foreach_copy_(places, parts)

    def exchange(self, bucket: Bucket) -> Exchange:
        """The bucket's, made when it is first asked for."""
        if bucket not in self.exchanges:
            chunks = [
                sum(end - start for start, end in (bucket.span(p, rank) for p in bucket.params))
                for rank in range(bucket.group.size)
            ]
            values = self.stage.config.communication_data_type
            if values is None:  # fp16 has no room for a product of matrices
                kept = self.stage.config.grad_accum_dtype or bucket.dtype
                values = torch.float32 if self.compression.way == "low rank" else kept
            whole = self.stage.owned(bucket) is bucket.full
            made = self.compression.make(bucket.group, [p.shape for p in bucket.params], chunks, values, whole)
            self.exchanges[bucket] = made
            if self._loaded is not None:
                self.restore(bucket, made, self._loaded)
        return self.exchanges[bucket]

    def measure(self) -> None:
        """Errors in the present loss scale."""
        scale = self.stage.loss_scale()
        if scale != self._scale:
            for exchange in self.exchanges.values():
                exchange.rescale(scale / self._scale)
            self._scale = scale

    def settle(self, done: bool, left_alone: set[nn.Parameter]) -> None:
        """A step was made, or skipped. `left_alone`: what it has not changed."""
        self.undo_dropped()
        for bucket, exchange in self.exchanges.items():
            if not done:
                exchange.revert()
            for p, start, end in placed(bucket) if done and left_alone else ():
                if p in left_alone:
                    exchange.revert(start, end)
            exchange.accept()
        self.steps += 1

    def drop(self) -> None:
        """What was sent since the last step will not be used. (It may travel still: undone when all has arrived.)"""
        self._dropped = True

    def undo_dropped(self) -> None:
        if self._dropped:
            for exchange in self.exchanges.values():
                exchange.revert()
                exchange.accept()
            self._dropped = False

    # What a checkpoint keeps.

    def state_dict(self) -> dict[str, Any]:
        """This rank's errors by the parameter's name, measured in a loss scale of 1: copies."""
        state: dict[str, Any] = {
            **place(self.stage.group), "way": self.compression.way, "steps": self.steps,
            "turns": {}, "worker": {}, "server": {}, "q": {},
        }  # fmt: skip
        for bucket, exchange in self.exchanges.items():
            for p, start, end in placed(bucket):
                name = self.stage.names[p]
                state["turns"][name] = exchange.turn
                kept = [overlap(feedback.accepted(), at, start, end) for at, feedback in exchange.placed()]
                worker, server = kept[: len(exchange.worker)], kept[len(exchange.worker) :]
                if worker:
                    state["worker"][name] = torch.cat([part for _, part in worker]) / self._scale
                for begin, part in server:
                    state["server"][name] = {"begin": begin, "error": part / self._scale}
            if isinstance(exchange, LowRank):
                state["q"] |= self.q_by_name(bucket, exchange)
        return state

    def q_by_name(self, bucket: Bucket, exchange: LowRank) -> dict[str, Tensor]:
        names = {start: self.stage.names[p] for p, start, _ in placed(bucket)}
        kept = zip(exchange.matrices, exchange.accepted_q(), strict=False)  # none before the first call
        return {names[at]: q.clone() for (at, _, _), q in kept}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """The inverse on the same rank of as many; None, or another rank's: errors begin at zero, with a warning."""
        group, way = self.stage.group, self.compression.way
        here = {**place(group), "way": way}
        if state is not None and {key: state[key] for key in here} != here:
            saved = f"{state['ranks']} ranks ({state['way']})"
            warn_of_loss(group, "compression", saved, f"{group.size} ({way})")
            state = {**state, "worker": {}, "server": {}}
        self.exchanges, self._scale, self._dropped = {}, 1.0, False
        self._loaded = None if state is None else dict(state)
        self.steps = 0 if state is None else state["steps"]
        for bucket in self.stage.buckets if state is not None else ():
            self.exchange(bucket)

    def restore(self, bucket: Bucket, exchange: Exchange, state: Mapping[str, Any]) -> None:
        """What was loaded of a bucket into its exchange; of a server's what it still serves."""
        exchange.turn = max((state["turns"].get(self.stage.names[p], 0) for p in bucket.params), default=0)
        for p, start, end in placed(bucket):
            name = self.stage.names[p]
            for i, (at, feedback) in enumerate(exchange.placed()):
                begin, here = overlap(feedback.error, at, start, end)
                if i < len(exchange.worker) and name in state["worker"]:
                    here.copy_(state["worker"][name][begin : begin + len(here)] * self._scale)
                elif i >= len(exchange.worker) and (saved := state["server"].get(name)) is not None:
                    low = max(begin, saved["begin"])
                    high = min(begin + len(here), saved["begin"] + len(saved["error"]))
                    if low < high:
                        part = saved["error"][low - saved["begin"] : high - saved["begin"]]
                        here[low - begin : high - begin] = part * self._scale
        if isinstance(exchange, LowRank):
            names = {start: self.stage.names[p] for p, start, _ in placed(bucket)}
            saved_q = [state["q"].get(names[at]) for at, _, _ in exchange.matrices]
            shapes = [(columns, exchange.power.rank_of(rows, columns)) for _, rows, columns in exchange.matrices]
            if all(q is not None and q.shape == shape for q, shape in zip(saved_q, shapes, strict=True)):
                exchange.q = [q.to(bucket.device, copy=True) for q in saved_q]

    def tensors(self) -> list[Tensor]:
        """The memory kept between steps."""
        return [tensor for exchange in self.exchanges.values() for tensor in exchange.tensors()]


def placed(bucket: Bucket) -> Iterator[tuple[nn.Parameter, int, int]]:
    """Each parameter, and where it begins and ends among the bucket's numbers without padding."""
    at = 0
    for p in bucket.params:
        yield p, at, at + p.numel()
        at += p.numel()


def packed(bucket: Bucket, flat: Tensor) -> Tensor:
    """flat [P] without its padding: a view where that is only at the end."""
    n = sum(p.numel() for p in bucket.params)
    return flat[:n] if n == bucket.numel else torch.cat([bucket.part(flat, p) for p in bucket.params])


def overlap(error: Tensor, at: int, start: int, end: int) -> tuple[int, Tensor]:
    """What of an error, whose first number is number `at`, is of numbers start to end: (from which on, a view)."""
    low, high = max(start - at, 0), max(min(end - at, len(error)), 0)
    low = min(low, high)
    return max(at - start, 0), error[low:high]
