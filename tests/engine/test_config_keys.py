"""Every key that DeepSpeed knows gets one of three answers, and no key is swallowed."""

import copy
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import refimpl.engine
from refimpl.compress.weights.layers import ORDER
from refimpl.engine.config import load_config
from refimpl.engine.configuration.answer import ALIASES, markdown, table
from refimpl.engine.configuration.keys import ConfigError, ConfigWarning
from refimpl.engine.configuration.schema import DeepSpeedConfig
from refimpl.engine.curriculum import Curriculum, ScheduleConfig
from refimpl.model.patterns.named import PATTERNS
from refimpl.zero.config import PLUS

KEYS = table(DeepSpeedConfig)
ZERO = "zero_optimization"

# What a user may ask for with each key: a value that is not the default, as it stands in a JSON file.
ASKED: dict[str, Any] = {
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "managed_gradient_accumulation": False,
    "dataloader_drop_last": True,
    "steps_per_print": 10,
    "gradient_clipping": 1.0,
    "prescale_gradients": True,
    "gradient_predivide_factor": 2.0,
    "gradient_allreduce_op": "sum",
    "communication_data_type": "fp32",
    "seq_parallel_communication_data_type": "bf16",
    "data_types.grad_accum_dtype": "fp32",
    "data_types.param_dtype": "bf16",
    "data_types.buffer_dtype": "bf16",
    "data_types.keep_in_fp32_modules": ["bias"],
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
    "wall_clock_breakdown": True,
    "memory_breakdown": True,
    "dump_state": True,
    "disable_python_gc": True,
    "log_level": "DEBUG",
    "sparse_gradients": True,
    "disable_allgather": True,
    "vocabulary_size": 50257,
    "timers": {"throughput": {"enabled": True}},
    "compile": {"deepcompile": True},
    "amp": {"enabled": True, "opt_level": "O1"},
    "nebula.enabled": True,
    "datastates": {"checkpoint": "x"},
    "graph_harvesting": True,
    "fp16.enabled": True,
    "fp16.loss_scale": 128,
    "fp16.initial_scale_power": 12,
    "fp16.loss_scale_window": 50,
    "fp16.hysteresis": 4,
    "fp16.consecutive_hysteresis": True,
    "fp16.min_loss_scale": 2,
    "fp16.auto_cast": True,
    "fp16.fp16_master_weights_and_grads": True,
    "bf16.enabled": True,
    "bf16.check_grad_overflow": False,
    "bf16.immediate_grad_update": False,
    "bf16.bf16_master_weights_and_grads": True,
    "torch_autocast.enabled": True,
    "optimizer.type": "AdamW",
    "optimizer.params": {"lr": 1e-3, "torch_adam": True, "adam_w_mode": False},
    "scheduler.type": "WarmupLR",
    "scheduler.params": {"warmup_num_steps": 5},
    f"{ZERO}.stage": 2,
    f"{ZERO}.contiguous_gradients": False,
    f"{ZERO}.reduce_scatter": False,
    f"{ZERO}.reduce_bucket_size": 1e6,
    f"{ZERO}.allgather_partitions": False,
    f"{ZERO}.allgather_bucket_size": 1e6,
    f"{ZERO}.use_multi_rank_bucket_allreduce": True,
    f"{ZERO}.overlap_comm": True,
    f"{ZERO}.round_robin_gradients": True,
    f"{ZERO}.load_from_fp32_weights": False,
    f"{ZERO}.ignore_unused_parameters": False,
    f"{ZERO}.sub_group_size": 1e6,
    f"{ZERO}.offload_optimizer.device": "cpu",
    f"{ZERO}.offload_optimizer.delayed_update": True,
    f"{ZERO}.offload_param.device": "nvme",
    f"{ZERO}.stage3_prefetch_bucket_size": 1e6,
    f"{ZERO}.stage3_param_persistence_threshold": 1e4,
    f"{ZERO}.stage3_model_persistence_threshold": 1e6,
    f"{ZERO}.stage3_max_live_parameters": 1e6,
    f"{ZERO}.stage3_max_reuse_distance": 1e6,
    f"{ZERO}.stage3_gather_16bit_weights_on_model_save": True,
    f"{ZERO}.stage3_module_granularity_threshold": 1000,
    f"{ZERO}.leaf_module.classes": ["Block"],
    f"{ZERO}.leaf_module.names": ["h.0"],
    f"{ZERO}.zero_hpz_partition_size": 8,
    f"{ZERO}.zero_quantized_weights": True,
    f"{ZERO}.zero_quantized_gradients": True,
    f"{ZERO}.zero_quantized_nontrainable_weights": True,
    f"{ZERO}.zeropp_loco_param.err_beta": 0.5,
    f"{ZERO}.zeropp_loco_param.reset_T": 10,
    f"{ZERO}.mics_shard_size": 4,
    f"{ZERO}.mics_hierarchical_params_gather": True,
    f"{ZERO}.compute_grad_norm": False,
    f"{ZERO}.log_trace_cache_warnings": True,
    f"{ZERO}.memory_efficient_linear": False,
    f"{ZERO}.override_module_apply": False,
    f"{ZERO}.pipeline_loading_checkpoint": True,
    f"{ZERO}.zenflow": {"topk_ratio": 0.1},
    f"{ZERO}.legacy_stage1": True,
    f"{ZERO}.elastic_checkpoint": True,
    "aio.block_size": 4096,
    "aio.queue_depth": 32,
    "aio.intra_op_parallelism": 4,
    "aio.overlap_events": False,
    "aio.single_submit": True,
    "aio.use_gds": True,
    "activation_checkpointing.partition_activations": True,
    "activation_checkpointing.cpu_checkpointing": True,
    "activation_checkpointing.contiguous_memory_optimization": True,
    "activation_checkpointing.number_checkpoints": 4,
    "activation_checkpointing.synchronize_checkpoint_boundary": True,
    "activation_checkpointing.profile": True,
    "pipeline.stages": 4,
    "pipeline.partition": "uniform",
    "pipeline.seed_layers": True,
    "pipeline.activation_checkpoint_interval": 1,
    "pipeline.pipe_partitioned": False,
    "pipeline.grad_partitioned": False,
    "pipeline.use_reentrant": True,
    "tensor_parallel.autotp_size": 4,
    "sequence_parallel_size": 2,
    "data_parallel_size": 2,
    "checkpoint.tag_validation": "Fail",
    "checkpoint.load_universal": True,
    "flops_profiler.enabled": True,
    "comms_logger.enabled": True,
    "comms_logger.verbose": True,
    "comms_logger.prof_all": False,
    "comms_logger.prof_ops": ["all_reduce", "gradients"],
    "comms_logger.debug": True,
    "csv_monitor.enabled": True,
    "csv_monitor.output_path": "logs",
    "csv_monitor.job_name": "job",
    "tensorboard.enabled": True,
    "wandb.enabled": True,
    "comet.enabled": True,
    "sparse_attention.mode": "bigbird",
    "sparse_attention.block": 32,
    "sparse_attention.different_layout_per_head": True,
    "sparse_attention.num_local_blocks": 8,
    "sparse_attention.num_global_blocks": 2,
    "sparse_attention.attention": "unidirectional",
    "sparse_attention.horizontal_global_attention": True,
    "sparse_attention.num_different_global_patterns": 2,
    "sparse_attention.num_random_blocks": 1,
    "sparse_attention.local_window_blocks": [2, 4],
    "sparse_attention.global_block_indices": [0, 5],
    "sparse_attention.global_block_end_indices": [1, 7],
    "sparse_attention.num_sliding_window_blocks": 5,
    "elasticity.enabled": True,
    "elasticity.max_train_batch_size": 48,
    "elasticity.micro_batch_sizes": [1, 3],
    "elasticity.min_gpus": 2,
    "elasticity.max_gpus": 4,
    "elasticity.prefer_larger_batch": False,
    "elasticity.version": 0.1,
    "elasticity.num_gpus_per_node": 2,
    "elasticity.model_parallel_size": 2,
    "elasticity.ignore_non_elastic_batch_info": True,
    "elasticity.min_time": 20,
    "autotuning.enabled": True,
    "eigenvalue.enabled": True,
    "quantize_training": {"enabled": True},
    "hybrid_engine.enabled": True,
}
ELASTIC = {"enabled": True, "max_train_batch_size": 24, "micro_batch_sizes": [1, 2], "num_gpus_per_node": 2}
# Keys that count only together with another one.
ALONGSIDE = (
    "offload_optimizer: buffer_count pipeline_read pipeline_write ratio",
    "offload_param: buffer_count buffer_size max_in_cpu",
)


