"""Variable: stretches of chosen lengths, chosen global blocks, and some random ones.

DeepSpeed's extension of `fixed`. With stretches of l blocks, g global and r random ones a row reads l + g + r: O(n).
"""

from collections.abc import Sequence

from torch import Tensor

from refimpl.model.patterns.base import SparsityConfig, at_least, spans, within
from refimpl.model.patterns.parts import Generator, columns, drawn, lower, rows, stretches


class VariableSparsityConfig(SparsityConfig):
    """DeepSpeed's `variable`.

    num_random_blocks: drawn for each row, also in the future: a causal model masks those. local_window_blocks: lengths
    of the stretches from the left, the last one again and again. global_block_indices: blocks that everybody reads
    (from themselves on, if unidirectional); with global_block_end_indices ranges, ends exclusive. Those beyond the
    sequence are left out. horizontal_global_attention: they also read everybody; bidirectional only.
    """

    def __init__(
        self,
        num_heads: int,
        block: int = 16,
        different_layout_per_head: bool = False,
        num_random_blocks: int = 0,
        local_window_blocks: Sequence[int] = (4,),
        global_block_indices: Sequence[int] = (0,),
        global_block_end_indices: Sequence[int] | None = None,
        attention: str = "bidirectional",
        horizontal_global_attention: bool = False,
        seed: int | None = None,
    ) -> None:
        super().__init__(num_heads, block, different_layout_per_head, seed, attention)
        self.num_random_blocks = at_least("num_random_blocks", num_random_blocks, 0)
        if not local_window_blocks:
            raise ValueError("local_window_blocks is empty: give at least one length")
        for width in local_window_blocks:
            at_least("a length in local_window_blocks", width, 1)
        if self.past and horizontal_global_attention:
            raise ValueError('horizontal_global_attention would read the future: it needs attention = "bidirectional"')
        ends = None if global_block_end_indices is None else list(global_block_end_indices)
        self.ranges = spans(list(global_block_indices), ends)
        self.local_window_blocks = list(local_window_blocks)
        self.global_block_indices = list(global_block_indices)
        self.global_block_end_indices = ends
        self.horizontal_global_attention = horizontal_global_attention

    def part(self, n: int, head: int, rng: Generator) -> Tensor:
        within("num_random_blocks", self.num_random_blocks, n)
        local = stretches(n, self.local_window_blocks)
        read = drawn(n, self.num_random_blocks, rng) | (lower(local) if self.past else local)
        read |= columns(n, self.ranges, from_own=self.past)
        return read | rows(n, self.ranges) if self.horizontal_global_attention else read
