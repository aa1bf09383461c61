"""Files: JSON, Hjson, and what is wrong with a file that is neither."""

import json
from pathlib import Path

import pytest

from refimpl.engine.config import load_config
from refimpl.engine.configuration.keys import ConfigError
from refimpl.engine.configuration.read import read_json

HJSON = """
// as people write it
{
  # one micro-batch
  train_batch_size: 8,
  "fp16": { /* no
  scale is given */ enabled: true, },
  optimizer: {type: "Adam", params: {"lr": 2e-5, betas: [0.9, 0.95,],},},
  zero_optimization:
  {
    stage: 2
    reduce_bucket_size: 5e8  # elements
  },
}
"""


def write(folder: Path, text: str | bytes) -> Path:
    path = folder / "ds.json"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def test_comments_and_commas_at_the_end(tmp_path: Path) -> None:
    assert read_json(write(tmp_path, HJSON)) == {
        "train_batch_size": 8,
        "fp16": {"enabled": True},
        "optimizer": {"type": "Adam", "params": {"lr": 2e-5, "betas": [0.9, 0.95]}},
        "zero_optimization": {"stage": 2, "reduce_bucket_size": 5e8},
    }
    assert load_config(tmp_path / "ds.json", world_size=2).zero_optimization.stage == 2


def test_without_outer_braces_and_with_a_byte_order_mark(tmp_path: Path) -> None:
    assert read_json(write(tmp_path, "train_batch_size: 8\nfp16: {enabled: true}")) == {
        "train_batch_size": 8,
        "fp16": {"enabled": True},
    }
    assert read_json(write(tmp_path, b"\xef\xbb\xbf" + b'{"train_batch_size": 8}')) == {"train_batch_size": 8}


def test_json_is_read_as_json(tmp_path: Path) -> None:
    """Hjson would read NaN as text, and a number without a fraction as a whole one."""
    values = {"a": 1e3, "b": [1, "x # y", None], "c": {"d": "// no comment"}}
    read = read_json(write(tmp_path, json.dumps(values)))
    assert read == values
    assert isinstance(read["a"], float)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"train_batch_size": 8,\n "fp16": {"enabled": tru}}', r"line 2, column 22: not JSON.*nor is it Hjson"),
        ('{"train_batch_size": 8', r"line 1, column 23: not JSON"),
        ('{"train_batch_size": 8, /* no end', r"line 1, column 25: not JSON.*ends inside a comment"),
        ("{'''", r"line 1, column 2: not JSON"),
        ('{"train_batch_size": 8, "train_batch_size": 16}', r"key 'train_batch_size' occurs twice"),
        ('{"fp16": {"enabled": true, "enabled": false}}', r"key 'enabled' occurs twice"),
        ("{fp16: {enabled: true, enabled: false}} # Hjson", r"key 'enabled' occurs twice"),
        ("[]", r"a DeepSpeed configuration is a JSON object, not list"),
        ("8", r"a DeepSpeed configuration is a JSON object, not int"),
        ("nothing of the kind", r"a DeepSpeed configuration is a JSON object, not str"),
        ("", r"the file is empty"),
        (" \n ", r"the file is empty"),
        (b"\xff\xfe{\x00}\x00", r"not UTF-8 text at byte 0"),
        ('{"a": "' + "x" * 5000 + '"', r"not JSON"),
        ('{"a": ' * 100_000, r"nested too deeply"),
        ("[" * 100_000, r"nested too deeply"),
        ("# Hjson\n" + "{a: " * 100_000, r"nested too deeply"),
        ('{"train_batch_size": 1' + "0" * 5000 + "}", r"the number 1000000000\.\.\. has 5001 digits"),
        ("{train_batch_size: 1" + "0" * 5000 + "}", r"the number 1000000000\.\.\. has 5001 digits"),
        ("{train_batch_size: 1e999}", r"a number is too large"),
    ],
)
def test_a_bad_file_is_named_with_what_is_wrong(tmp_path: Path, text: str | bytes, message: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError, match=message) as error:
        load_config(path, world_size=1)
    assert str(error.value).startswith(f"{path}: ")
    assert len(str(error.value)) < len(str(path)) + 300


def test_what_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.json: no such file"):
        load_config(tmp_path / "nowhere.json", world_size=1)
    with pytest.raises(ConfigError, match=r": a folder; pass"):
        load_config(str(tmp_path), world_size=1)
    with pytest.raises(ConfigError, match="cannot be read: File name too long"):
        load_config("x" * 5000, world_size=1)
    with pytest.raises(ConfigError, match="no such file"):
        load_config("a\0b", world_size=1)
    loop = tmp_path / "loop.json"
    loop.symlink_to(loop)
    with pytest.raises(ConfigError, match=r"loop\.json: "):
        load_config(loop, world_size=1)


@pytest.mark.parametrize("config", [None, 3, ["ds.json"], b"ds.json"])
def test_what_is_neither_a_dictionary_nor_a_path(config: object) -> None:
    with pytest.raises(ConfigError, match="a dictionary or the path of a JSON file, not"):
        load_config(config, world_size=1)  # type: ignore[arg-type]


def test_json_text_in_place_of_a_path() -> None:
    with pytest.raises(ConfigError, match=r"pass json\.loads\(text\)"):
        load_config('{"train_batch_size": 8}', world_size=1)
