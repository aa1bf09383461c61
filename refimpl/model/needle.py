"""A needle in a text: one block of a random text holds a code, the last block is asked which. Does a pattern find it?

An encoder of two layers reads T tokens in blocks of `block`. Its answer is right by chance once in CODES times, and
every time if what the last block hears of, in two layers, has the needle in it.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from refimpl.model.gpt import Block, GPTConfig
from refimpl.model.patterns.base import SparsityConfig
from refimpl.model.sparse import SparseAttention
from refimpl.model.sparse_swap import SparseGPTAttention

LETTERS, CODES = 16, 8  # of the text; of the needle


class Reader(nn.Module):
    """Two of the GPT's blocks, not causal, over a pattern; its answers are those of the last block's tokens."""

    def __init__(self, pattern: SparsityConfig, length: int, width: int = 32) -> None:
        super().__init__()
        config = GPTConfig(LETTERS + CODES + 1, length, width, layers=2, heads=pattern.num_heads)
        self.block = pattern.block
        self.words = nn.Embedding(config.vocab, width)
        self.places = nn.Parameter(torch.randn(length, width) / 10)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm, self.answer = nn.LayerNorm(width), nn.Linear(width, CODES)
        for block in self.blocks:
            attend = SparseAttention(pattern, length, causal=False)
            block.attention = SparseGPTAttention(block.attention, attend)  # type: ignore[arg-type]

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens [B, T] -> [B, block, CODES]."""
        x = self.words(tokens) + self.places
        for block in self.blocks:
            x = block(x)
        answers: Tensor = self.answer(self.norm(x[:, -self.block :]))
        return answers


def texts(count: int, length: int, block: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """(tokens [count, length], codes [count], the number of the block that holds the code [count])."""
    tokens = torch.randint(0, LETTERS, (count, length), generator=generator)
    codes = torch.randint(0, CODES, (count,), generator=generator)
    where = torch.randint(0, length // block - 1, (count,), generator=generator)
    by_block = tokens.view(count, -1, block)
    by_block[torch.arange(count), where] = LETTERS + codes[:, None]
    by_block[:, -1] = LETTERS + CODES  # the question
    return tokens, codes, where


@dataclass(frozen=True)
class Found:
    """The share of right answers: where two layers reach the needle, and where they do not; NaN of none."""

    reached: float
    beyond: float


def learn(pattern: SparsityConfig, length: int = 64, steps: int = 100) -> Found:
    """Train a Reader on fresh texts, and ask it 512 others."""
    torch.manual_seed(0)
    model, block = Reader(pattern, length), pattern.block
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        tokens, codes, _ = texts(32, length, block, generator)
        loss = F.cross_entropy(model(tokens).flatten(0, 1), codes.repeat_interleave(block))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    tokens, codes, where = texts(512, length, block, generator)
    with torch.no_grad():
        right = model(tokens)[:, -1].argmax(1) == codes
    reads = pattern.make_layout(length)[0].float() + torch.eye(length // block)
    reached = (reads @ reads)[-1, where] > 0
    return Found(right[reached].float().mean().item(), right[~reached].float().mean().item())
