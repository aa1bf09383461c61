"""The attention of AlphaFold's Evoformer: softmax(Q K' / sqrt(d) + mask + pair bias) V, over N rows of L residues.

DeepSpeed's kernel keeps no [L, L] scores and takes bf16 and fp16 on a GPU; this is its formula in torch's words, on
any device and in any floating dtype, with scores of 4 bytes each. OpenFold looks for it where a DeepSpeed is installed.
Paper: Jumper et al., "Highly accurate protein structure prediction with AlphaFold", 2021, supplement 1.6.
DeepSpeed: deepspeed/ops/deepspeed4science/evoformer_attn.py.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def DS4Sci_EvoformerAttention(Q: Tensor, K: Tensor, V: Tensor, biases: Sequence[Tensor | None]) -> Tensor:
    """Attention inside each of the N rows: [B, N, L, H, d] three times -> [B, N, L, H, d].

    `biases`: at most two, either of which may be None: a row's mask over its residues [B, N, 1, 1, L], then a bias of
    pairs of residues [B, 1, H, L, L]. Both get gradients. ValueError for other shapes.
    """
    batch, rows, length, heads, size = Q.shape
    shapes = ((batch, rows, 1, 1, length), (batch, 1, heads, length, length))
    if len(biases) > len(shapes):
        raise ValueError(f"DS4Sci_EvoformerAttention: {len(biases)} biases; it takes a mask and a bias of pairs")
    exact = torch.promote_types(Q.dtype, torch.float32)
    q, k, v = (x.transpose(2, 3) for x in (Q, K, V))  # [B, N, H, L, d]
    scores = (q.to(exact) @ k.to(exact).mT) * size**-0.5  # [B, N, H, L, L]
    for bias, shape in zip(biases, shapes, strict=False):
        if bias is None:
            continue
        if bias.shape != shape:
            raise ValueError(f"DS4Sci_EvoformerAttention: a bias of shape {list(bias.shape)}, expected {list(shape)}")
        scores = scores + bias
    out: Tensor = scores.softmax(-1).to(v.dtype) @ v  # [B, N, H, L, d]
    return out.transpose(2, 3)
