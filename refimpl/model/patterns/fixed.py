"""Fixed: stretches that read themselves, and of every stretch some blocks that everybody reads.

Sparse Transformers (arXiv:1904.10509, section 4.3, "fixed"), as DeepSpeed customised it. With l local and g global
blocks a row of n reads about l + g n / l of them: O(n sqrt n) in all when l grows as sqrt n.
"""

from torch import Tensor

from refimpl.model.patterns.base import SparsityConfig, at_least
from refimpl.model.patterns.parts import Generator, columns, lower, rows, stretches


class FixedSparsityConfig(SparsityConfig):
    """DeepSpeed's `fixed`.

    num_local_blocks: a stretch's length. num_global_blocks: how many of its blocks all later ones (unidirectional) or
    all (bidirectional) read; it divides num_local_blocks. num_different_global_patterns: heads take turns to read the
    last, the one before, ...; needs different_layout_per_head. horizontal_global_attention: those blocks also read
    everybody; bidirectional only. ValueError for what does not fit, NotImplementedError for another `attention`.
    """

    def __init__(
        self,
        num_heads: int,
        block: int = 16,
        different_layout_per_head: bool = False,
        num_local_blocks: int = 4,
        num_global_blocks: int = 1,
        attention: str = "bidirectional",
        horizontal_global_attention: bool = False,
        num_different_global_patterns: int = 1,
    ) -> None:
        super().__init__(num_heads, block, different_layout_per_head, attention=attention)
        self.num_local_blocks = at_least("num_local_blocks", num_local_blocks, 1)
        self.num_global_blocks = at_least("num_global_blocks", num_global_blocks, 1)
        self.num_different_global_patterns = at_least("num_different_global_patterns", num_different_global_patterns, 1)
        self.horizontal_global_attention = horizontal_global_attention
        if num_local_blocks % num_global_blocks:
            raise ValueError(
                f"num_global_blocks is {num_global_blocks}: it must divide num_local_blocks, {num_local_blocks}"
            )
        if self.past and horizontal_global_attention:
            raise ValueError('horizontal_global_attention would read the future: it needs attention = "bidirectional"')
        if num_different_global_patterns > 1 and not different_layout_per_head:
            raise ValueError("num_different_global_patterns > 1 needs different_layout_per_head = True")
        if num_different_global_patterns > num_local_blocks // num_global_blocks:
            raise ValueError(
                f"num_different_global_patterns is {num_different_global_patterns}: a stretch of {num_local_blocks} "
                f"blocks has only {num_local_blocks // num_global_blocks} places for {num_global_blocks} global ones"
            )

    def part(self, n: int, head: int, rng: Generator) -> Tensor:
        local = stretches(n, [self.num_local_blocks])
        read = (lower(local) if self.past else local) | columns(n, self.representatives(n, head), from_own=self.past)
        return read | rows(n, self.representatives(n, head)) if self.horizontal_global_attention else read

    def representatives(self, n: int, head: int) -> list[tuple[int, int]]:
        """[start, end) of each stretch's global blocks; in a last, shorter stretch they lie at its end if need be."""
        width, count = self.num_local_blocks, self.num_global_blocks
        first = width - (1 + head % self.num_different_global_patterns) * count
        whole = n - n % width
        starts = list(range(first, whole, width))
        if whole < n:
            starts.append(max(0, min(whole + first, n - count)))
        return [(start, start + count) for start in starts]
