"""What cards claim of work and traffic by counting them: packed documents, Muon's iteration, weights for an engine."""

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from refimpl.checkpoint.place import Place
from refimpl.model.gpt import Block, GPTConfig
from refimpl.optim.muon import orthogonal


def test_a_packed_sequence_takes_the_cards_share_of_one_documents_work() -> None:
    from torch.utils.flop_counter import FlopCounterMode  # which imports triton: tests/kernels/conftest.py must first

    w, T = 32, 64
    block = Block(GPTConfig(vocab=32, context=T, width=w, layers=1, heads=2))
    counts = {}
    for m in (1, 4, 8):
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
            block(torch.randn(m, T // m, w)).sum().backward()
        counts[m] = counter.get_total_flops()
    for m in (4, 8):
        assert counts[1] * (6 * w + T // m) == counts[m] * (6 * w + T)


def test_making_a_square_matrix_orthogonal_takes_30_n_cubed_operations() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    n = 16
    with FlopCounterMode(display=False) as counter:
        orthogonal(torch.randn(n, n))
    assert counter.get_total_flops() == 30 * n**3


def test_an_engines_rank_takes_its_slice_from_the_shards_that_have_it() -> None:
    numel, N, t, replicas = 960, 8, 4, 3
    place = Place((numel,), "bfloat16", at=0, of=numel, group=None, trained=True)
    sent, received = [0] * N, [0] * t
    for _ in range(replicas):
        for rank in range(t):
            for owner, begin, end in place.pieces(rank * numel // t, (rank + 1) * numel // t, N):
                sent[owner] += end - begin
                received[rank] += end - begin
    assert received == [replicas * numel // t] * t
    assert sent == [replicas * numel // N] * N
