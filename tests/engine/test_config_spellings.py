"""Keys with two spellings, names of optimizers and schedules, and what cannot be a key or a value at all."""

import warnings
from typing import Any

import pytest
import torch

from refimpl.engine.config import load_config
from refimpl.engine.configuration.answer import ALIASES, RENAMED, table
from refimpl.engine.configuration.keys import ConfigError
from refimpl.engine.configuration.schema import DeepSpeedConfig

KEYS = table(DeepSpeedConfig)
ZERO = "zero_optimization"
DEPRECATED = ("stage3_gather_fp16_weights_on_model_save", "cpu_offload", "cpu_offload_param")


def load(config: dict[str, Any]) -> tuple[DeepSpeedConfig, list[str]]:
    """The configuration and the texts of its warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        return load_config(config, world_size=2), [str(warning.message) for warning in caught]


@pytest.mark.parametrize("name", DEPRECATED)
def test_deprecated_spellings(name: str) -> None:
    today = RENAMED[f"{ZERO}.{name}"][0]
    loaded, notes = load({"train_batch_size": 8, ZERO: {name: False}})
    assert notes == [f"{ZERO}.{name}: deprecated; write {ZERO}.{today}"]
    assert loaded == load({"train_batch_size": 8})[0]
    if "offload" in name:
        loaded, _ = load({"train_batch_size": 8, ZERO: {name: True, "stage": 3}})
        assert getattr(loaded.zero_optimization, today).device == "cpu"
    else:
        loaded, _ = load({"train_batch_size": 8, ZERO: {name: True}})
        assert loaded.zero_optimization.stage3_gather_16bit_weights_on_model_save
    with pytest.raises(ConfigError, match="mean the same key"):
        load({"train_batch_size": 8, ZERO: {name: True, today: None}})


@pytest.mark.parametrize("path", [path for path in ALIASES if path.startswith(ZERO)])
def test_names_of_deepspeeds_fields_beside_those_of_its_documentation(path: str) -> None:
    name, long = path.split(".")[1], ALIASES[path]
    assert KEYS[path].verdict == KEYS[f"{ZERO}.{long}"].verdict
    value: Any = True if name.startswith(("gather", "use_", "allgather")) else 7
    if KEYS[path].verdict == "honoured":
        loaded, notes = load({"train_batch_size": 8, ZERO: {name: value}})
        assert notes == []
        assert loaded == load({"train_batch_size": 8, ZERO: {long: value}})[0]
        assert getattr(loaded.zero_optimization, long) == value
    else:
        reason = KEYS[f"{ZERO}.{long}"].reason
        _, notes = load({"train_batch_size": 8, ZERO: {name: value}})
        assert notes == [f"{ZERO}.{long} = True: {reason}; the key has no effect"]
    with pytest.raises(ConfigError, match=rf"{path} and {ZERO}\.{long} mean the same key"):
        load({"train_batch_size": 8, ZERO: {name: value, long: value}})


def test_a_bound_that_transformers_computes_is_rounded_down() -> None:
    key = "stage3_prefetch_bucket_size"
    for value in (0.9 * 64 * 64, "3686.4"):
        loaded, notes = load({"train_batch_size": 8, ZERO: {"stage": 3, key: value}})
        assert (loaded.zero_optimization.stage3_prefetch_bucket_size, notes) == (3686, [])
    for value in (-0.1, float("inf"), float("nan"), True):
        with pytest.raises(ConfigError, match=key):
            load({"train_batch_size": 8, ZERO: {key: value}})
    with pytest.raises(ConfigError, match="reduce_bucket_size"):
        load({"train_batch_size": 8, ZERO: {"reduce_bucket_size": 3686.4}})


def test_no_number_of_checkpoints_may_be_false() -> None:
    section = "activation_checkpointing"
    loaded, notes = load({"train_batch_size": 8, section: {"number_checkpoints": False}})
    assert (loaded, notes) == load({"train_batch_size": 8, section: {"number_checkpoints": None}})
    with pytest.raises(ConfigError, match=rf"{section}\.number_checkpoints: must be a number, not true or false"):
        load({"train_batch_size": 8, section: {"number_checkpoints": True}})


def test_one_name_is_a_list_of_one() -> None:
    lists = {"classes": ["Block"], "names": ["h.0"], "name_suffixes": ["mlp"]}
    texts = {key: names[0] for key, names in lists.items()}
    loaded = [load({"train_batch_size": 8, ZERO: {"leaf_module": leaf}}) for leaf in (lists, texts)]
    assert loaded[0] == loaded[1]


def test_keys_that_are_comments_are_left_out_at_the_top() -> None:
    assert load({"train_batch_size": 8, "_comment": "x", "//": [1]}) == load({"train_batch_size": 8})
    with pytest.raises(ConfigError, match=rf"{ZERO}\._comment: unknown key"):
        load({"train_batch_size": 8, ZERO: {"_comment": "x"}})


@pytest.mark.parametrize("name", ["comms_config", "monitor_config", "cuda_visible_devices", "local_rank"])
def test_names_that_deepspeed_does_not_read_and_its_examples_have(name: str) -> None:
    loaded, notes = load({"train_batch_size": 8, name: {"verbose": True}})
    assert [note.split(" ")[0] for note in notes] == [name]
    assert loaded == load({"train_batch_size": 8})[0]


def test_what_no_json_file_holds() -> None:
    for name in (7, None, 10**5000):
        with pytest.raises(ConfigError, match=r": a key is text$"):
            load({"train_batch_size": 8, name: True})  # type: ignore[dict-item]
        with pytest.raises(ConfigError, match=r"^optimizer\.params\..*: a key is text$"):
            load({"train_batch_size": 8, "optimizer": {"type": "SGD", "params": {name: True}}})
    with pytest.raises(ConfigError, match=r"^steps_per_print: a Tensor is nothing that a JSON file holds$"):
        load({"train_batch_size": 8, "steps_per_print": torch.ones(3)})
    knot: dict[str, Any] = {"train_batch_size": 8}
    knot["optimizer"] = {"type": "SGD", "params": knot}
    with pytest.raises(ConfigError, match=r"^optimizer\.params\.optimizer = .*: must not be an object"):
        load(knot)


def test_a_path_is_no_key() -> None:
    with pytest.raises(ConfigError, match=rf"^{ZERO}\.stage: unknown key"):
        load({"train_batch_size": 8, f"{ZERO}.stage": 2})
    with pytest.raises(ConfigError, match=r"^optimizer\.type: Adam: unknown key"):
        load({"train_batch_size": 8, "optimizer": {"type": "Adam", "type: Adam": 1}})


def test_a_deprecated_spelling_may_stand_beside_what_it_does_not_repeat() -> None:
    assert load({"train_batch_size": 8, ZERO: {"cpu_offload": "auto"}})[0] == load({"train_batch_size": 8})[0]
    both = {"cpu_offload_use_pin_memory": True, "offload_optimizer": {"device": "none"}}
    assert load({"train_batch_size": 8, ZERO: both})[0] == load({"train_batch_size": 8})[0]
    with pytest.raises(ConfigError, match="bfloat16 and bf16 mean the same key"):
        load({"train_batch_size": 8, "bf16": {"enabled": True}, "bfloat16": {"enabled": False}})


def test_what_said_communication_data_type_before_it() -> None:
    """GPT-NeoX's files for bf16 have it."""
    plain, said = load({"train_batch_size": 8})[0], ["fp32_allreduce: deprecated; write communication_data_type"]
    assert load({"train_batch_size": 8, "fp32_allreduce": False}) == (plain, said)
    loaded, notes = load({"train_batch_size": 8, "fp32_allreduce": True})
    assert (loaded.communication_data_type, notes) == (torch.float32, said)


