"""Every key that DeepSpeed knows gets one of three answers: honoured, warned (accepted, with the reason), rejected.

This file holds the keys that are not honoured, as data; the honoured ones are the fields of the pydantic models. A
value that asks for nothing (`"enabled": false`, `"device": "none"`, what happens here anyway) passes in silence, so
that a file written for DeepSpeed loads when all it asks for is here. answer.py beside it applies the table.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Verdict = Literal["honoured", "warned", "rejected"]
NOT_HERE = "not part of this project"


class ConfigError(ValueError):
    """A configuration that cannot be honoured as written; one line a problem, each with the key's full path."""


class ConfigWarning(UserWarning):
    """A key that is accepted and has no effect, or is spelt in a deprecated way."""


@dataclass(frozen=True)
class Key:
    """One row: a key's full path, what becomes of it, why, and the values that ask for nothing."""

    path: str
    verdict: Verdict
    reason: str
    silent: tuple[Any, ...] = ()  # values that are neither warned about nor rejected
    needs: str = ""  # the switch without which the key is not read


# key -> (reason, values that pass in silence)
WARNED: Mapping[str, tuple[str, Sequence[Any]]] = {
    "disable_allgather": ("every stage gathers what it sharded", [False]),
    "vocabulary_size": ("the model's own vocabulary counts", []),
    "timers": ("timers synchronise only when wall_clock_breakdown is on", [{}]),
    "compile": ("call torch.compile on the model before initialize", [{}, {"deepcompile": False}]),
    "sparse_gradients": ("a sparse gradient is accepted, and made dense before it is reduced", [False]),
    "cuda_visible_devices": ("the launcher decides which devices a rank sees; DeepSpeed does not read it either", []),
    "local_rank": ("the launcher says it, by LOCAL_RANK or an argument; DeepSpeed does not read it either", []),
    "comms_config": ("write comms_logger; DeepSpeed does not read this name either", []),
    "monitor_config": ("write csv_monitor, tensorboard, wandb or comet; DeepSpeed does not read this name either", []),
    "gradient_accumulation_dtype": ("write data_types.grad_accum_dtype; DeepSpeed does not read this name either", []),
    "zero_force_ds_cpu_optimizer": ("any element-wise optimizer runs on the host", [True]),
    "fp16.fused_mode": ("the optimizer is always fused where torch can", [True]),
    "fp16.fp16_master_weights_and_grads": ("master weights stay in fp32", [False]),
    "bf16.bf16_master_weights_and_grads": ("master weights stay in fp32", [False]),
    "bf16.bf16_optimizer_states": ("optimizer states stay in fp32", [False]),
    "bf16.check_grad_overflow": ("a non-finite gradient on any rank always skips the step on all", [True]),
    "bf16.immediate_grad_update": ("gradients are always moved as backward makes them", [True]),
    "torch_autocast.lower_precision_safe_modules": (
        "autocast decides by operation; what travels has the model's dtype, or communication_data_type",
        [None],
    ),
    "optimizer.params.max_grad_norm": ("gradient_clipping says the same, and is what counts", [0, None]),
    "optimizer.params.cuda_aware": ("there is no MPI here: ranks talk over the engine's own groups", [False]),
    "optimizer.params.set_grad_none": ("gradients are always released after a step", [True]),
    "optimizer.params.fp32_optimizer_states": ("optimizer states stay in fp32", [True]),
    "optimizer.adam_w_mode": ("write it in optimizer.params; DeepSpeed does not read it here either", [True]),
    "optimizer.legacy_fusion": ("there is one optimizer implementation", [False]),
    "zero_optimization.contiguous_gradients": ("gradients are always packed into contiguous buckets", [True]),
    "zero_optimization.reduce_scatter": (
        "gradients are always reduce-scattered, at half an all-reduce's bytes",
        [True],
    ),
    "zero_optimization.use_multi_rank_bucket_allreduce": ("buckets are reduce-scattered, never all-reduced", [False]),
    "zero_optimization.allgather_partitions": ("parameters are always all-gathered", [True]),
    "zero_optimization.stage3_use_all_reduce_for_fetch_params": ("parameters are always all-gathered", [False]),
    "zero_optimization.stage3_allgather_sequential": ("a module's parameters come in one all-gather", [False]),
    "zero_optimization.round_robin_gradients": ("every bucket is cut for all ranks: each copies its share", [False]),
    "zero_optimization.load_from_fp32_weights": ("master weights are always restored in fp32", [True]),
    "zero_optimization.compute_grad_norm": ("the norm costs one number a rank, and is always there", [True]),
    "zero_optimization.parameter_alignment": ("each parameter begins on a multiple of 16 elements", [True, False]),
    "zero_optimization.log_trace_cache_warnings": (
        "another order of use is recorded anew; ranks that differ are an error",
        [False],
    ),
    "zero_optimization.enable_sanity_checks": ("the order of gathers is always checked", [True]),
    "aio.single_submit": ("each request is always a call of its own", [False]),
    "aio.thread_count": ("write intra_op_parallelism", [1]),
    "zero_optimization.memory_efficient_linear": (
        "what autograd saves of a weight is freed with it, so no layer is replaced",
        [True],
    ),
    "zero_optimization.save_muon_momentum_buffer_in_memory": ("Muon's momentum is always in memory", [True]),
    "zero_optimization.override_module_apply": ("Module.apply is left as it is", [True]),
    "pipeline.partition": ("PipelineModule's own argument counts, in DeepSpeed too", ["best"]),
    "pipeline.seed_layers": ("PipelineModule's own argument counts, in DeepSpeed too", [False]),
    "pipeline.pipe_partitioned": ("activations travel whole; without tensor parallelism they do anyway", [True]),
    "pipeline.grad_partitioned": ("gradients travel whole; without tensor parallelism they do anyway", [True]),
    "pipeline.use_reentrant": ("checkpoints are never re-entrant here", [False]),
    "zero_optimization.pipeline_loading_checkpoint": ("a checkpoint is loaded in one pass", [False]),
    "zero_optimization.elastic_checkpoint": ("a checkpoint goes on at any number of ranks in any case", [False]),
    "checkpoint.use_node_local_storage": (
        "all ranks write into one folder, to go on at any number of them: on several machines it must be shared",
        [False],
    ),
    "checkpoint.checkpoint_serialization": ("checkpoints are safetensors, not pickles", [True]),
    "checkpoint.writer.type": ("files are written by Python's own calls", ["PYTHON", "python"]),
    "checkpoint.writer.io_buffer_size": ("tensors are written from where they are", []),
    "checkpoint.writer.io_buffer_double": ("tensors are written from where they are", []),
    "checkpoint.writer.io_multiplier": ("a rank writes one file", [1]),
    "checkpoint.writer.data_parallel": ("every rank writes its own part", [None]),
    "checkpoint.writer.show_statistics": ("`refimpl bench checkpoint` measures a save", [False]),
    "checkpoint.parallel_write": ("every rank writes its own file", [{}]),
    "checkpoint.parallel_write.pipeline_stage": ("every rank writes its own file", [False]),
}

