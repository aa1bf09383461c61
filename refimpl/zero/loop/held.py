"""What a stage holds, for whoever counts it, saves it or looks at the last step."""

from typing import Any

from torch import Tensor, nn

from refimpl.offload.homes import is_here
from refimpl.optim.loss_scale import LossScaler
from refimpl.zero.built import Built
from refimpl.zero.parameter import DATA, Freed
from refimpl.zero.reduction.owing import Owing


class Held(Built):
    """A part of `Stage`."""

    def state_dict(self) -> dict[str, Any]:
        """What this rank owns (references, not copies): optimizer state, fp32 weights, loss scale.

        Where something travels compressed also what it has not sent yet.
        """
        self.catch_up()
        self.refuse_unfit()
        more = {"compression": self.owing.state_dict()} if self.owing is not None else {}
        return {"stage": type(self).__name__, "ranks": self.group.size, **self.update.state_dict(), **more}

    def refuse_unfit(self) -> None:
        """RuntimeError if weights and state are not of one step, or not all here."""
        self.update.refuse_torn()
        self.parked.refuse()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of `state_dict`, on every rank. ValueError for another stage or number of ranks."""
        here = {"stage": type(self).__name__, "ranks": self.group.size}
        for key, value in here.items():
            if state.get(key) != value:
                raise ValueError(f"this state was saved with {key} = {state.get(key)}, here {key} = {value}")
        self.parked.refuse()
        self.catch_up()
        self.include_thawed()  # what is trained from the next forward on takes its state too
        self.update.load_state_dict(state)
        if self.owing is not None:
            self.owing.load_state_dict(state.get("compression"))
        self.gather()

    @property
    def owing(self) -> Owing | None:
        """Who keeps what was not sent yet, if something travels compressed with feedback."""
        return self.compressed or self.update.owing

    def full_state_dict(self) -> dict[str, Any] | None:
        """The model's weights by name on rank 0, None elsewhere: views of the model's own memory, not a copy.

        What a module's `get_extra_state` gives, which may be no tensor, is among them.
        """
        self.catch_up()
        self.update.refuse_torn()
        self.parked.refuse("lp_params")
        return self.model.state_dict() if self.speaks() else None

    def speaks(self) -> bool:
        """Whether this rank gives the model's weights: rank 0, and the first that has an expert."""
        return self.group.rank == 0 or any(ranks.rank == 0 for ranks in self.experts.values())

    def tensors(self) -> dict[str, list[Tensor]]:
        """Every tensor this stage keeps alive now, by class, for a `MemoryMeter` (views: count their storages)."""
        update = self.update
        masters = [m for b, m in update.masters.items() if m is not update.owned[b] and is_here(m)]
        homes = {h for h in (self.config.optimizer_home, self.config.parameter_home) if h is not None}
        buffers = {"offload buffers": [t for home in homes for t in home.memory()]} if homes else {}
        errors = {"compression": self.compressed.tensors()} if self.compressed is not None else {}
        waiting = {"delayed update": update.waiting()} if self.config.delayed_update else {}
        return (
            {
                "parameters": [DATA.__get__(p) for p in self.names if not isinstance(p, Freed)],
                "gradients": self.gradients.tensors(),
                "optimizer": [t for t in update.state() if is_here(t)],
                "master weights": masters,
                "gathered": [],
                "buckets": [*self.gradients.buffers(), *self.group.scratch()],
            }
            | buffers
            | waiting
            | errors
        )

    @property
    def scaler(self) -> LossScaler | None:
        return self.update.scaler

    def loss_scale(self) -> float:
        """What the loss of the next backward is multiplied by: fp16's; 1 in other dtypes."""
        return self.scaler.scale if self.scaler else 1.0

    @property
    def grad_norm(self) -> float | None:
        """Global L2 norm of the last step's gradients: unscaled, before clipping, each parameter counted once."""
        return self.update.grad_norm

    @property
    def shown_norm(self) -> float | None:
        """The same for scripts that log it: where a loss scale has skipped the step, the last one's that it did not.

        Before there is one 0, as in DeepSpeed: overflows are a loss scale's daily work, and no NaN in a log.
        """
        return self.update.shown_norm

    @property
    def skipped_steps(self) -> int:
        return self.update.skipped_steps

    def name_of(self, p: nn.Parameter) -> str:
        return self.names.get(p, "?")
