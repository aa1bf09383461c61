"""A product with a block-sparse matrix. On any device; no lookup tables. DeepSpeed: ops/sparse_attention/matmul.py."""

from torch import Tensor

from refimpl.model.block_products import Mode, multiply


class MatMul:
    """op(a, b): see `refimpl.model.block_products.multiply`. `mode` is "sdd", "dsd" or "dds", result first."""

    def __init__(
        self, layout: Tensor, block: int, mode: Mode, trans_a: bool = False, trans_b: bool = False, bench: bool = False
    ) -> None:
        """layout: [heads, rows, columns] of 0 and 1, of the sparse matrix; bench changes nothing."""
        if mode not in ("sdd", "dsd", "dds"):
            raise NotImplementedError("Supported modes are: sdd, dsd, dds")
        self.layout, self.block, self.mode = (layout if layout.dim() == 3 else layout[None]), block, mode
        self.trans_a, self.trans_b = trans_a, trans_b

    def __call__(self, a: Tensor, b: Tensor) -> Tensor:
        if a.dtype != b.dtype:
            raise ValueError(f"Inputs must be the same dtype; got {a.dtype} for A and {b.dtype} for B")
        layout = self.layout.to(a.device)
        return multiply(a, b, layout, self.block, self.mode, self.trans_a, self.trans_b)
