"""Random numbers under tensor parallelism: the same on every rank where tensors are whole, others where they are split.

Dropout on a whole tensor must drop the same elements on all ranks, or the ranks' copies of it drift apart and nothing
says so. Dropout on a split tensor, between a column layer and its row layer, must not: with one seed the heads of all
ranks would lose the same elements, one Nth of the randomness that was asked for. So a rank has two streams of random
numbers. torch's own generator is the common one; inside a split region `Draws` puts this rank's own in its place.

    enter    a column layer has computed: the common stream is put aside, this rank's own goes on
    leave    a row layer begins: this rank's own is put aside, the common one goes on
    apart    both, as a `with` block

An exception between the two would leave the rank's own stream in torch's generator, and the ranks' whole tensors would
drift apart from then on. `guard` hooks a model so that the common stream is back when its call ends, however it ends;
and when it begins, after what no hook sees (an interrupt).

With sequence parallelism tokens are split outside those regions too: there every rank draws for itself, always.
Memory: two states, 5,056 bytes each on a CPU. It can be handed to `refimpl.Checkpoint` as a tracker, so that a second
run draws the same. torch's checkpoint knows the common stream alone: a run of its own during backward that draws in a
split region would drop other elements than forward did, and is refused.
Megatron-LM: megatron/core/tensor_parallel/random.py, `CudaRNGStatesTracker`, whose offset 2718 between the common seed
and the first rank's own is kept. DeepSpeed copies that file.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

OFFSET = 2718


class Draws:
    """This rank's own stream of random numbers, on one device."""

    def __init__(self, seed: int, rank: int, device: torch.device | None = None) -> None:
        """`seed`: the same on all ranks, the common stream's; torch's own generator is left as it is."""
        self.device = device or torch.device("cpu")
        self.aside = torch.Generator(self.device).manual_seed(seed + OFFSET + rank).get_state()
        self.inside = False
        self.restored = -1  # the backward pass in which a tracker last put the state back
        self.entered: Tensor | None = None  # the own stream's state at `enter`, during a backward pass

    def _exchange(self) -> None:
        """The generator goes on from the state that lay aside, and its own lies there now."""
        if self.device.type == "cuda":
            current = torch.cuda.get_rng_state(self.device)
            torch.cuda.set_rng_state(self.aside, self.device)
        else:
            current = torch.get_rng_state()
            torch.set_rng_state(self.aside)
        self.aside = current

    def enter(self) -> None:
        """From here on numbers are this rank's own. Nothing if they are already."""
        if not self.inside:
            self.entered = self.aside if torch._C._current_graph_task_id() != -1 else None
            self._exchange()
            self.inside = True

    def leave(self) -> None:
        """From here on they are the common ones. Nothing if they are already.

        RuntimeError if forward is run a second time, in backward, and has drawn what no tracker has put back.
        """
        if self.inside:
            self._exchange()
            self.inside = False
            second = self.entered is not None and self.restored != torch._C._current_graph_task_id()
            if second and not torch.equal(self.aside, self.entered):  # type: ignore[arg-type]
                raise RuntimeError(
                    "an activation checkpoint has run dropout on parts again with other numbers than forward's: use "
                    "refimpl.Checkpoint(trackers=(draws,)), or no dropout between column and row layers"
                )

    @contextmanager
    def apart(self) -> Iterator[None]:
        """This rank's own for a `with` block."""
        self.enter()
        try:
            yield
        finally:
            self.leave()

    def guard(self, model: nn.Module, parts: Iterable[nn.Module] = ()) -> None:
        """A call of `model` begins and ends with the common stream; so does one of its `parts` that raises."""
        model.register_forward_pre_hook(self._leave)
        model.register_forward_hook(self._leave, always_call=True)
        for part in parts:
            part.register_forward_hook(self._leave_after_an_error, always_call=True)

    def _leave(self, *_: Any) -> None:
        self.leave()

    def _leave_after_an_error(self, module: nn.Module, args: Any, result: Any) -> None:
        if result is None:  # which is what a hook is given of a call that raised
            self.leave()

    def get_states(self) -> tuple[Tensor, bool]:
        return self.aside.clone(), self.inside

    def set_states(self, states: tuple[Tensor, bool]) -> None:
        """The inverse; the generator itself is whoever calls's to put back."""
        self.aside, self.inside = states[0].clone(), states[1]
        self.restored = torch._C._current_graph_task_id()
