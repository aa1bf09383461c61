"""A sliding window alone, with global blocks (Longformer), and with random ones besides (BigBird).

With a window of w blocks, g global and r random ones a row reads w + g + r: O(n) in all. What a window does not reach
in one layer it reaches in several: L layers carry a token L w / 2 blocks; a global block carries it anywhere in two.

BigBird: arXiv:2007.14062, section 2 and appendix D (its own implementation is by blocks, too). Longformer:
arXiv:2004.05150, section 3.1 (there token by token, here by blocks).
"""

from collections.abc import Sequence

from torch import Tensor

from refimpl.model.patterns.base import SparsityConfig, at_least, spans, within
from refimpl.model.patterns.parts import Generator, columns, drawn, lower, rows, window


class BigBirdSparsityConfig(SparsityConfig):
    """DeepSpeed's `bigbird`: the first num_global_blocks are read by all and read all (not the future, if
    unidirectional), a window num_sliding_window_blocks wide, and num_random_blocks drawn for each row.

    ValueError from make_layout if a row has fewer blocks than one of them.
    """

    def __init__(
        self,
        num_heads: int,
        block: int = 16,
        different_layout_per_head: bool = False,
        num_random_blocks: int = 1,
        num_sliding_window_blocks: int = 3,
        num_global_blocks: int = 1,
        attention: str = "bidirectional",
        seed: int | None = None,
    ) -> None:
        super().__init__(num_heads, block, different_layout_per_head, seed, attention)
        self.num_random_blocks = at_least("num_random_blocks", num_random_blocks, 0)
        self.num_sliding_window_blocks = at_least("num_sliding_window_blocks", num_sliding_window_blocks, 1)
        self.num_global_blocks = at_least("num_global_blocks", num_global_blocks, 0)

    def part(self, n: int, head: int, rng: Generator) -> Tensor:
        for name in ("num_random_blocks", "num_sliding_window_blocks", "num_global_blocks"):
            within(name, getattr(self, name), n)
        first = [(0, self.num_global_blocks)]
        read = drawn(n, self.num_random_blocks, rng, past_only=self.past) | window(n, self.num_sliding_window_blocks)
        read |= columns(n, first) | rows(n, first)
        return lower(read) if self.past else read


class BSLongformerSparsityConfig(SparsityConfig):
    """DeepSpeed's `bslongformer`: a window, and global_block_indices that all read and that read all; with
    global_block_end_indices ranges, ends exclusive. Those beyond the sequence are left out.
    """

    def __init__(
        self,
        num_heads: int,
        block: int = 16,
        different_layout_per_head: bool = False,
        num_sliding_window_blocks: int = 3,
        global_block_indices: Sequence[int] = (0,),
        global_block_end_indices: Sequence[int] | None = None,
        attention: str = "bidirectional",
    ) -> None:
        super().__init__(num_heads, block, different_layout_per_head, attention=attention)
        self.num_sliding_window_blocks = at_least("num_sliding_window_blocks", num_sliding_window_blocks, 1)
        ends = None if global_block_end_indices is None else list(global_block_end_indices)
        self.ranges = spans(list(global_block_indices), ends)
        self.global_block_indices = list(global_block_indices)
        self.global_block_end_indices = ends

    def part(self, n: int, head: int, rng: Generator) -> Tensor:
        within("num_sliding_window_blocks", self.num_sliding_window_blocks, n)
        read = window(n, self.num_sliding_window_blocks) | columns(n, self.ranges) | rows(n, self.ranges)
        return lower(read) if self.past else read


class LocalSlidingWindowSparsityConfig(SparsityConfig):
    """DeepSpeed's `local`: a window and nothing else; by default a causal model's, without the blocks ahead."""

    def __init__(
        self, num_heads: int, block: int = 16, num_sliding_window_blocks: int = 3, attention: str = "unidirectional"
    ) -> None:
        super().__init__(num_heads, block, attention=attention)
        self.num_sliding_window_blocks = at_least("num_sliding_window_blocks", num_sliding_window_blocks, 1)

    def part(self, n: int, head: int, rng: Generator) -> Tensor:
        within("num_sliding_window_blocks", self.num_sliding_window_blocks, n)
        return window(n, self.num_sliding_window_blocks, ahead=not self.past)
