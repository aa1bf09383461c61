"""DeepSpeed's utilities by their names; each module says which file of refimpl does the work."""

from refimpl.deepspeed.utils import groups
from refimpl.deepspeed.utils.init_on_device import OnDevice
from refimpl.deepspeed.utils.logging import log_dist, log_dist_once, logger, set_log_level_from_string
from refimpl.deepspeed.utils.nvtx import instrument_w_nvtx
from refimpl.deepspeed.utils.tensor_fragment import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_get_local_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_grad,
    safe_set_local_optimizer_state,
    safe_update_full_grad_vectorized,
)
from refimpl.deepspeed.utils.z3_leaf_module import (
    get_z3_leaf_modules,
    set_z3_leaf_module,
    set_z3_leaf_modules,
    set_z3_leaf_modules_by_name,
    set_z3_leaf_modules_by_suffix,
    unset_z3_leaf_modules,
    z3_leaf_module,
)
from refimpl.engine.dataloader import RepeatingLoader

__all__ = [
    "OnDevice", "RepeatingLoader", "get_z3_leaf_modules", "groups", "instrument_w_nvtx", "log_dist", "log_dist_once",
    "logger", "safe_get_full_fp32_param", "safe_get_full_grad", "safe_get_full_optimizer_state",
    "safe_get_local_fp32_param", "safe_get_local_grad", "safe_get_local_optimizer_state", "safe_set_full_fp32_param",
    "safe_set_full_grad", "safe_set_full_optimizer_state", "safe_set_local_fp32_param", "safe_set_local_grad",
    "safe_set_local_optimizer_state", "safe_update_full_grad_vectorized", "set_log_level_from_string",
    "set_z3_leaf_module", "set_z3_leaf_modules", "set_z3_leaf_modules_by_name", "set_z3_leaf_modules_by_suffix",
    "unset_z3_leaf_modules", "z3_leaf_module",
]  # fmt: skip