# key -> (what it would take, values that pass in silence)
REJECTED: Mapping[str, tuple[str, Sequence[Any]]] = {
    "seq_parallel_comm_data_type": ("write seq_parallel_communication_data_type, which DeepSpeed reads", ["fp32"]),
    "use_data_before_expert_parallelism": ("ranks that share experts are neighbours", [False]),
    "graph_harvesting": ("not part of this project: CUDA graphs", [False]),
    "zero_optimization.stage3_partition_stream_chunk_size": (f"{NOT_HERE}: parameters are partitioned whole", [0]),
    "zero_optimization.offload_optimizer.convert_grad_on_cpu": (f"{NOT_HERE}: gradients travel as they are", [False]),
    "aio.use_gds": ("not part of this project: GPUDirect Storage", [False]),
    "zero_optimization.zenflow": ("not part of this project", [None]),
    "zero_optimization.legacy_stage1": ("not part of this project: stage 1 is stage 1", [False]),
}

# Warned of where their section has a device, and not read where it has none.
OFFLOAD: Mapping[str, tuple[str, Sequence[Any]]] = {
    "zero_optimization.offload_optimizer.pin_memory": ("memory is pinned wherever there is a GPU", [True]),
    "zero_optimization.offload_optimizer.fast_init": ("the file's space is always taken at once", [False]),
    "zero_optimization.offload_optimizer.pipeline": ("write pipeline_read and pipeline_write", [False]),
    "zero_optimization.offload_optimizer.super_offload": ("the update waits for every gradient's norm", [False]),
    "zero_optimization.offload_optimizer.cpuadam_cores_perc": ("OMP_NUM_THREADS says it", [0.8]),
    "zero_optimization.offload_param.pin_memory": ("memory is pinned wherever there is a GPU", [True]),
}

