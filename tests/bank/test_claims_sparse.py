"""What the cards on sparse attention say, in a few lines of torch each."""

import torch

from refimpl.deepspeed.ops.sparse_attention import LocalSlidingWindowSparsityConfig, SparseSelfAttention
from refimpl.model.patterns.fixed import FixedSparsityConfig


def test_a_stretch_of_sqrt_n_reads_least() -> None:
    n = 64
    read = {}
    for local in (1, 2, 4, 8, 16, 32):
        layout = FixedSparsityConfig(1, 1, num_local_blocks=local).make_layout(n)[0]
        read[local] = set(layout.sum(1).tolist())
    assert read[8] == {2 * 8 - 1}
    assert min(read, key=lambda local: max(read[local])) == 8
    layout = FixedSparsityConfig(1, 1, num_local_blocks=8).make_layout(n)[0]
    assert bool((layout @ layout > 0).all())  # two layers from anything to anything


def test_a_unidirectional_layout_alone_leaks_the_rest_of_the_block() -> None:
    torch.manual_seed(0)
    layer = SparseSelfAttention(LocalSlidingWindowSparsityConfig(1, 16), max_seq_length=64)
    x = torch.randn(1, 1, 64, 8, requires_grad=True)
    causal = torch.ones(64, 64).tril()
    for token, mask, leaks in ((16, None, 15), (31, None, 0), (16, causal, 0)):
        (grad,) = torch.autograd.grad(layer(x, x, x, attn_mask=mask)[:, :, token].sum(), x)
        assert int((grad[0, 0, token + 1 :] != 0).any(1).sum()) == leaks
