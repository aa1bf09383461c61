"""`TiledLinear`: a layer's numbers in any cut, sharded or not, with no more than a tile gathered."""

from typing import Any

import pytest
import torch
import worlds
from torch import Tensor, nn

import refimpl.deepspeed as deepspeed
from refimpl.zero.flat import ALIGN_PARAMETER, round_up
from refimpl.zero.tiled import TiledLinear, TiledLinearReturnBias

WIDE, HIGH = 7, 5


def whole(bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(WIDE, HIGH, bias=bias)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("columns", "rows"), [(1, 1), (2, 1), (1, 2), (3, 2), (WIDE, HIGH)])
def test_any_cut_is_the_layer(columns: int, rows: int, bias: bool) -> None:
    layer = whole(bias)
    tiled = TiledLinear(WIDE, HIGH, bias, columns, rows, init_linear=layer)
    assert sum(p.numel() for p in tiled.parameters()) == sum(p.numel() for p in layer.parameters())
    x = torch.randn(2, 3, WIDE, requires_grad=True)
    again = x.detach().clone().requires_grad_()
    torch.testing.assert_close(tiled(x), layer(again))
    tiled(x).square().sum().backward()
    layer(again).square().sum().backward()
    torch.testing.assert_close(x.grad, again.grad)
    rebuilt = torch.cat([torch.cat([tile.weight.grad for tile in row], 1) for row in tiled.rows()])
    torch.testing.assert_close(rebuilt, layer.weight.grad)


def test_parts_in_and_out() -> None:
    layer = whole()
    tiled = TiledLinear(
        WIDE, HIGH, in_splits=2, out_splits=2, input_is_already_split=True, combine_out_splits=False, init_linear=layer
    )
    x = torch.randn(3, WIDE)
    parts = tiled(x.split([4, 3], dim=-1))
    assert [part.shape for part in parts] == [(3, 3), (3, 2)]
    torch.testing.assert_close(torch.cat(parts, -1), layer(x))
    with pytest.raises(ValueError, match="3 inputs for 2 columns"):
        tiled([x, x, x])


class WithBias(nn.Linear):
    """As Megatron-LM's: the bias is for the caller to add."""

    def forward(self, x: Tensor) -> Any:
        return nn.functional.linear(x, self.weight), self.bias


@pytest.mark.parametrize("bias", [True, False])
def test_a_bias_that_is_returned(bias: bool) -> None:
    layer, x = whole(bias), torch.randn(3, WIDE)
    tiled = TiledLinearReturnBias(WIDE, HIGH, bias, 3, 2, linear_cls=WithBias, init_linear=layer)
    y, returned = tiled(x)
    torch.testing.assert_close(y if returned is None else y + returned, layer(x))
    assert (returned is not None) == bias


@pytest.mark.parametrize("splits", [0, 8])
def test_what_cannot_be_cut_or_copied(splits: int) -> None:
    with pytest.raises(RuntimeError, match=rf"in_splits = {splits}: must be 1 to in_features = {WIDE}"):
        TiledLinear(WIDE, HIGH, in_splits=splits)
    with pytest.raises(RuntimeError, match=rf"out_splits = {splits}: must be 1 to out_features = {HIGH}"):
        TiledLinear(WIDE, HIGH, out_splits=splits)
    with pytest.raises(ValueError, match=r"with bias False cannot fill one .* with bias True"):
        TiledLinear(WIDE, HIGH, init_linear=whole(bias=False))


def trained() -> tuple[dict[str, Tensor], int]:
    """Runs on every rank: the layer's weights after three steps, and the most elements that a unit gathers."""
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    }
    with deepspeed.zero.Init(config_dict_or_path=config):
        tiled = TiledLinear(WIDE, HIGH, in_splits=3, out_splits=2, init_linear=whole())
    engine, *_ = deepspeed.initialize(model=tiled, config=config)
    for step in range(3):
        x = torch.randn(2, WIDE, generator=torch.Generator().manual_seed(10 * step + engine.global_rank))
        engine.backward(engine(x).square().mean())
        engine.step()
    return engine.module_state_dict(), max(unit.numel for unit in engine.stage.units)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_sharded_tiles_train_as_the_layer(ranks: int) -> None:
    state, most = worlds.run(trained, ranks=ranks)[0]
    layer = whole()
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1, weight_decay=0.0)
    for step in range(3):
        for rank in range(ranks):
            x = torch.randn(2, WIDE, generator=torch.Generator().manual_seed(10 * step + rank))
            (layer(x).square().mean() / ranks).backward()
        optimizer.step()
        optimizer.zero_grad()
    tiled = TiledLinear(WIDE, HIGH, in_splits=3, out_splits=2)
    tiled.load_state_dict(state)
    torch.testing.assert_close(tiled(torch.eye(WIDE)), layer(torch.eye(WIDE)))
    assert most == round_up(3 * 3, ALIGN_PARAMETER) + 3  # the largest tile, padded, and its bias; the layer has 40
