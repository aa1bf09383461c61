"""A configuration file is read as JSON, and where it is not JSON as Hjson, with the library that DeepSpeed uses.

Hjson adds what people write into such files: comments (`#`, `//`, `/* */`), commas at the end, keys without quotes.
Whatever is wrong with the file is a `ConfigError` that names it, and the line where there is one.
"""

import json
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import hjson  # type: ignore[import-untyped]

from refimpl.engine.configuration.keys import ConfigError

DIGITS = 4300  # Python reads no longer integer


def raw_config(config: object) -> dict[str, Any]:
    """What a configuration says, of a dictionary or the path of a file."""
    if isinstance(config, Mapping):
        return dict(config)
    if not isinstance(config, str | os.PathLike):
        raise ConfigError(f"a configuration is a dictionary or the path of a JSON file, not {type(config).__name__}")
    if str(config).lstrip().startswith("{"):
        raise ConfigError("the configuration is JSON text; pass json.loads(text), or the path of a file that holds it")
    return read_json(Path(config))


def read_json(path: Path) -> dict[str, Any]:
    """The object in the file `path`. Raises `ConfigError`, also for a key that occurs twice."""
    text = _text(path)
    try:
        content = _parse(text)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    except RecursionError:
        raise ConfigError(f"{path}: nested too deeply; a DeepSpeed configuration has four levels") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: a DeepSpeed configuration is a JSON object, not {type(content).__name__}")
    return content


def _text(path: Path) -> str:
    pass_one = "pass a dictionary or the path of a DeepSpeed JSON file"
    try:
        text = path.read_text(encoding="utf-8-sig")  # an editor's byte order mark is no part of the text
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text at byte {error.start}; save it as UTF-8") from None
    except IsADirectoryError:
        raise ConfigError(f"{path}: a folder; {pass_one}") from None
    except (FileNotFoundError, ValueError):  # ValueError: no path has a null character
        raise ConfigError(f"{path}: no such file; {pass_one}") from None
    except OSError as error:
        raise ConfigError(f"{str(path)[:200]}: cannot be read: {error.strerror}") from None
    if not text.strip():
        raise ConfigError(f"{path}: the file is empty; the smallest configuration is {{'train_batch_size': 8}}")
    return text


def _parse(text: str) -> Any:
    """JSON, else Hjson; the error is that of JSON, which is what most people meant to write, and then of Hjson."""
    try:
        return json.loads(text, object_pairs_hook=unique, parse_int=_whole)
    except json.JSONDecodeError as error:
        as_json = error
    try:
        return hjson.loads(text, object_pairs_hook=unique, parse_int=_whole)
    except hjson.HjsonDecodeError as error:
        as_hjson = f"line {error.lineno}, column {error.colno}: {error.msg}"
    except OverflowError:
        as_hjson = "a number is too large"
    except IndexError:  # hjson looks beyond the end for the end of a comment
        as_hjson = "it ends inside a comment or a text"
    place = f"line {as_json.lineno}, column {as_json.colno}"
    raise ConfigError(f"{place}: not JSON: {as_json.msg}; nor is it Hjson: {as_hjson}")


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of a file, as json's `object_pairs_hook`. Raises `ConfigError` for a key that occurs twice."""
    twice = sorted(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
    if twice:
        raise ConfigError(f"key {', '.join(map(repr, twice))} occurs twice in one object; keep one")
    return dict(pairs)


def _whole(digits: str) -> int:
    if len(digits) > DIGITS:
        raise ConfigError(f"the number {digits[:10]}... has {len(digits)} digits; write one that a size can be")
    return int(digits)
