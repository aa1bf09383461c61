"""What a model's states would weigh under ZeRO-2 and ZeRO-3, as DeepSpeed estimates it for Adam in 16 bits.

    print(estimate_zero3_model_states_mem_needs(total_params=7e9, largest_layer_params=130e6, num_gpus_per_node=8))

Bytes a parameter: 2 the parameter, 2 its gradient, 4 the gradient in fp32, 4 the master, 8 Adam; with offload 16 at the
host, 18 with the parameter. Without `zero_init` every process first builds the whole model in fp32. The largest layer
is gathered, with its gradient: 2 + 2. The host's part is multiplied by additional_buffer_factor.
`refimpl plan` knows more: activations, buckets, other layouts. DeepSpeed: the ends of stage_1_and_2.py and stage3.py.
"""

from torch import nn


def estimate_zero2_model_states_mem_needs(
    total_params: float,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int]:
    """Bytes of a node's host memory, and of a GPU's."""
    gpus = num_nodes * num_gpus_per_node
    if cpu_offload:
        return int(total_params * max(4 * gpus, 16) * additional_buffer_factor), int(2 * total_params)
    at_host = total_params * 4 * num_gpus_per_node * additional_buffer_factor
    return int(at_host), int(2 * total_params) + int(18 * total_params / gpus)


def estimate_zero3_model_states_mem_needs(
    total_params: float,
    largest_layer_params: float,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    cpu_offload_params: bool = True,
    zero_init: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int, int]:
    """Bytes of a node's host memory, of a GPU's, and of the largest layer, gathered."""
    gpus, layer = num_nodes * num_gpus_per_node, int(4 * largest_layer_params)
    building = 4 * num_gpus_per_node * (largest_layer_params if zero_init else total_params)
    if not cpu_offload:
        return int(building * additional_buffer_factor), layer + int(18 * total_params / gpus), layer
    states = total_params * (18 if cpu_offload_params else 16) / num_nodes
    at_host = states if zero_init else max(building, states)
    on_gpu = layer + (0 if cpu_offload_params else int(2 * total_params / gpus))
    return int(at_host * additional_buffer_factor), on_gpu, layer


def estimate_zero2_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print the table for `model`, which need not be on any device."""
    total, _ = sizes(model)
    estimate_zero2_model_states_mem_needs_all_cold(total, num_gpus_per_node, num_nodes, additional_buffer_factor)


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: float, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print the table for a number of parameters."""
    header(num_gpus_per_node, num_nodes, f"{int(total_params / 1e6)}M total params")
    for offload in (True, False):
        memory = estimate_zero2_model_states_mem_needs(
            total_params, num_gpus_per_node, num_nodes, offload, additional_buffer_factor
        )
        row(memory, f"offload_optimizer={device(offload)}")


def estimate_zero3_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print the table for `model`, which need not be on any device."""
    total, layer = sizes(model)
    estimate_zero3_model_states_mem_needs_all_cold(total, layer, num_gpus_per_node, num_nodes, additional_buffer_factor)


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: float,
    largest_layer_params: float,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Print the table for a number of parameters."""
    layer = f"{int(total_params / 1e6)}M total params, {int(largest_layer_params / 1e6)}M largest layer params"
    header(num_gpus_per_node, num_nodes, layer)
    for optimizer, params in ((True, True), (True, False), (False, False)):
        for zero_init in (True, False):
            memory = estimate_zero3_model_states_mem_needs(
                total_params, largest_layer_params, num_gpus_per_node, num_nodes,
                optimizer, params, zero_init, additional_buffer_factor,
            )  # fmt: skip
            where = f"offload_param={device(params)}, offload_optimizer={device(optimizer)}"
            row(memory[:2], f"{where}, zero_init={int(zero_init)}")


def sizes(model: nn.Module) -> tuple[int, int]:
    """Parameters in all, shared ones once, and those of the module that has most of its own."""
    own = (sum(p.numel() for p in module.parameters(recurse=False)) for module in model.modules())
    return sum(p.numel() for p in model.parameters()), max(own)


def device(offload: bool) -> str:
    return "cpu " if offload else "none"


def header(gpus: int, nodes: int, model: str) -> None:
    print(
        "Estimated memory needed for params, optim states and gradients for a:\n"
        f"HW: Setup with {nodes} {'nodes' if nodes > 1 else 'node'}, {gpus} {'GPUs' if gpus > 1 else 'GPU'} per node.\n"
        f"SW: Model with {model}.\n"
        "  per CPU  |  per GPU |   Options"
    )


def row(memory: tuple[int, ...], options: str) -> None:
    at_host, on_gpu = memory
    print(f" {at_host / 2**30:7.2f}GB | {on_gpu / 2**30:6.2f}GB | {options}")
