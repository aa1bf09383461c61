"""One section of a configuration, for who reads no other: what a launcher, a scheduler or `init_compression` asks."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from refimpl.engine.answer import answer, table
from refimpl.engine.keys import ConfigError
from refimpl.engine.quote import readable
from refimpl.engine.read import raw_config
from refimpl.engine.schema import DeepSpeedConfig
from refimpl.engine.values import Section

S = TypeVar("S", bound=Section)


def section_of(config: Mapping[str, Any] | str | Path, name: str, kind: type[S]) -> S:
    """The section `name`, as `load_config` reads it. Raises `ConfigError`, and warns of nothing."""
    values, _ = answer({name: raw_config(config).get(name)}, table(DeepSpeedConfig))
    try:
        return kind.model_validate(values.get(name, {}))
    except ValidationError as error:
        raise ConfigError("\n".join(readable(error, f"{name}."))) from None
