"""`progressive_layer_drop` and `curriculum_learning`: what the engine tells the model's forward, by the step it is in.

In training the forward gets `progressive_layer_drop=True, pld_theta=...`, or `curriculum_seqlen=...`, among its
keywords, and does the rest: a model without them fails with Python's TypeError, as in DeepSpeed. Both follow from the
number of updates, so that they go on from a checkpoint (DeepSpeed begins with a theta of 1 again).
"""

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from refimpl.engine.configuration.values import Count, Number, Positive, Section, as_number
from refimpl.optim.curriculum import CurriculumScheduler, problem
from refimpl.optim.layer_drop import ProgressiveLayerDrop


class LayerDrop(Section):
    """Layers that the model drops by and by; `refimpl.optim.layer_drop`."""

    enabled: bool = Field(default=False, description="tell the model's forward which share of its layers to compute")
    theta: Annotated[float, BeforeValidator(as_number), Field(ge=0, le=1)] = Field(
        default=1.0, description="the share in the end"
    )
    gamma: Number = Field(default=0.001, description="how fast it is reached: exp(-gamma step)")


class ScheduleConfig(Section):
    total_curriculum_step: Positive | None = Field(
        default=None, description="fixed_linear, fixed_root: steps to the end"
    )
    difficulty_step: Positive | None = Field(default=None, description="fixed_linear, fixed_root: multiples of this")
    root_degree: Positive = Field(default=1, description="fixed_root: 2 is the square root")
    difficulty: list[Count] | None = Field(default=None, description="fixed_discrete: one after the other")
    max_step: list[Count] | None = Field(default=None, description="fixed_discrete: the last step of each but the last")


class Curriculum(Section):
    """A difficulty that grows; `refimpl.optim.curriculum`."""

    enabled: bool = Field(default=False, description="let a difficulty grow with the steps")
    curriculum_type: str = Field(default="seqlen", description="seqlen: the forward is told it, as curriculum_seqlen")
    min_difficulty: Count | None = Field(default=None, description="at first")
    max_difficulty: Count | None = Field(default=None, description="in the end")
    schedule_type: Literal["fixed_linear", "fixed_root", "fixed_discrete", "custom"] | None = Field(
        default=None, description="how it grows; custom: engine.curriculum_scheduler_legacy.set_custom_get_difficulty"
    )
    schedule_config: ScheduleConfig = Field(default_factory=ScheduleConfig, description="the schedule's own numbers")

    @model_validator(mode="after")
    def check_schedule(self) -> Self:
        if self.enabled and (wrong := problem(self.model_dump(exclude_unset=True))):
            raise ValueError(wrong)
        return self


class Told:
    """What the model's forward is told beside its inputs."""

    def __init__(self, drop: LayerDrop, curriculum: Curriculum) -> None:
        self.drop = ProgressiveLayerDrop(drop.theta, drop.gamma) if drop.enabled else None
        self.of_length = curriculum.curriculum_type == "seqlen"
        self.curriculum = CurriculumScheduler(curriculum.model_dump(exclude_unset=True)) if curriculum.enabled else None
        self.last = 0  # the updates of the last question
        self.of_step: int | None = None  # the difficulty that `grows` found

    def at(self, updates: int) -> dict[str, Any]:
        """Keywords of a forward in training behind so many updates."""
        words: dict[str, Any] = {}
        if self.drop is not None:
            self.drop.update_state(max(0, updates - 1))  # DeepSpeed's is that of the last update, too
            words |= self.drop.get_state()
        if self.curriculum is not None:
            if updates < self.last:  # an earlier checkpoint was loaded; the most, once reached, would stay
                self.curriculum.set_current_difficulty(self.curriculum.state["min_difficulty"])
            self.last = updates
            difficulty = self.curriculum.update_difficulty(updates + 1)
            words |= {"curriculum_seqlen": difficulty} if self.of_length else {}
        return words

    def grows(self, updates: int) -> bool:
        """Whether the difficulty, where there is one, is another than in the step before; goes to this step's.

        Not by what it was: the script may have gone to this step's itself, to cut the sequences.
        """
        self.at(updates)
        before, self.of_step = self.of_step, self.curriculum.get_current_difficulty() if self.curriculum else None
        return before != self.of_step
