"""The model's weights of an engine: given out and taken in, whole in every stage.

DeepSpeed's functions: `module_state_dict`, `load_module_state_dict` in deepspeed/runtime/engine.py.
"""

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from refimpl.engine.saving import weights
from refimpl.engine.saving.contents import frozen_names
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
        z3_params_to_fetch: Iterable[nn.Parameter] | None = None,
        allowed_missing_keys: Collection[str] | None = None,
    ) -> None:
        """Load weights into the model, whole in every stage; masters follow. `checkpoint`: they, or {"module": ...}.

        custom_load_fn(src=weights, dst=model) is called instead of `model.load_state_dict` if given. In stage 3 that is
        a collective: parameters are whole meanwhile, whatever the two of z3_params say; rank 0's are kept.
        RuntimeError of a strict load for a key that is missing, if not allowed to be, or that the model has not.
        """
        given = checkpoint.get("module", checkpoint)
        if custom_load_fn is not None:
            with GatheredParameters(self.module, modifier_rank=0), torch.no_grad():
                custom_load_fn(src=given, dst=self.module)
        elif allowed_missing_keys is None or not strict:
            self.module.load_state_dict(given, strict=strict)
        else:
            keys = self.module.load_state_dict(given, strict=False)
            missing = sorted(set(keys.missing_keys).difference(allowed_missing_keys))
            if missing or keys.unexpected_keys:
                raise RuntimeError(
                    f"load_module_state_dict: not given and not allowed to be missing: {missing}; not the model's: "
                    f"{keys.unexpected_keys}; all else was loaded"
                )

    def _create_checkpoint_file(self, save_dir: str | Path, tag: str, zero_checkpoint: bool) -> bool:
        """Make the folder of a tag, for `_save_checkpoint`. Any rank may call it. Returns True."""
        (Path(save_dir) / tag).mkdir(parents=True, exist_ok=True)
        return True

    def _save_checkpoint(
        self,
        save_dir: str | Path,
        tag: str,
        client_state: Mapping[str, Any] | None = None,
        exclude_frozen_parameters: bool = False,
    ) -> None:
        """This rank's model as {"module": weights} with `client_state` in DeepSpeed's mp_rank_XX_model_states.pt.

        What SwissArmyTransformer saves by, on the first data-parallel rank alone: no collective, no optimizer; its own
        reader takes it, not `load_checkpoint`. RuntimeError where no rank has the weights: stage 3 and pipelines.
        """
        if self._config.zero_optimization.stage == 3 or self.axes.pipeline.size > 1:
            raise RuntimeError("_save_checkpoint: no rank has the weights here; call save_checkpoint on every rank")
        state = {"module": self.module_state_dict(exclude_frozen_parameters=exclude_frozen_parameters)}
        counted = {"global_steps": self.global_steps, "global_samples": self.global_samples}
        name = f"mp_rank_{self.axes.tensor.rank:02d}_model_states.pt"
        weights.write(Path(save_dir) / tag / name, state | counted | dict(client_state or {}))

    def save_16bit_model(
        self, save_dir: str | Path, save_filename: str = "pytorch_model.bin", exclude_frozen_parameters: bool = False
    ) -> bool:
        """Write the whole model's weights as it trains them. Every rank must call it. False if config forbids."""
        return weights.save_16bit_model(self, Path(save_dir), save_filename, exclude_frozen_parameters)

    save_fp16_model = save_16bit_model  # its older name

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Tensor]:
        """The whole weights in the training dtype on rank 0, nothing elsewhere: what Hugging Face's libraries save.

        Elsewhere DeepSpeed gives None. `save_pretrained(state_dict=accelerator.get_state_dict(model))`, which
        accelerate's examples call on every rank, takes None for "not given" and asks for one more, a collective here.
        """
        return weights.whole_weights(self, exclude_frozen_parameters) or {}

    _consolidated_16bit_state_dict = _zero3_consolidated_16bit_state_dict  # so called with tensor parallelism
