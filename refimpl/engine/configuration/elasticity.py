"""The section `elasticity` of a configuration: the batch that it chooses, cut up for the ranks that there are.

    "elasticity": {"enabled": true, "max_train_batch_size": 2000, "micro_batch_sizes": [2, 4, 6], "version": 0.1}

Version 0.1 counts ranks. 0.2 counts whole machines, each with num_gpus_per_node / model_parallel_size ranks that read
different data; with one such rank a machine it is 0.1. How a batch is chosen: `refimpl.engine.elastic`.

The batches, and who shares them, are those of DeepSpeed's elasticity/elasticity.py. Not as there: in version 0.2 a
number of ranks that does not share the batch is an error, as in 0.1, where DeepSpeed trains with another batch (perhaps
of 0); min_gpus that are no whole machines are rounded up; fewer max_gpus than one machine has are not "any number".
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from refimpl.engine.configuration.batch import MICRO, STEPS, TRAIN
from refimpl.engine.configuration.keys import ConfigError
from refimpl.engine.configuration.one_section import section_of
from refimpl.engine.configuration.quote import quote
from refimpl.engine.configuration.sections import Elasticity
from refimpl.engine.elastic import choose

SCHEDULER = "DEEPSPEED_ELASTICITY_CONFIG"  # the section, as JSON, that whoever starts the ranks has read


class ElasticityError(ConfigError):
    """What is wrong with an elastic job; DeepSpeed's name."""


class ElasticityConfigError(ElasticityError):
    """A section `elasticity` that cannot be honoured."""


class ElasticityIncompatibleWorldSize(ElasticityError):
    """A number of ranks that does not share the batch."""


@dataclass(frozen=True)
class Shared:
    """A batch, and the numbers of data-parallel ranks that share it, ascending."""

    batch: int
    ranks: tuple[int, ...]
    micro_batches: tuple[int, ...]

    def triple(self, ranks: int) -> dict[str, int]:
        """The three sizes on so many ranks, with the largest micro-batch. ElasticityIncompatibleWorldSize names all."""
        if ranks not in self.ranks:
            raise ElasticityIncompatibleWorldSize(
                f"elasticity: {ranks} data-parallel ranks do not share the batch of {self.batch}; these do: "
                f"{', '.join(map(str, self.ranks))}. Start one of these numbers, or change "
                "elasticity.micro_batch_sizes, max_train_batch_size, min_gpus or max_gpus"
            )
        each = self.batch // ranks
        micro = max(m for m in self.micro_batches if each % m == 0)
        return {TRAIN: self.batch, MICRO: micro, STEPS: each // micro}


def with_batch(values: Mapping[str, Any], ranks: int) -> dict[str, Any]:
    """`values` with the batch that their section `elasticity` chooses; without that section where it is off.

    ranks: data-parallel ones. `ElasticityError` names the key.
    """
    others = {name: value for name, value in values.items() if name != "elasticity"}
    section = read(values)
    if section is None:
        return others
    check_scheduler(section)
    chosen = shared(section).triple(ranks)
    given = [name for name, size in chosen.items() if others.get(name, size) not in (None, size)]
    if given and not section.ignore_non_elastic_batch_info:
        raise ElasticityConfigError(
            f"{', '.join(given)}: elasticity chooses all three sizes; leave them out, or set "
            "elasticity.ignore_non_elastic_batch_info to true"
        )
    return {**others, **chosen, "elasticity": section}


def read(config: Mapping[str, Any]) -> Elasticity | None:
    """The section of `config`, checked; None where it is off. ElasticityConfigError, a line for each wrong key."""
    given = config.get("elasticity")
    if not isinstance(given, Mapping) or not given.get("enabled"):
        return None
    try:
        section = section_of(config, "elasticity", Elasticity)
    except ConfigError as error:
        raise ElasticityConfigError(str(error)) from None
    return section if section.enabled else None


def check_scheduler(section: Elasticity) -> None:
    """ElasticityConfigError where whoever starts the ranks counts on another batch than they will train with."""
    if (text := os.environ.get(SCHEDULER)) is None:
        return
    there = f"{SCHEDULER} in the environment"
    try:
        given = json.loads(text)
        seen = read({"elasticity": given})
    except json.JSONDecodeError as error:
        raise ElasticityConfigError(f"{there} is not JSON: {error}") from None
    except ElasticityConfigError as error:
        raise ElasticityConfigError(f"{there}: {error}") from None
    if seen is None:
        raise ElasticityConfigError(f"{there}: no section with enabled = true: {quote(given)}")
    ours, theirs = (one.model_dump(exclude={"ignore_non_elastic_batch_info"}) for one in (section, seen))
    if differ := [f"{name} {theirs[name]} there, {ours[name]} here" for name in ours if ours[name] != theirs[name]]:
        raise ElasticityConfigError(f"elasticity is not what {there} says: {'; '.join(differ)}: give both the same")


def shared(section: Elasticity) -> Shared:
    """The batch, and who shares it. ElasticityConfigError where nobody in the range does."""
    node = 1 if section.version == 0.1 else section.num_gpus_per_node  # ranks of a machine
    feeds = node // section.model_parallel_size  # those that read different data
    most = section.max_train_batch_size // feeds
    if large := [m for m in section.micro_batch_sizes if m > most]:
        each = f" on each of {feeds} data-parallel ranks of a machine" if feeds > 1 else ""
        raise ElasticityConfigError(
            f"elasticity.micro_batch_sizes: {', '.join(map(str, large))}{each}: more than elasticity."
            f"max_train_batch_size = {section.max_train_batch_size}; leave out what is larger, or raise that"
        )
    machines = range(-(-section.min_gpus // node), section.max_gpus // node + 1)
    batch, sharing = choose(section.micro_batch_sizes, most, machines, section.prefer_larger_batch)
    if not sharing:
        raise ElasticityConfigError(
            f"elasticity: no number of ranks from min_gpus = {section.min_gpus} to max_gpus = {section.max_gpus} "
            f"shares a batch of at most {section.max_train_batch_size}: widen the range, or raise max_train_batch_size"
        )
    return Shared(batch * feeds, tuple(n * feeds for n in sharing), tuple(section.micro_batch_sizes))