# Read only with tensor_parallel.autotp_size.
TENSOR: Mapping[str, tuple[Verdict, str, Sequence[Any]]] = {
    "preset_model": ("warned", "which layers are cut is found out from the model", [None]),
    "dtype": ("warned", "the model's dtype is bf16's or fp16's", ["fp32"]),
    "vocab_parallel_lm_head": ("warned", "the head is cut, and its logits are gathered for any loss", [None, False]),
    "vocab_parallel_ce_backend": ("warned", "logits are gathered, and the model's own loss has them", ["torch"]),
    "tp_overlap_comm": ("warned", "a sum over tensor ranks is waited for where it is needed", [False]),
    "tp": ("rejected", "write autotp_size, or give initialize an mpu", [{}]),
    "tensor_parallel": ("rejected", "write autotp_size, or give initialize an mpu", [{}]),
    "injection_policy_tuple": ("rejected", "not part of this project: kernels are not injected", [None]),
    "keep_module_on_host": ("warned", "every rank cuts its part of the model that it was given", [False]),
    "replace_with_kernel_inject": ("rejected", "not part of this project: kernels are not injected", [False]),
    "kernel_inject": ("rejected", "not part of this project: kernels are not injected", [False]),
}

FOUND_OUT = "found out from the model"
BY_HAND = """preset_model moe_layer_pattern expert_pattern router_pattern num_experts_attr top_k_attr expert_w1
expert_w2
expert_w3 has_shared_experts shared_experts_pattern shared_experts_gate_pattern route_norm num_expert_groups
num_limited_groups expert_activation"""
# Read only with expert_parallel.enabled.
EXPERTS: Mapping[str, tuple[Verdict, str, Sequence[Any]]] = {
    **dict.fromkeys(BY_HAND.split(), ("warned", FOUND_OUT, [None])),
    **dict.fromkeys(("score_apply", "score_func", "top_k", "routed_scaling_factor"), ("warned", FOUND_OUT, ["auto"])),
    "route_scale": ("warned", FOUND_OUT, [1.0]),
    "use_grouped_mm": ("warned", "experts multiply their rows one after the other on a CPU", [True]),
    "disable_triton_grouped_mm": ("warned", "a grouped multiplication is not chosen by a key", [False]),
    "combine_impl": ("warned", "answers are added in fp32, in the order of a token's experts", ["auto"]),
    "row_weighting_impl": ("warned", "answers are weighted as they are added", ["auto"]),
    "gate_up_impl": ("warned", "how experts multiply is not chosen by a key", ["separate"]),
    "async_split_plan": ("warned", "ranks tell each other how many tokens come before they send them", [False]),
    "comm_backend": ("warned", "tokens travel in all-to-alls of the ranks' group", ["comm"]),
    "comm_num_sm": ("warned", "read with DeepEP alone, in DeepSpeed too", [12]),
    "comm_qp_margin": ("warned", "read with DeepEP alone, in DeepSpeed too", [4]),
    "comm_max_tokens_per_rank": ("warned", "read with DeepEP alone, in DeepSpeed too", [0]),
    "validate_folding_routing": ("warned", "tensor ranks are checked to route alike by tests", [False]),
    "load_balance_coeff": ("rejected", "the model adds its own loss; DeepSpeed refuses it too", [None]),
    "expert_tensor_parallel_size": ("rejected", "experts are dealt out whole", [1]),
}

# Read only where the technique is enabled.
OF_SNIP = "schedule_offset_end schedule_offset_stride block_pattern dense_ratio excluded_modules"
COMPRESSION: Mapping[str, tuple[str, Sequence[Any]]] = {
    "weight_quantization.shared_parameters.quantizer_kernel": ("weights are rounded by operations of torch", [False]),
    "weight_quantization.shared_parameters.quantize_verbose": ("a layer's repr says what is done to it", [False]),
    **{
        f"sparse_pruning.shared_parameters.{name}": ("read with snip_momentum alone, in DeepSpeed too", [])
        for name in OF_SNIP.split()
    },
}

