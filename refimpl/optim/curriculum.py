"""A curriculum: a difficulty, such as the length of sequences, that grows with the steps from a least to a most.

    fixed_linear     least + (t / T) (most - least), down to a multiple of `difficulty_step`
    fixed_root       the same with (t / T) to the power 1 / root_degree: faster at first
    fixed_discrete   difficulty[i] up to and with step max_step[i], then the next; the last one for good
    custom           a function of t

Li, Zhang and He 2021, arXiv:2108.06084: short sequences first let large batches and rates train stably.
The schedule alone: who feeds the model cuts the sequences. DeepSpeed's file:
deepspeed/runtime/data_pipeline/curriculum_scheduler.py.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

NEEDED = {
    "fixed_linear": ("total_curriculum_step", "difficulty_step"),
    "fixed_root": ("total_curriculum_step", "difficulty_step", "root_degree"),
    "fixed_discrete": ("difficulty", "max_step"),
    "custom": (),
}


def problem(config: Mapping[str, Any]) -> str | None:
    """What is missing or wrong in a configuration."""
    for key in ("min_difficulty", "max_difficulty", "schedule_type"):
        if config.get(key) is None:
            return f"{key} is missing"
    if (kind := config["schedule_type"]) not in NEEDED:
        return f"schedule_type {kind!r}: must be one of {', '.join(NEEDED)}"
    given = config.get("schedule_config") or {}
    for key in NEEDED[kind]:
        if given.get(key) is None:
            return f"schedule_config.{key} is missing, which {kind} needs"
    if kind == "fixed_discrete" and len(given["difficulty"]) != len(given["max_step"]) + 1:
        return "schedule_config.difficulty must have one element more than max_step: the last is for all later steps"
    return _never_grown(kind, config["min_difficulty"], config["max_difficulty"], given)


def _never_grown(kind: str, least: int, most: int, given: Mapping[str, Any]) -> str | None:
    """What would go wrong later, and in silence: DeepSpeed takes all of it."""
    if least > most:
        return f"min_difficulty {least} is more than max_difficulty {most}: it would never grow"
    if kind in ("fixed_linear", "fixed_root") and 0 < least < (multiple := given["difficulty_step"]):
        return f"min_difficulty {least} is less than schedule_config.difficulty_step {multiple}: it would begin with 0"
    if kind == "fixed_discrete" and sorted(given["max_step"]) != list(given["max_step"]):
        return f"schedule_config.max_step must not fall: {given['max_step']}"
    if kind == "fixed_discrete" and any(difficulty >= most for difficulty in given["difficulty"][:-1]):
        difficulties = given["difficulty"]
        return (
            f"schedule_config.difficulty reaches max_difficulty {most} before its last: {difficulties}; there it stays"
        )
    return None


class CurriculumScheduler:
    """The difficulty of a step. DeepSpeed's class; ValueError for what it asserts.

    config: min_difficulty, max_difficulty, schedule_type and schedule_config, as the JSON has them.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        if wrong := problem(config):
            raise ValueError(f"CurriculumScheduler: {wrong}")
        names = ("min_difficulty", "max_difficulty", "schedule_type", "schedule_config")
        self.state: dict[str, Any] = {name: config[name] for name in names if name in config}
        self.state["current_difficulty"] = config["min_difficulty"]
        self.custom_get_difficulty: Callable[[int], int] | None = None
        self.first_step = True  # which Megatron's pipeline asks

    def get_current_difficulty(self) -> int:
        difficulty: int = self.state["current_difficulty"]
        return difficulty

    def set_current_difficulty(self, difficulty: int) -> None:
        self.state["current_difficulty"] = difficulty

    def set_custom_get_difficulty(self, schedule_function: Callable[[int], int]) -> None:
        """For schedule_type custom: step -> difficulty."""
        self.custom_get_difficulty = schedule_function

    def get_state(self) -> dict[str, Any]:
        return self.state

    def set_state(self, state: dict[str, Any]) -> None:
        self.state = state

    def get_difficulty(self, global_steps: int) -> int:
        """Of this step, the first being 1. ValueError for a custom schedule without its function."""
        kind, asked = self.state["schedule_type"], self.state.get("schedule_config") or {}
        if kind == "fixed_discrete":
            passed = sum(global_steps > last for last in asked["max_step"])
            difficulty: int = asked["difficulty"][passed]
            return difficulty
        if kind == "custom":
            if self.custom_get_difficulty is None:
                raise ValueError("CurriculumScheduler: schedule_type is custom: call set_custom_get_difficulty first")
            return int(self.custom_get_difficulty(global_steps))
        least, most = self.state["min_difficulty"], self.state["max_difficulty"]
        degree = asked["root_degree"] if kind == "fixed_root" else 1
        part = (global_steps / asked["total_curriculum_step"]) ** (1 / degree)
        reached = math.floor(part * (most - least) + least)
        return int(min(reached - reached % asked["difficulty_step"], most))

    def update_difficulty(self, global_steps: int) -> int:
        """Go to this step's difficulty, unless the most is reached: that stays."""
        if self.get_current_difficulty() < self.state["max_difficulty"]:
            self.set_current_difficulty(self.get_difficulty(global_steps))
        return self.get_current_difficulty()
