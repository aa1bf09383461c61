"""With what scripts read a configuration's file by themselves. DeepSpeed: deepspeed/runtime/config_utils.py."""

from collections.abc import Mapping
from typing import Any

from refimpl.engine.configuration.read import unique as dict_raise_error_on_duplicate_keys

__all__ = ["dict_raise_error_on_duplicate_keys", "get_dict_param", "get_list_param", "get_scalar_param"]


def get_scalar_param(param_dict: Mapping[str, Any], param_name: str, param_default_value: Any) -> Any:
    """The value of a key, else the default."""
    return param_dict.get(param_name, param_default_value)


get_list_param = get_dict_param = get_scalar_param
