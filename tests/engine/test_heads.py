"""Muon by heads: which matrices lie in blocks, and that every stage moves these alike."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training import differing
from worlds import run

import refimpl
from refimpl.deepspeed.pipe import PipelineModule
from refimpl.engine.configuration.keys import ConfigError
from refimpl.engine.heads import heads_found


class Attention(nn.Module):
    """4 heads of 6 rows, keys of 2 heads."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(num_attention_heads=4, num_key_value_heads=2, hidden_size=24)
        self.q_proj, self.o_proj = nn.Linear(24, 24), nn.Linear(24, 24)
        self.k_proj, self.v_proj = nn.Linear(24, 12, bias=False), nn.Linear(24, 12)
        self.mlp = nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, T, 24] -> [B, T, 24]"""
        q, k, v = (layer(x).unflatten(-1, (-1, 6)).transpose(1, 2) for layer in (self.q_proj, self.k_proj, self.v_proj))
        groups = q.shape[1] // k.shape[1]
        k, v = (t.repeat_interleave(groups, 1) for t in (k, v))
        seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.mlp(x + self.o_proj(seen.transpose(1, 2).flatten(2)))


def trained(stage: int, by_heads: bool = True) -> tuple[dict[str, Tensor], dict[str, int]]:
    """Runs on every rank: the weights after three steps, and how many heads each matrix is said to have."""
    torch.manual_seed(0)
    muon = {"type": "Muon", "params": {"lr": 0.02, "per_head_muon": by_heads}}
    settings = {"train_batch_size": 12, "optimizer": muon, "zero_optimization": {"stage": stage}}
    data = [torch.randn(7, 24, generator=torch.Generator().manual_seed(i)) for i in range(12)]
    engine = refimpl.initialize(model=Attention(), config=settings, training_data=data)[0]
    heads = {n: p.muon_num_heads for n, p in engine.module.named_parameters() if hasattr(p, "muon_num_heads")}
    rows = torch.stack(data).view(engine.dp_world_size, -1, 7, 24)[engine.axes.replicas.rank]
    for _ in range(3):
        for micro in rows.split(engine.train_micro_batch_size_per_gpu()):
            engine.backward(engine(micro).square().mean())
            engine.step()
    state = engine.module_state_dict()
    return {name: state[name].clone() for name in state}, heads


def test_every_stage_moves_heads_alike() -> None:
    """Of 3 ranks none has whole heads in its shards."""
    ddp, heads = run(trained, 0, ranks=3)[0]
    assert heads == {"q_proj.weight": 4, "k_proj.weight": 2, "v_proj.weight": 2}
    for stage in (1, 2, 3):
        assert differing(run(trained, stage, ranks=3)[0][0], ddp) == []
    assert heads.keys() <= set(differing(run(trained, 0, False, ranks=3)[0][0], ddp)), "or it would not tell"


NAMES = {
    "attn.q_proj": (64, 4),  # of 16
    "attn.query": (64, 4),
    "attn.k_proj": (32, 2),
    "attn.key_value": (32, 2),
    "attn.q_b_proj": (48, 4),  # latent: of 8 + 4
    "attn.kv_b_proj": (56, 4),  # of 8 + 6
    "attn.qkv_proj": (128, None),
    "attn.query_key_value": (128, None),
    "attn.kv_a_proj_with_mqa": (64, None),
    "attn.o_proj": (64, None),  # its heads are columns
    "attn.v_proj": (40, None),  # no 2 heads of 16
    "mlp.up": (64, None),
}


@pytest.mark.parametrize("nested", [False, True])
def test_names_propose_and_shapes_confirm(nested: bool) -> None:
    model = nn.Module()
    for path, (rows, _) in NAMES.items():
        part, leaf = path.split(".")
        if not hasattr(model, part):
            setattr(model, part, nn.Module())
        setattr(getattr(model, part), leaf, nn.Linear(64, rows))
    config = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64}
    latent = {"qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
    told = SimpleNamespace(**config, **latent)
    model.config = SimpleNamespace(text_config=told) if nested else told  # type: ignore[assignment]
    assert heads_found(model) == {f"{path}.weight": heads for path, (_, heads) in NAMES.items() if heads}
    told.qk_nope_head_dim = 12
    told.head_dim = 8
    assert heads_found(model)["attn.q_proj.weight"] == 4, "latent attention without a down-projection of queries"


def test_asked_for_where_nothing_has_heads_it_is_an_error() -> None:
    muon: dict[str, Any] = {"type": "Muon", "params": {"per_head_muon": True}}
    settings = {"train_batch_size": 1, "optimizer": muon}
    with pytest.raises(ConfigError, match=r"per_head_muon = true: no matrix of Linear is known to have heads"):
        refimpl.initialize(model=nn.Linear(8, 8), config=settings)
    marked = nn.Linear(8, 8)
    marked.weight.muon_num_heads = 2  # type: ignore[assignment]
    refimpl.initialize(model=marked, config=settings)
    muon["params"]["per_head_muon"] = "often"
    with pytest.raises(ConfigError, match=r"optimizer\.params\.per_head_muon"):
        refimpl.initialize(model=nn.Linear(8, 8), config=settings)


def staged(by_hand: bool) -> str:
    """Runs on every stage: what is wrong with heads on the first one, or, without the marks, on none."""
    first = nn.Linear(8, 8)
    if by_hand:
        first.weight.muon_num_heads = 2  # type: ignore[assignment]
    model = PipelineModule([first, nn.Linear(8, 8)], 2, loss_fn=nn.functional.mse_loss, partition_method="uniform")
    muon = {"type": "Muon", "params": {"per_head_muon": True}}
    try:
        refimpl.initialize(model=model, config={"train_batch_size": 1, "optimizer": muon})
    except ConfigError as error:
        return str(error)
    return ""


def test_a_pipelines_stage_may_have_no_heads() -> None:
    assert run(staged, True, ranks=2) == ["", ""]
    assert all("no matrix of PipelineModule" in said for said in run(staged, False, ranks=2))


def test_a_second_engine_without_the_key_moves_wholes() -> None:
    """What the first one found out is forgotten, what a script has marked is not."""
    model = Attention()
    model.mlp.weight.muon_num_heads = 3  # type: ignore[assignment]
    for by_heads in (True, True, False):
        muon = {"type": "Muon", "params": {"per_head_muon": by_heads}}
        refimpl.initialize(model=model, config={"train_batch_size": 1, "optimizer": muon})[0].destroy()
        marked = {name for name, p in model.named_parameters() if hasattr(p, "muon_num_heads")}
        assert marked == {"mlp.weight", *(["q_proj.weight", "k_proj.weight", "v_proj.weight"] if by_heads else [])}


class KimiDeltaAttention(nn.Module):
    """4 heads of 8, and, as it would never be, rows for the 2 heads of 12 that the model's config tells."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.head_dim = 4, 8
        self.q_proj, self.v_proj, self.o_proj = nn.Linear(32, 32), nn.Linear(32, 24), nn.Linear(32, 32)


def test_linear_attention_has_its_own_heads_as_in_deepspeed() -> None:
    model = nn.Module()
    model.attn = KimiDeltaAttention()
    model.config = SimpleNamespace(num_attention_heads=2, hidden_size=32, head_dim=12)  # type: ignore[assignment]
    assert heads_found(model) == {"attn.q_proj.weight": 4}


def cut() -> str:
    """Runs on both tensor ranks: what is wrong."""
    muon = {"type": "Muon", "params": {"per_head_muon": True}}
    settings = {"train_batch_size": 1, "optimizer": muon, "tensor_parallel": {"autotp_size": 2}}
    with pytest.raises(ConfigError) as error:
        refimpl.initialize(model=Attention(), config=settings)
    return str(error.value)


def test_tensor_ranks_hear_that_muon_is_not_for_them() -> None:
    assert all("optimizer.type Muon: tensor ranks have parts" in said for said in run(cut, ranks=2))
