"""What a transformer costs: floating-point operations a token, activations kept for backward, tensor-parallel traffic.

    P   parameters    L   layers    w   width    V   vocab    T   tokens in a sequence    B   sequences in a micro-batch

Operations. A weight takes two a token in forward (multiply, add) and four in backward (one product for the gradient of
the input, one for that of the weight), so about 6 P a token; attention scores add 12 L w T. Kaplan et al. 2020,
arXiv:2001.08361, section 2.1; PaLM, arXiv:2204.02311, appendix B.

Activations. What autograd keeps of one block without dropout and with fused attention, in units of B T w elements:

    norm 1 in 1 · qkv in 1 · q, k, v 3 · attention out 1 · norm 2 in 1 · MLP in 1 · GELU in 4 · GELU out 4    = 16

so 32 B T w bytes in 16 bits, and in fp32 two statistics a token and norm, and one a token and head where unfused
attention keeps T scores instead. Korthikanti et al. 2022, arXiv:2205.05198, section 4: 34, two of them dropout masks.
"""

from refimpl.model.gpt import GPTConfig


def flops_per_token(config: GPTConfig, recompute: bool = False) -> int:
    """Floating-point operations of forward and backward for one token, masked scores included.

    `recompute`: each block's forward runs twice (activation checkpointing).
    """
    block = 2 * (12 * config.width**2 + 2 * config.width * config.context)
    head = 2 * config.vocab * config.width
    return (4 if recompute else 3) * config.layers * block + 3 * head


def activation_bytes(config: GPTConfig, batch: int, itemsize: int = 2, fused_attention: bool = True) -> int:
    """Bytes that autograd keeps of one block for backward, for `batch` sequences of full length."""
    tokens = batch * config.context
    statistics = 2 * 2 * tokens * 4
    scores = tokens * config.heads * (4 if fused_attention else config.context * itemsize)
    return 16 * tokens * config.width * itemsize + statistics + scores


def checkpointed_bytes(config: GPTConfig, batch: int, itemsize: int = 2) -> int:
    """Activation bytes of all blocks when each keeps only its input, and one at a time is recomputed beside its own."""
    one = batch * config.context * config.width * itemsize
    return (config.layers - 1) * one + activation_bytes(config, batch, itemsize)


def tensor_parallel_sent(config: GPTConfig, batch: int, ranks: int, itemsize: int = 2) -> int:
    """Bytes a rank sends for one block, forward and backward, when its matrices are split over `ranks`.

    Four all-reduces of B T w: one after attention and one after the MLP, in forward and again in backward.
    Shoeybi et al. 2019, arXiv:1909.08053, section 3.
    """
    return 4 * 2 * batch * config.context * config.width * itemsize * (ranks - 1) // ranks