# Read only with autotuning.enabled.
TUNED: Mapping[str, tuple[Verdict, str, Sequence[Any]]] = {
    "fast": ("rejected", "stages and micro-batches are tried, and nothing else", [True]),
    "mp_size": ("warned", "the ranks that share a sample follow from the file", [1]),
    "exps_dir": ("warned", "a trial's files are in results_dir", [None]),
    "tuner_type": ("warned", "micro-batches double while that pays", ["gridsearch"]),
    **dict.fromkeys(
        ("num_tuning_micro_batch_sizes", "model_info", "model_info_path", "min_train_batch_size"),
        ("warned", "micro-batches double while that pays", [None]),
    ),
}

# A section with a switch: the switch decides, its other keys are read only when it is on.
SWITCHED: Mapping[str, tuple[str, str, Sequence[Any], str]] = {
    # section: (what it would take, switch, values of the switch that mean off, other keys)
    "trackio": (f"{NOT_HERE}: use csv_monitor, tensorboard, wandb or comet", "enabled", [False], "project"),
    "eigenvalue": (
        "not part of this project",
        "enabled",
        [False],
        "verbose max_iter tol stability gas_boundary_resolution layer_name layer_num",
    ),
    "hybrid_engine": (
        "not part of this project",
        "enabled",
        [False],
        "max_out_tokens inference_tp_size release_inference_cache pin_parameters tp_gather_partition_size "
        "enable_cuda_graph",
    ),
    "nebula": (
        "not part of this project: an Azure service",
        "enabled",
        [False],
        "persistent_storage_path persistent_time_interval num_of_version_in_retention enable_nebula_load load_path",
    ),
}

# Sections whose keys are somebody else's, or nested deeply; rejected whole unless they say `"enabled": false`.
OPEN: Mapping[str, str] = {
    "amp": "not part of this project: apex is retired; use bf16 or fp16",
    "datastates": "not part of this project",
    "quantize_training": "not part of this project: DeepSpeed has dropped it too",
    "weight_quantization": f"{NOT_HERE}: zero_quantized_weights sends them quantised",
    "data_efficiency": f"{NOT_HERE}: give initialize data in that order, and let the model drop its tokens itself",
}


def not_honoured() -> list[Key]:
    """All rows of this file."""
    rows = [Key(path, "warned", reason, tuple(silent)) for path, (reason, silent) in WARNED.items()]
    rows += [Key(path, "rejected", reason, tuple(silent)) for path, (reason, silent) in REJECTED.items()]
    for path, (reason, silent) in OFFLOAD.items():
        rows.append(Key(path, "warned", reason, tuple(silent), needs=f"{path.rpartition('.')[0]}.device"))
    for section, switch, its in (
        ("tensor_parallel", "autotp_size", TENSOR),
        ("expert_parallel", "enabled", EXPERTS),
        ("autotuning", "enabled", TUNED),
    ):
        for name, (verdict, reason, silent) in its.items():
            rows.append(Key(f"{section}.{name}", verdict, reason, tuple(silent), needs=f"{section}.{switch}"))
    for path, (reason, silent) in COMPRESSION.items():
        path = f"compression_training.{path}"
        rows.append(Key(path, "warned", reason, tuple(silent), needs=f"{path.rpartition('.')[0]}.enabled"))
    waits = "a scheduler's: nothing here waits so many minutes before ranks are added or taken away"
    rows.append(Key("elasticity.min_time", "warned", waits, (0,), needs="elasticity.enabled"))
    rows += [Key(path, "rejected", reason, (None, False, {})) for path, reason in OPEN.items()]
    for path, (reason, switch, off, others) in SWITCHED.items():
        rows.append(Key(path, "rejected", reason, (None, False)))
        rows.append(Key(f"{path}.{switch}", "rejected", reason, tuple(off)))
        rows += [Key(f"{path}.{name}", "rejected", reason, needs=f"{path}.{switch}") for name in others.split()]
    return rows