def test_oldest_spelling_of_stage_1() -> None:
    loaded, notes = load({"train_batch_size": 8, ZERO: True})
    assert loaded.zero_optimization.stage == 1
    assert len(notes) == 1


def test_names_of_optimizers_and_schedules() -> None:
    for name in (
        "Adam",
        "adamw",
        "Lion",
        "SGD",
        "Adagrad",
        "RMSprop",
        "LAMB",
        "muon",
        "OneBitAdam",
        "onebitlamb",
        "ZeroOneAdam",
    ):
        assert load({"train_batch_size": 8, "optimizer": {"type": name}})[1] == []
    needed: dict[str, dict[str, Any]] = {
        "LRRangeTest": {},
        "OneCycle": {"cycle_min_lr": 0, "cycle_max_lr": 0.1},
        "WarmupLR": {},
        "WarmupDecayLR": {"total_num_steps": 100},
        "WarmupCosineLR": {"total_num_steps": 100},
        "StepLR": {"step_size": 3},
    }
    for name, params in needed.items():
        assert load({"train_batch_size": 8, "scheduler": {"type": name, "params": params}})[1] == []
        for missing in params:
            left = {key: value for key, value in params.items() if key != missing}
            with pytest.raises(ConfigError, match=rf"^scheduler\.params\.{missing}: {name} needs it"):
                load({"train_batch_size": 8, "scheduler": {"type": name, "params": left}})
    with pytest.raises(ConfigError, match=r"optimizer.type = 'AdmaW': unknown; did you mean AdamW\?"):
        load({"train_batch_size": 8, "optimizer": {"type": "AdmaW"}})
    with pytest.raises(ConfigError, match=r"scheduler.type = 'WarmUpLR': unknown; did you mean WarmupLR\?"):
        load({"train_batch_size": 8, "scheduler": {"type": "WarmUpLR"}})
