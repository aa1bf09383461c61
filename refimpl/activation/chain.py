"""A chain of blocks: measured block by block, run by a plan, and put into a model in place of its blocks.

    for block in self.blocks: x = block(x)      stays as it is; `model.blocks = Chain(model.blocks, plan)`

`measure` runs each block a few times for its seconds and its bytes. `count` runs the whole chain by a plan and counts
the bytes held whenever a block has just run: `refimpl.activation.budget.peak` predicts exactly that, or, where a
stretch begins or ends with views of its input, no less.
DeepSpeed's counterpart: `activation_checkpoint_interval` of a pipeline (deepspeed/runtime/pipe/module.py): every k-th.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from refimpl.activation.budget import Again, Block, Plan, blocks_of
from refimpl.activation.checkpoint import Checkpoint
from refimpl.measure.clock import now
from refimpl.measure.memory import MemoryMeter


def run(plan: Plan, blocks: Sequence[nn.Module], x: Tensor, how: Checkpoint) -> Tensor:
    """x through the blocks, by the plan."""
    for part in plan:
        x = how(run, part.inside, blocks, x, how) if isinstance(part, Again) else blocks[part](x)
    return x


class Chain(nn.ModuleList):
    """The same modules under the same names; iterating gives one callable that runs them all by a plan."""

    def __init__(self, blocks: nn.ModuleList, plan: Plan) -> None:
        """ValueError if the plan does not run each block once, in order."""
        super().__init__(blocks)
        if list(blocks_of(plan)) != list(range(len(blocks))):
            raise ValueError(f"the plan runs blocks {list(blocks_of(plan))}, the chain has {len(blocks)}, each once")
        self.plan, self.how = plan, Checkpoint()

    def __iter__(self) -> Iterator[Any]:
        blocks = list(self._modules.values())
        yield lambda x: run(self.plan, blocks, x, self.how)


def measure(blocks: Sequence[nn.Module], x: Tensor, repeat: int = 3) -> list[Block]:
    """Each block's bytes and seconds, the least of `repeat` runs, with x as the first one's input."""
    measured = []
    for block in blocks:
        leaf = leaf_of(x)
        saved: list[Tensor] = []
        with saved_tensors_hooks(partial(_note, saved), lambda t: t):
            out = block(leaf)
        there, result = leaf.untyped_storage(), out.untyped_storage()
        kept = {t.untyped_storage() for t in saved} - {t.untyped_storage() for t in tensors_of(block)}
        keeps = there in kept, result in kept - {there}
        size = sum(storage.nbytes() for storage in kept - {there, result})
        output = 0 if result == there else result.nbytes()
        saved.clear()
        kept.clear()
        seconds = [_seconds(block, leaf) for _ in range(repeat)]
        forward, backward = (min(s[i] for s in seconds) for i in (0, 1))
        measured.append(Block(there.nbytes(), output, size, forward, backward, _stopped(block, leaf, size), *keeps))
        x = out.detach()
    return measured


def tensors_of(block: nn.Module) -> list[Tensor]:
    return [*block.parameters(), *block.buffers()]


def leaf_of(x: Tensor) -> Tensor:
    """x, as the input of a chain: with a gradient if it can have one."""
    return x.detach().requires_grad_(x.is_floating_point())


def _note(saved: list[Tensor], tensor: Tensor) -> Tensor:
    saved.append(tensor)
    return tensor.detach()  # an output itself would hold the graph that holds it


def _seconds(block: nn.Module, x: Tensor) -> tuple[float, float]:
    """Of one forward and one backward."""
    start = now(x.device)
    out = block(x)
    middle = now(x.device)
    torch.autograd.grad(out, _wanted(block, x), torch.ones_like(out), allow_unused=True)
    return middle - start, now(x.device) - middle


def _wanted(block: nn.Module, x: Tensor) -> list[Tensor]:
    return [t for t in (x, *block.parameters()) if t.requires_grad]


def _stopped(block: nn.Module, x: Tensor, saved: int) -> int | None:
    """Bytes alive beside its input and `saved` where a block's run for backward stops; None if it never runs so."""
    loss: list[Tensor] = []
    meter = MemoryMeter(lambda: {"model": [*tensors_of(block), x], "loss": loss})
    found: list[int] = []
    hook = block.register_forward_hook(lambda *_: found.append(meter.now()["activations"]), always_call=True)
    seed = x.new_ones((), dtype=torch.float32)  # of backward; made here, it is no activation
    with meter:
        loss.append(Checkpoint()(block, x).sum(dtype=torch.float32))
        torch.autograd.grad(loss, _wanted(block, x), [seed], allow_unused=True)
    hook.remove()
    return found[1] - saved if len(found) > 1 else None


def count(plan: Plan, blocks: Sequence[nn.Module], x: Tensor, how: Checkpoint | None = None) -> int:
    """The most activation bytes alive when a block has just run, over a forward and a backward of the chain.

    Gradients of parameters are left in place.
    """
    x = leaf_of(x.clone())
    loss: list[Tensor] = []
    seed = x.new_ones((), dtype=torch.float32)
    model = [t for block in blocks for t in tensors_of(block)]
    meter = MemoryMeter(lambda: {"model": model, "loss": loss, "input": [x]})
    most = 0

    def sample(*_: Any) -> None:
        nonlocal most
        most = max(most, meter.now()["activations"] + x.untyped_storage().nbytes())

    hooks = [block.register_forward_hook(sample, always_call=True) for block in blocks]
    with meter:
        loss.append(run(plan, blocks, x, how or Checkpoint()).sum(dtype=torch.float32))
        loss[0].backward(seed)  # type: ignore[no-untyped-call]
    for hook in hooks:
        hook.remove()
    return most
