"""How a value of a DeepSpeed JSON file is read, where DeepSpeed takes more than one spelling of it."""

import math
import sys
from collections.abc import Mapping
from typing import Annotated, Any

import torch
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, PlainValidator

DTYPES = {
    "fp32": torch.float32,
    "float32": torch.float32,
    "float": torch.float32,
    "fp16": torch.float16,
    "float16": torch.float16,
    "half": torch.float16,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "bfp16": torch.bfloat16,  # so spelt by DeepSpeed until 0.13
}


def as_number(value: Any) -> Any:
    """JSON has no 5e8 that is an integer, so `5e8`, `"5e8"` and `500000000` are the same count. A bool is no number."""
    if not isinstance(no_bool(value), str):
        return value
    try:
        return float(value)
    except ValueError:
        raise ValueError("must be a number") from None


def rounded_down(value: Any) -> Any:
    """transformers before 4.45 fills in 0.9 hidden_size^2, which DeepSpeed from 0.15 on refuses."""
    number = as_number(value)
    return int(number) if isinstance(number, float) and 0 <= number < math.inf else number


def false_is_none(value: Any) -> Any:
    """Public files write false where they mean that nothing is set, and DeepSpeed takes it so."""
    return None if value is False else value


def no_bool(value: Any) -> Any:
    """`true` is not the number 1."""
    if isinstance(value, bool):
        raise ValueError("must be a number, not true or false")
    return value


def as_dtype(value: Any) -> torch.dtype:
    """`"bf16"`, `"bfloat16"`, `"torch.bfloat16"` and `torch.bfloat16` are the same dtype."""
    if isinstance(value, str | torch.dtype):
        dtype = DTYPES.get(str(value).lower().removeprefix("torch."))
        if dtype is not None:
            return dtype
    raise ValueError("must be one of fp32, fp16, bf16")


def of_16_bits(dtype: torch.dtype) -> torch.dtype:
    """torch.autocast has no other."""
    if dtype == torch.float32:
        raise ValueError("must be bf16 or fp16")
    return dtype


def upper(value: Any) -> Any:
    """DeepSpeed reads `Warn` and `WARN` alike."""
    return value.upper() if isinstance(value, str) else value


def or_none(value: Any) -> Any:
    """DeepSpeed reads null, and a value nobody filled in, as no offload."""
    return "none" if value in (None, "auto") else lower(value)


def unless_off(section: Any) -> Any:
    """Without a device the other keys are not read."""
    off = isinstance(section, Mapping) and section.get("device") in ("none", "auto", None)
    late = {"delayed_update": True} if off and section.get("delayed_update") else {}  # is refused, not forgotten
    return late if off or section in (None, False) else section


def never(value: Any) -> Any:
    """An infinite interval never ends: the same as none."""
    return None if value in (float("inf"), "inf", "Infinity") else value


def lower(value: Any) -> Any:
    """DeepSpeed reads `SUM` and `sum` alike."""
    return value.lower() if isinstance(value, str) else value


def whole_number(size: Any, otherwise: int = 1) -> int:
    """2, 2.0 and "2" are 2; what is none, or less than 1, is `otherwise` here."""
    try:
        number = int(float(size))
        return number if not isinstance(size, bool) and float(size) == number >= 1 else otherwise
    except (TypeError, ValueError, OverflowError):
        return otherwise


Names = Annotated[list[str], BeforeValidator(lambda names: [names] if isinstance(names, str) else names)]
Count = Annotated[int, BeforeValidator(as_number), Field(ge=0, le=sys.maxsize)]
StepOrNone = Annotated[int, BeforeValidator(as_number), Field(ge=-1, le=sys.maxsize)]  # -1: at no step
Positive = Annotated[int, BeforeValidator(as_number), Field(ge=1, le=sys.maxsize)]
Number = Annotated[float, BeforeValidator(as_number), Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, BeforeValidator(as_number), Field(gt=0, le=1)]
Dtype = Annotated[
    torch.dtype, PlainValidator(as_dtype), PlainSerializer(lambda dtype: str(dtype).removeprefix("torch."))
]


class Section(BaseModel):
    """Unknown keys are errors and values do not change after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    def get(self, name: str, default: Any = None) -> Any:
        """As of the dictionary that DeepSpeed's engines keep as their `config`."""
        return getattr(self, name, default)

    def __getitem__(self, name: str) -> Any:
        if name not in type(self).model_fields:
            raise KeyError(name)
        return getattr(self, name)

    def __contains__(self, name: str) -> bool:
        return self.get(name) is not None

    def __setattr__(self, name: str, value: Any) -> None:
        raise TypeError(
            f"{name} = {value!r}: the engine was built by what its configuration said, and does not ask it again. Of a "
            "batch engine.set_train_batch_size(n) changes the micro-batches and engine.set_train_micro_batch_size(n) "
            "their size; optimizer.param_groups have the learning rate"
        )

    __setitem__ = __setattr__
