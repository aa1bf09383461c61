"""Patterns of one part each: dense, strided, global, random.

`dense` reads n^2 blocks and is there to compare with. Sparse Transformers' strided pattern (arXiv:1904.10509, section
4.3) reads a window of s blocks and every s-th block before it: O(n sqrt n) when s grows as sqrt n. It gives the two
halves to different heads where they may differ; one head with both is the paper's "merged" head (section 5.1).
"""

from torch import Tensor

from refimpl.model.patterns.base import SparsityConfig, at_least, within
from refimpl.model.patterns.parts import Generator, columns, drawn, lower, none, rows, strided, window


class DenseSparsityConfig(SparsityConfig):
    """DeepSpeed's `dense`: every block."""

    def part(self, n: int, head: int, rng: Generator) -> Tensor:
        return ~none(n)


class StridedSparsityConfig(SparsityConfig):
    """The last `stride` blocks, and every stride-th one. different_layout_per_head: even heads read the former, odd
    heads the latter."""

    def __init__(
        self,
        num_heads: int,
        block: int = 16,
        different_layout_per_head: bool = False,
        stride: int = 4,
        attention: str = "bidirectional",
    ) -> None:
        super().__init__(num_heads, block, different_layout_per_head, attention=attention)
        self.stride = at_least("stride", stride, 1)

    def part(self, n: int, head: int, rng: Generator) -> Tensor:
        near, far = window(n, 2 * self.stride - 1), strided(n, self.stride)
        read = (far if head % 2 else near) if self.different_layout_per_head else near | far
        return lower(read) if self.past else read


class GlobalSparsityConfig(SparsityConfig):
    """The first num_global_blocks, read by all and reading all, and one's own block."""

    def __init__(
        self, num_heads: int, block: int = 16, num_global_blocks: int = 1, attention: str = "bidirectional"
    ) -> None:
        super().__init__(num_heads, block, attention=attention)
        self.num_global_blocks = at_least("num_global_blocks", num_global_blocks, 1)

    def part(self, n: int, head: int, rng: Generator) -> Tensor:
        within("num_global_blocks", self.num_global_blocks, n)
        first = [(0, self.num_global_blocks)]
        read = window(n, 1) | columns(n, first) | rows(n, first)
        return lower(read) if self.past else read


class RandomSparsityConfig(SparsityConfig):
    """num_random_blocks drawn for each row (not of the future, if unidirectional), and one's own block."""

    def __init__(
        self,
        num_heads: int,
        block: int = 16,
        different_layout_per_head: bool = False,
        num_random_blocks: int = 1,
        attention: str = "bidirectional",
        seed: int | None = None,
    ) -> None:
        super().__init__(num_heads, block, different_layout_per_head, seed, attention)
        self.num_random_blocks = at_least("num_random_blocks", num_random_blocks, 0)

    def part(self, n: int, head: int, rng: Generator) -> Tensor:
        within("num_random_blocks", self.num_random_blocks, n)
        return window(n, 1) | drawn(n, self.num_random_blocks, rng, past_only=self.past)
