"""The section `compression_training` of a configuration: what a model is trained to do without.

    "compression_training": {"weight_quantization": {
        "shared_parameters": {"enabled": true, "quantize_weight_in_forward": true, "schedule_offset": 100},
        "different_groups": {"wq1": {"params": {"start_bits": 8, "target_bits": 4}, "modules": ["mlp", "attn"]}}}}

A technique has parameters for all and for each of its groups; a group names its layers by regular expressions that are
searched for in their names. What is not enabled is not read. DeepSpeed until 0.19.6:
deepspeed/compression/config.py.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Generic, Literal, Self, TypeVar

from pydantic import BeforeValidator, Field, model_validator

from refimpl.engine.configuration.values import Count, Names, Number, Positive, Section, Share, as_number

Kind = Literal["symmetric", "asymmetric"]
Bits = Annotated[int, BeforeValidator(as_number), Field(ge=1, le=16)]
SNIP = "snip_momentum is neural_compressor's, not part of this project: write l1 or topk"


class Shared(Section):
    """What all techniques have."""

    enabled: bool = Field(default=False, description="without it nothing else of the technique is read")


class Mixed(Section):
    """The unrounded numbers leave little by little."""

    enabled: bool = Field(default=False, description="mix rounded and unrounded numbers")
    quantize_change_ratio: Number = Field(default=0.001, description="by how much the unrounded share falls a step")


class WeightShared(Shared):
    schedule_offset: Count = Field(default=0, description="steps before weights are rounded")
    quantize_groups: Positive = Field(default=1, description="parts of a weight with a scale each")
    quantization_type: Kind = Field(default="symmetric", description="whether the grid has its middle at 0")
    rounding: Literal["nearest", "stochastic"] = Field(default="nearest", description="stochastic: unbiased, drawn")
    quantize_weight_in_forward: bool = Field(
        default=False, description="target_bits from the first; false: from start_bits down. Both round in forward"
    )
    fp16_mixed_quantize: Mixed = Field(default_factory=Mixed, description="mix the rounded numbers in by and by")


class WeightParams(Section):
    start_bits: Bits = Field(description="bits at first")
    target_bits: Bits = Field(description="bits in the end")
    quantization_period: Count = Field(default=1, description="steps before the first bit goes; doubles with each")

    @model_validator(mode="after")
    def check_bits(self) -> Self:
        if self.start_bits < self.target_bits:
            raise ValueError(f"start_bits {self.start_bits} is less than target_bits {self.target_bits}")
        return self


class InputShared(Shared):
    schedule_offset: Count = Field(default=1000, description="steps before inputs are rounded")
    quantization_type: Kind = Field(default="symmetric", description="whether the grid has its middle at 0")
    range_calibration: Literal["dynamic", "static"] = Field(
        default="dynamic", description="a range for each token, or a moving average of those that were seen"
    )


class InputParams(Section):
    bits: Annotated[int, BeforeValidator(as_number), Field(ge=4, le=16)] = Field(description="bits of an input")


class PruneShared(Shared):
    schedule_offset: Count = Field(default=1000, description="steps before anything is masked")
    method: Literal["l1", "topk"] = Field(default="l1", description="by size at the beginning, or by learned scores")

    @model_validator(mode="before")
    @classmethod
    def check_method(cls, given: Any) -> Any:
        if isinstance(given, Mapping) and given.get("method") == "snip_momentum":
            raise ValueError(SNIP)
        return given


class HeadShared(Shared):
    schedule_offset: Count = Field(default=1000, description="steps before anything is masked")
    method: Literal["topk"] = Field(default="topk", description="by learned scores; DeepSpeed has no other either")
    num_heads: Positive = Field(description="heads in the columns of an attention's output")


class PruneParams(Section):
    dense_ratio: Share = Field(description="the share that is kept")


P = TypeVar("P", bound=Section)
S = TypeVar("S", bound=Shared)


class Group(Section, Generic[P]):
    """Some layers, and what is done to them."""

    params: P = Field(description="what is done")
    modules: Names = Field(default=["*"], description="regular expressions, searched for in layers' names; * is all")
    related_modules: list[list[str]] | None = Field(
        default=None, description="for each of modules: the layers that lose what redundancy_clean takes out of it"
    )

    @model_validator(mode="after")
    def check_related(self) -> Self:
        if self.related_modules is not None and len(self.related_modules) != len(self.modules):
            raise ValueError(f"{len(self.modules)} modules have {len(self.related_modules)} lists of related_modules")
        return self


class Method(Section, Generic[S, P]):
    """A technique."""

    shared_parameters: S = Field(description="what all groups have")
    different_groups: dict[str, Group[P]] = Field(default_factory=dict, description="each with a name of one's choice")

    @model_validator(mode="after")
    def check_groups(self) -> Self:
        if not self.different_groups:
            raise ValueError("enabled, and has no group: different_groups says which layers, and how far")
        return self


class WeightQuantization(Method[WeightShared, WeightParams]):
    """Rounded weights."""

    @model_validator(mode="after")
    def check_few_bits(self) -> Self:
        """Two levels or three have 0 in their middle."""
        shared = self.shared_parameters
        few = [name for name, group in self.different_groups.items() if group.params.target_bits < 3]
        if few and (shared.quantization_type != "symmetric" or shared.rounding != "nearest"):
            raise ValueError(f"{few[0]}: 1 and 2 bits are symmetric, and rounded to nearest")
        return self


class LayerReduction(Section):
    """A student with some of its teacher's layers; `init_compression(model, config, teacher_model)` copies them."""

    enabled: bool = Field(default=False, description="the model begins with layers of a teacher")
    keep_number_layer: Positive | None = Field(default=None, description="layers of the student; checked")
    module_name_prefix: str = Field(default="", description="the name of the list of layers, in both")
    teacher_layer: list[Count] = Field(default_factory=list, description="the teacher's layers that are copied")
    other_module_name: list[str] = Field(default_factory=list, description="other modules that are copied")

    @model_validator(mode="after")
    def check_number(self) -> Self:
        if self.keep_number_layer not in (None, len(self.teacher_layer)):
            raise ValueError(
                f"keep_number_layer is {self.keep_number_layer}, and teacher_layer names {len(self.teacher_layer)}"
            )
        return self


Off = BeforeValidator(lambda given: given or None)  # `answer` leaves nothing of a technique that is not on


class CompressionTraining(Section):
    """A model trained for fewer bits and fewer numbers: `refimpl.compress.weights`."""

    weight_quantization: Annotated[WeightQuantization | None, Off] = Field(default=None, description="rounded weights")
    activation_quantization: Annotated[Method[InputShared, InputParams] | None, Off] = Field(
        default=None, description="rounded inputs of layers"
    )
    sparse_pruning: Annotated[Method[PruneShared, PruneParams] | None, Off] = Field(
        default=None, description="weights without some of their numbers"
    )
    row_pruning: Annotated[Method[PruneShared, PruneParams] | None, Off] = Field(
        default=None, description="Linear layers without some of their outputs"
    )
    head_pruning: Annotated[Method[HeadShared, PruneParams] | None, Off] = Field(
        default=None, description="attention without some of its heads"
    )
    channel_pruning: Annotated[Method[PruneShared, PruneParams] | None, Off] = Field(
        default=None, description="Conv2d layers without some of their outputs"
    )
    layer_reduction: LayerReduction = Field(default_factory=LayerReduction, description="fewer layers than a teacher")

    @property
    def active(self) -> bool:
        """Whether training is changed by anything here."""
        return any(self.get(name) for name in type(self).model_fields if name != "layer_reduction")
