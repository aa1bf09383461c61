"""Random generators by name, as Megatron-LM has them: dropout that is alike on all ranks, and dropout that is not.

`checkpoint` sets them back for its second run, with torch's own. On a machine without CUDA the generator is the CPU's.
DeepSpeed: `CudaRNGStatesTracker` in deepspeed/runtime/activation_checkpointing/checkpointing.py.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from refimpl.deepspeed.accelerator import get_accelerator

NAME = "model-parallel-rng"
OFFSET = 2718  # between the two seeds; any number would do


class CudaRNGStatesTracker:
    """States of generators by name. `fork` draws from one of them for the time of a `with` block."""

    def __init__(self) -> None:
        self.states_: dict[str, Tensor] = {}
        self.seeds_: set[int] = set()
        self.current: str | None = None  # what the generator draws from

    def reset(self) -> None:
        """Forget all."""
        self.states_, self.seeds_ = {}, set()

    def get_states(self) -> dict[str, Tensor]:
        return dict(self.states_)

    def set_states(self, states: dict[str, Tensor]) -> None:
        self.states_ = dict(states)

    def add(self, name: str, seed: int) -> None:
        """A generator that begins with `seed`. ValueError if name or seed is taken."""
        if seed in self.seeds_ or name in self.states_:
            raise ValueError(f"rng tracker: {f'seed {seed}' if seed in self.seeds_ else name!r} already exists")
        here = get_accelerator().get_rng_state()
        get_accelerator().manual_seed(seed)
        self.states_[name] = get_accelerator().get_rng_state()
        self.seeds_.add(seed)
        get_accelerator().set_rng_state(here)

    @contextmanager
    def fork(self, name: str = NAME) -> Iterator[None]:
        """Draw from the generator `name`. KeyError if it was not added."""
        if name not in self.states_:
            raise KeyError(f"rng tracker: {name!r} was not added; there are {sorted(self.states_)}")
        here, outer = get_accelerator().get_rng_state(), self.current
        if outer is not None:  # which may be `name` again
            self.states_[outer] = here
        get_accelerator().set_rng_state(self.states_[name])
        self.current = name
        try:
            yield
        finally:
            self.states_[name] = get_accelerator().get_rng_state()
            self.current = outer
            get_accelerator().set_rng_state(here if outer is None else self.states_[outer])
