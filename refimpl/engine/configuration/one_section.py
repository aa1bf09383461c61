"""One section of a configuration, for who reads no other: what a launcher, a scheduler or `init_compression` asks."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from refimpl.engine.configuration.answer import answer, table
from refimpl.engine.configuration.keys import ConfigError
from refimpl.engine.configuration.quote import readable
from refimpl.engine.configuration.read import raw_config
from refimpl.engine.configuration.schema import DeepSpeedConfig
from refimpl.engine.configuration.values import Section

S = TypeVar("S", bound=Section)


def section_of(config: Mapping[str, Any] | str | Path, name: str, kind: type[S]) -> S:
    """The section `name`, as `load_config` reads it. Raises `ConfigError`, and warns of nothing."""
    values, _ = answer({name: raw_config(config).get(name)}, table(DeepSpeedConfig))
    try:
        return kind.model_validate(values.get(name, {}))
    except ValidationError as error:
        raise ConfigError("\n".join(readable(error, f"{name}."))) from None
