"""The needle is found where two layers reach it, and guessed where they do not."""

import torch

from refimpl.model.needle import CODES, LETTERS, learn, texts
from refimpl.model.patterns.fixed import FixedSparsityConfig
from refimpl.model.patterns.plain import RandomSparsityConfig


def test_a_text_has_one_needle_and_one_question() -> None:
    tokens, codes, where = texts(20, 32, 4, torch.Generator().manual_seed(0))
    by_block = tokens.view(20, 8, 4)
    for text, code, block in zip(by_block, codes, where, strict=True):
        assert text[block].tolist() == [LETTERS + int(code)] * 4
        assert text[-1].tolist() == [LETTERS + CODES] * 4
        assert int((text >= LETTERS).sum()) == 8


def test_a_hub_finds_what_own_blocks_alone_cannot() -> None:
    hub = learn(FixedSparsityConfig(1, 4), length=32, steps=80)
    alone = learn(RandomSparsityConfig(1, 4, num_random_blocks=0), length=32, steps=20)
    assert hub.reached > 0.9
    assert alone.beyond < 0.3
    assert alone.reached != alone.reached  # no needle lies in the last block
