"""What an engine trains and how far it has come: all that a checkpoint saves and restores.

`Engine` is one and adds the calls; what only looks at it or saves it (checkpoint, resume, weights, the questions
of `Questions`) needs no more than this, and so knows nothing of the engine.
"""

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.optim import Optimizer

from refimpl.checkpoint.background import Background
from refimpl.engine.build import Parts
from refimpl.engine.copies import check_copies, check_trained_alike
from refimpl.engine.cut import counted_elsewhere
from refimpl.engine.layout import check_whole
from refimpl.engine.trained import make_optimizer


class TrainingState(nn.Module):
    """`global_steps` counts optimizer steps (skipped ones too), `micro_steps` micro-batches, `global_samples` samples
    over all ranks, `stage.skipped_steps` updates skipped for a gradient that was not finite."""

    def __init__(self, parts: Parts) -> None:
        super().__init__()
        self.module, self._config, self.stage = parts.model, parts.config, parts.stage
        self.axes, self.group = parts.axes, parts.group
        self._shown: Any = None
        self.lr_scheduler: Any | None = parts.scheduler
        self.training_dataloader, self.collate_fn = parts.dataloader, parts.collate_fn
        self.global_steps = self.micro_steps = self.global_samples = 0
        self.saving = Background()
        self._batches: Iterator[Any] | None = None  # of the training data, in `train_batch`

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Neither copied nor pickled: it is one rank's part of what all ranks do."""
        raise TypeError(
            f"an engine ({type(self).__name__}) cannot be copied or pickled: copy.deepcopy(engine.module) is a plain "
            "model with the whole weights, and save_checkpoint keeps all that training needs (each on every rank)"
        )

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> Any:
        """What torch's DistributedDataParallel asks first of a module that it is to wrap."""
        raise TypeError(
            f"DistributedDataParallel around an {type(self).__name__}, which averages gradients over the ranks itself: "
            "call the engine in its place"
        )

    def saved_name(self, name: str) -> str:
        """What a parameter or module of `module` is called in the whole model, of which `module` may be a part."""
        return name

    def copies(self) -> dict[nn.Parameter, str]:
        """The parameters that an earlier part of the model has too, and counts: their names there."""
        return {}

    @property
    def config(self) -> Any:
        """The configuration, a DeepSpeedConfig; or what a script has put here, by which nothing is trained."""
        return self._config if self._shown is None else self._shown

    @config.setter
    def config(self, other: Any) -> None:
        self._shown = other  # h2o-llmstudio: the model's own, for who takes the engine for the model

    @property
    def optimizer(self) -> Optimizer | None:
        """The torch optimizer; its parameters are this rank's fp32 shards. None in an engine for inference."""
        return self.stage.update.slices.optimizer

    @optimizer.setter
    def optimizer(self, other: Optimizer | None) -> None:
        self.stage.optimizer = other

    def _configure_optimizer(self, client_optimizer: Any, model_parameters: Any) -> None:
        """Train with this optimizer, or what its callable makes of `model_parameters`, from now on. On every rank.

        DeepSpeed's name, for whose optimizer is made with the engine at hand. ValueError if the engine has one already.
        """
        optimizer = make_optimizer(client_optimizer, self._config.optimizer, list(model_parameters))
        check_whole(optimizer, self.axes, self.copies())
        check_trained_alike(self.module, optimizer, self.axes)
        self.stage.attach(optimizer)
        check_copies(self.stage, self.axes, counted_elsewhere(self.module, self.axes))

    def data_state(self) -> Any | None:
        """The position in the training data that `initialize` was given; None if there is none that could say it."""
        keeper = position_of(self.training_dataloader)
        return None if keeper is None else keeper.state_dict()

    def go_on_with_data(self, state: Any) -> None:
        """Go on behind `data_state()`: with the next iterator over the data, and with `train_batch`."""
        self._batches = None
        if state is not None and (keeper := position_of(self.training_dataloader)) is not None:
            keeper.load_state_dict(state)


def position_of(loader: Any) -> Any | None:
    """Who knows the position in a loader's data: its sampler, or a stream that has a state itself."""
    keepers = (getattr(loader, "sampler", None), getattr(loader, "dataset", None))
    return next((k for k in keepers if hasattr(k, "state_dict") and hasattr(k, "load_state_dict")), None)
