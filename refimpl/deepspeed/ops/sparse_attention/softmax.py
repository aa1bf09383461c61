"""The softmax of a block-sparse matrix's rows, in place as DeepSpeed's (ops/sparse_attention/softmax.py); zeros where a
row has nothing that it may see.
"""

import torch
from torch import Tensor

from refimpl.deepspeed.ops.sparse_attention.sparse_self_attention import MODES
from refimpl.model.block_products import softmax


class Softmax:
    """op(x, ...) for x [Z, blocks, block, block] of this layout [heads, rows, columns]."""

    def __init__(self, layout: Tensor, block: int, bench: bool = False) -> None:
        self.layout, self.block = layout, block

    def __call__(
        self,
        x: Tensor,
        scale: float = 1.0,
        rpe: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
        key_padding_mask_mode: str = "add",
        attn_mask_mode: str = "add",
    ) -> Tensor:
        """scale x + rpe [like x, or of a shape that goes with it], with key_padding_mask [Z, N] and attn_mask [M, N],
        each added ("add") or forbidding where it is 0 ("mul"). What comes back is x itself, written over: a leaf that
        wants a gradient is torch's RuntimeError. ValueError for a mask of another dtype, or mode.
        """
        for name, mask in (("rpe", rpe), ("key_padding_mask", key_padding_mask), ("attn_mask", attn_mask)):
            if mask is not None and mask.dtype != x.dtype:
                raise ValueError(f"{name} must be {x.dtype}, not {mask.dtype}")
        layout = self.layout.to(x.device)
        _, i, j = layout.nonzero(as_tuple=True)
        masks: list[tuple[Tensor, str]] = []
        if key_padding_mask is not None:
            padding = key_padding_mask.reshape(len(x), -1, self.block)  # [Z, n, block]
            masks.append((padding[:, j, None], key_padding_mask_mode))
        if attn_mask is not None:
            tiles = attn_mask.reshape(layout.shape[1], self.block, layout.shape[2], self.block)
            masks.append((tiles[i, :, j], attn_mask_mode))
        added = torch.zeros((), device=x.device) if rpe is None else rpe.float()
        sees = torch.ones((), dtype=torch.bool, device=x.device)
        for mask, mode in masks:
            if mode not in MODES:
                raise ValueError(f"a mask's mode is {mode!r}: choose from {', '.join(MODES)}")
            added, sees = (added + mask, sees) if mode == "add" else (added, sees & (mask != 0))
        return x.copy_(softmax(x, layout, self.block, scale, added, sees))
