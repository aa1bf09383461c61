"""The model's weights of an engine: given out and taken in, whole in every stage.

DeepSpeed's functions: `module_state_dict`, `load_module_state_dict` in deepspeed/runtime/engine.py.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from refimpl.engine import weights
from refimpl.engine.contents import frozen_names
from refimpl.engine.state import TrainingState
from refimpl.zero.init import GatheredParameters


class ModuleState(TrainingState):
    """What an `Engine` says of its weights."""

    def module_state_dict(
        self,
        destination: Any = None,
        prefix: str = "",
        keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> dict[str, Any]:
        """The model's `state_dict`. In stage 3 a collective."""
        state: dict[str, Any] = self.module.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        if exclude_frozen_parameters:
            for name in frozen_names(self.module):
                state.pop(prefix + name, None)
        return state

    def load_module_state_dict(
        self,
        checkpoint: Mapping[str, Any],
        strict: bool = True,
        custom_load_fn: Any = None,
        fetch_z3_params: bool = False,
    ) -> None:
        """Load weights into the model, whole in every stage; masters follow. `checkpoint`: they, or {"module": ...}.

        custom_load_fn(src=weights, dst=model) is called instead of `model.load_state_dict` if given. In stage 3 that is
        a collective: parameters are whole meanwhile, whatever fetch_z3_params says, and rank 0's are kept.
        """
        given = checkpoint.get("module", checkpoint)
        if custom_load_fn is not None:
            with GatheredParameters(self.module, modifier_rank=0), torch.no_grad():
                custom_load_fn(src=given, dst=self.module)
        else:
            self.module.load_state_dict(given, strict=strict)

    def save_16bit_model(
        self, save_dir: str | Path, save_filename: str = "pytorch_model.bin", exclude_frozen_parameters: bool = False
    ) -> bool:
        """Write the whole model's weights in its training dtype. Every rank must call it. False if config forbids."""
        return weights.save_16bit_model(self, Path(save_dir), save_filename, exclude_frozen_parameters)

    save_fp16_model = save_16bit_model  # its older name

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Tensor]:
        """The whole weights in the training dtype on rank 0, nothing elsewhere: what Hugging Face's libraries save.

        Elsewhere DeepSpeed gives None. `save_pretrained(state_dict=accelerator.get_state_dict(model))`, which
        accelerate's examples call on every rank, takes None for "not given" and asks for one more, a collective here.
        """
        return weights.whole_weights(self, exclude_frozen_parameters) or {}

    _consolidated_16bit_state_dict = _zero3_consolidated_16bit_state_dict  # so called with tensor parallelism