def nested(path: str, value: Any) -> dict[str, Any]:
    """{"a": {"b": value}} for "a.b", on a configuration that is otherwise complete."""
    config: dict[str, Any] = {"train_batch_size": 8}
    *parents, name = path.split(".")
    home = config
    for parent in parents:
        home = home.setdefault(parent, {"type": "WarmupLR"} if parent == "scheduler" else {})
    home[name] = value
    if parents == ["optimizer"] and name == "params":
        home["type"] = "Adam"
    if path == f"{ZERO}.offload_param.device" or set(path.split(".")) & set(PLUS):
        config[ZERO]["stage"] = 3  # the only one whose parameters are in shards
    return config


def load(config: dict[str, Any]) -> tuple[DeepSpeedConfig, list[str]]:
    """The configuration and the texts of its warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loaded = load_config(config, world_size=2)
    assert all(issubclass(warning.category, ConfigWarning) for warning in caught)
    return loaded, [str(warning.message) for warning in caught]


@pytest.mark.parametrize("path", ASKED)
def test_every_key_gets_one_of_three_answers(path: str) -> None:
    config = nested(path, copy.deepcopy(ASKED[path]))
    if "elasticity" in config:  # chooses the batch
        config = {"elasticity": ELASTIC | config["elasticity"]}
    verdict = KEYS[path].verdict
    if verdict == "rejected":
        with pytest.raises(ConfigError, match=re.escape(path)):
            load(config)
        return
    loaded, notes = load(config)
    if verdict == "warned":
        assert len(notes) == 1
        assert notes[0].startswith(path)
        assert KEYS[path].reason in notes[0]
        return
    assert notes == []
    found: Any = loaded
    for part in path.split("."):
        found = getattr(found, part)
    asked = ASKED[path]
    if isinstance(found, torch.dtype):
        found = {torch.float32: "fp32", torch.bfloat16: "bf16"}[found]
    assert found == (asked.upper() if path == "checkpoint.tag_validation" else asked)


@pytest.mark.parametrize("line", ALONGSIDE)
def test_options_are_read_only_with_their_switch(line: str) -> None:
    section, names = line.split(": ")
    values = dict.fromkeys(names.split(), 1)
    loaded, notes = load({"train_batch_size": 8, ZERO: {"stage": 3, section: values | {"device": "none"}}})
    assert notes == []
    assert loaded == load({"train_batch_size": 8, ZERO: {"stage": 3}})[0]
    loaded, notes = load({"train_batch_size": 8, ZERO: {"stage": 3, section: values | {"device": "CPU"}}})
    assert notes == []
    found = getattr(loaded.zero_optimization, section)
    assert [getattr(found, name) for name in ("device", *values)] == ["cpu", *values.values()]


@pytest.mark.parametrize("path", [p for p, key in KEYS.items() if key.silent and key.verdict != "honoured"])
def test_a_value_that_asks_for_nothing_passes_in_silence(path: str) -> None:
    plain, _ = load({"train_batch_size": 8, "optimizer": {"type": "Adam"}})
    for value in KEYS[path].silent:
        config = nested(path, value) | ({} if path.startswith("optimizer") else {"optimizer": {"type": "Adam"}})
        config.get("optimizer", {}).setdefault("type", "Adam")
        assert load(config) == (plain, [])


def test_a_section_with_every_switch_inside_it_off_asks_for_nothing() -> None:
    off, on = {"enabled": False, "bits": 8}, {"enabled": True, "bits": 8}
    groups = {"group": {"params": {"bits": 8}}}
    quantise = {"shared_parameters": off, "different_groups": groups}
    plain = load({"train_batch_size": 8})
    for name, section in (
        ("compression_training", {"weight_quantization": quantise, "layer_reduction": off}),
        ("data_efficiency", {"data_sampling": off, "data_routing": {"enabled": True, "random_ltd": off}}),
    ):
        assert load({"train_batch_size": 8, name: section}) == plain
    for section, path in (
        ({"weight_quantization": {**quantise, "shared_parameters": on}}, "weight_quantization.shared_parameters.bits"),
        ({"weight_quantization": quantise, "layer_reduction": on}, "layer_reduction.bits"),
        ({"different_groups": groups}, "different_groups"),
    ):
        with pytest.raises(ConfigError, match=rf"^compression_training\.{path}: unknown key"):
            load({"train_batch_size": 8, "compression_training": section})


def test_a_section_that_is_refused_is_quoted_in_a_line() -> None:
    dropped = {"enabled": True, "random_ltd_schedule": {"min_value": 32, "schedule_config": {"seq_per_step": 8}}}
    with pytest.raises(
        ConfigError, match=r"\{'data_routing': \{'random_ltd': \{\.\.\.\}\}\}: .* drop its tokens itself$"
    ):
        load({"train_batch_size": 8, "data_efficiency": {"data_routing": {"random_ltd": dropped}}})


@pytest.mark.parametrize("path", [p for p in KEYS if ": " not in p and "." in p and not p.endswith("*")])
def test_a_misspelt_key_is_named_with_its_full_path_and_the_nearest_key(path: str) -> None:
    section, name = path.rsplit(".", 1)
    if section.endswith("params"):
        return  # arguments of a class: its signature decides
    config = nested(f"{section}.{name}z", 1)
    for technique in config.get("compression_training", {}).values():  # each is read where it is on
        if isinstance(technique, dict):
            (technique if "layer" in section else technique.setdefault("shared_parameters", {}))["enabled"] = True
    with pytest.raises(ConfigError) as error:
        load(config)
    assert f"{section}.{name}z: unknown key; did you mean {name}?" in str(error.value)


def test_a_misspelt_key_at_the_top() -> None:
    with pytest.raises(ConfigError, match=r"^gradient_cliping: unknown key; did you mean gradient_clipping\?$"):
        load({"train_batch_size": 8, "gradient_cliping": 1.0})
    with pytest.raises(ConfigError, match=r"did you mean zero_optimization.overlap_comm\?"):
        load({"train_batch_size": 8, "overlap_com": True})
    with pytest.raises(ConfigError, match=r"did you mean zero_optimization.offload_optimizer\?"):  # not optimizer
        load({"train_batch_size": 8, "offload_optimizer": {"device": "cpu"}})
    for far in ("qwertyuiop", "mesh"):  # the second shares three letters with timers
        with pytest.raises(ConfigError, match=rf"^{far}: unknown key; DeepSpeed has none of this name: take it out$"):
            load({"train_batch_size": 8, far: True})
    with pytest.raises(ConfigError, match=r"^optimizer\.eps: unknown key; .* stand in optimizer\.params$"):
        load({"train_batch_size": 8, "optimizer": {"type": "Adam", "eps": 1e-8}})


def test_all_problems_are_reported_at_once() -> None:
    with pytest.raises(ConfigError) as error:
        load({ZERO: {"overlap_com": True, "zenflow": {"topk_ratio": 0.1}}, "amp": {"enabled": True}, "optimiser": {}})
    assert len(str(error.value).splitlines()) == 4


def test_warnings_come_from_rank_0_only() -> None:
    config = {"train_batch_size": 8, "disable_allgather": True}
    with pytest.warns(ConfigWarning, match="disable_allgather"):
        load_config(config, world_size=2, rank=0)
    load_config(config, world_size=2, rank=1)


def test_adam_w_mode_beside_its_params_says_what_is_done() -> None:
    """BEiT, VideoMAE and EVA write it there, where DeepSpeed does not look."""
    optimizer = {"type": "Adam", "adam_w_mode": True, "params": {"lr": 0.1}}
    assert load({"train_batch_size": 8, "optimizer": optimizer})[1] == []
    (said,) = load({"train_batch_size": 8, "optimizer": optimizer | {"adam_w_mode": False}})[1]
    assert "optimizer.adam_w_mode" in said
    assert "write it in optimizer.params" in said


def test_every_honoured_key_is_read_by_somebody() -> None:
    declared = {"sections.py", "keys.py"}
    folder = Path(next(iter(refimpl.engine.__path__)))
    code = "\n".join(file.read_text() for file in folder.rglob("*.py") if file.name not in declared)
    code += "".join((folder.parent / "bench" / name).read_text() for name in ("autotune.py", "trials.py"))
    honoured = [p for p, key in KEYS.items() if key.verdict == "honoured" and ": " not in p and p not in ALIASES]
    code += "".join(f".{name}\n" for _, names in PATTERNS.values() for name in names.split())  # read by name
    by_name = (*ORDER, *Curriculum.model_fields, *ScheduleConfig.model_fields)
    code += "".join(f".{name}\n" for name in by_name)
    honoured = [p for p in honoured if not p.endswith("*")]  # a name of the user's
    assert [p for p in honoured if not re.search(rf"\.{p.rsplit('.', 1)[-1]}\b", code)] == []


def test_the_table_for_people_has_every_key() -> None:
    lines = markdown(KEYS).splitlines()[2:]
    assert len(lines) == len(KEYS)
    assert all(key.reason for key in KEYS.values() if not key.needs)
