"""Bytes that a rank sends for attention over one sequence on several ranks: a ring, Ulysses, or all keys gathered.

n: bytes of a rank's queries of one layer, B T/N H D b. m: of its keys, n K / H; of its values as many.

    ring       forward 2 (N-1) m      backward 2 (N-1) m, and 2 N hops of their gradients in fp32
    Ulysses    (N-1)/N of q, k, v and output, forward and again backward; at most H ranks
    gathered   2 (N-1) m forward, the same bytes as a ring in one call that nothing hides, and as many backward: the
               reduce-scatter of their gradients (Llama team 2024, arXiv:2407.21783, section 3.3.2)

Ring attention: Liu et al. 2023, arXiv:2310.01889. Ulysses: Jacobs et al. 2023, arXiv:2309.14509.
"""

import math

FP32 = 4


def ring_sent(keys: int, ranks: int, itemsize: int, forwards: int = 1) -> int:
    """Bytes for one layer, forward and backward. keys: elements that a rank has of k. forwards: 2 if recomputed."""
    if ranks == 1:
        return 0
    return 2 * keys * ((forwards + 1) * (ranks - 1) * itemsize + ranks * FP32)


def ulysses_sent(tokens: int, heads: int, kv_heads: int, width: int, ranks: int, itemsize: int) -> int:
    """Bytes for one layer, forward and backward. tokens: of a rank; width: of a head. ValueError beyond the heads."""
    each = math.lcm(kv_heads, ranks)  # heads of keys, repeated until they can be dealt out
    if heads % ranks or heads % each:
        raise ValueError(f"{heads} heads over {kv_heads} of keys cannot be dealt out to {ranks} ranks")
    return 2 * tokens * (2 * heads + 2 * each) * width * itemsize * (ranks - 1) // ranks
