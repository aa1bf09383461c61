"""The planner beside what others have published and beside what is counted: sizes, bytes, traffic, time."""

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import pytest
import torch
from kept import counted as kept_for_backward
from worlds import run

from refimpl.comm.group import Group
from refimpl.engine.initialize import initialize
from refimpl.measure.memory import MemoryMeter
from refimpl.model.gpt import GPT, GPTConfig
from refimpl.parallel.swap import gpt_plan, parallelize
from refimpl.plan import formulas
from refimpl.plan.mesh import Machine, Mesh, activations, judge
from refimpl.plan.public import FAMILIES, of_config
from refimpl.plan.published import LLAMA, MEGATRON, Run
from refimpl.plan.search import search
from refimpl.plan.shape import Shape, of_gpt, of_size
from refimpl.plan.traffic import by_axis, layers_of, parameters_of, traffic
from refimpl.plan.transformer import activation_bytes, flops_per_token, tensor_parallel_sent

# Rajbhandari et al. 2020, arXiv:1910.02054, table 1: GB of model state a device, for 7.5, 128 and 1,000 billion
# parameters; DP degree -> (Pos, Pos+g, Pos+g+p) of each.
ZERO = {
    1: [(120, 120, 120), (2048, 2048, 2048), (16000, 16000, 16000)],
    4: [(52.5, 41.3, 30), (896, 704, 512), (7000, 5500, 4000)],
    16: [(35.6, 21.6, 7.5), (608, 368, 128), (4750, 2875, 1000)],
    64: [(31.4, 16.6, 1.88), (536, 284, 32), (4187, 2218, 250)],
    256: [(30.4, 15.4, 0.47), (518, 263, 8), (4046, 2054, 62.5)],
    1024: [(30.1, 15.1, 0.12), (513, 257, 2), (4011, 2013, 15.6)],
}


@pytest.mark.parametrize("row", MEGATRON, ids=lambda row: f"{row.billions}B")
def test_sizes_and_speed_of_megatrons_table(row: Run) -> None:
    shape = row.shape
    assert shape.parameters / 1e9 == pytest.approx(row.billions, rel=0.03)
    verdict = judge(shape, Mesh(row.dp, row.pp, row.tp, row.batch, 1, "ddp"), Machine())
    tflops = shape.flops(row.batch, recompute=True) / verdict.step / row.gpus / 1e12
    # One efficiency for all: small products reach less of the peak than large ones.
    assert tflops == pytest.approx(row.tflops, rel=0.35 if row.billions < 7 else 0.18)


@pytest.mark.parametrize("row", LLAMA, ids=lambda row: f"{row.gpus} GPUs, cp {row.cp}")
def test_sizes_and_gpus_of_llamas_table(row: Run) -> None:
    assert row.shape.parameters / 1e9 == pytest.approx(row.billions, rel=0.01)
    assert row.dp * row.pp * row.cp * row.tp == row.gpus
    assert row.batch % row.dp == 0


@pytest.mark.parametrize("ranks", ZERO)
def test_bytes_of_zeros_table(ranks: int) -> None:
    for billions, published in zip((7.5, 128, 1000), ZERO[ranks], strict=True):
        for strategy, gb in zip(("zero1", "zero2", "zero3"), published, strict=True):
            layout = formulas.Layout(int(billions * 1e9), padding=0, buckets=0)
            ours = sum(formulas.memory_bytes(strategy, ranks, 2, layout).values()) / 1e9  # type: ignore[arg-type]
            assert ours == pytest.approx(gb, rel=0.03), (strategy, billions)


@pytest.mark.parametrize("config", [GPTConfig(), GPTConfig(vocab=100, context=64, width=128, layers=3, heads=2)])
def test_a_gpts_parameters_flops_and_activations_are_the_formulas_and_the_models(config: GPTConfig) -> None:
    with torch.device("meta"):
        model = GPT(config)
    shape = of_gpt(config)
    assert shape.parameters == config.parameters == sum(p.numel() for p in model.parameters())
    assert shape.block() == sum(p.numel() for p in model.blocks[0].parameters())
    assert shape.flops(1) == flops_per_token(config) * config.context
    assert shape.flops(1, recompute=True) == flops_per_token(config, recompute=True) * config.context
    mesh = Mesh(1, 1, 1, 4, 2, "ddp", recompute=False)
    head = 2 * config.context * (2 * config.width * 2 + 2 * 4 + config.vocab * 4)
    found = judge(shape, mesh, Machine()).bytes["activations"]
    assert found == config.layers * activation_bytes(config, 2) + head


# --- what the planner says, counted where it runs


COUNTED = GPTConfig(vocab=16, context=8, width=64, layers=4, heads=4)


# ZeRO-3 keeps small parameters whole, and those that are needed again soon; here all are small.
LEFT = {"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0}


def counted(mesh: Mesh, stage: int) -> tuple[dict[str, int], dict[str, int], formulas.Layout, int]:
    """Bytes sent by axis, kept by class (activations at the most, else before the update), layout, pipeline stage."""
    config = {
        "train_micro_batch_size_per_gpu": mesh.micro, "gradient_accumulation_steps": mesh.micro_batches,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, "zero_optimization": {"stage": stage} | LEFT,
        "pipeline": {"stages": mesh.pp, "activation_checkpoint_interval": int(mesh.recompute)},
        "tensor_parallel": {"autotp_size": mesh.tp}, "sequence_parallel_size": mesh.cp,
    }  # fmt: skip
    engine, *_ = initialize(model=GPT(COUNTED), config=config)
    ids = torch.zeros(mesh.micro, COUNTED.context, dtype=torch.int64)
    kept: dict[str, int] = {}
    engine.optimizer.register_step_pre_hook(lambda *_: kept.update(MemoryMeter(engine.stage.tensors).now()))
    for _ in range(2):
        engine.axes.world.ledger.reset()
        with kept_for_backward(lambda: chain.from_iterable(engine.stage.tensors().values())) as activations:
            engine.train_batch(iter([(ids, ids)] * mesh.micro_batches))
        assert activations.now == 0
    sent = by_axis(engine.axes.world.ledger.sent_bytes("tag"))
    kept["activations"] = activations.peak
    return sent, kept, formulas.layout_of(engine.stage), engine.axes.pipeline.rank


runs = partial(Mesh, recompute=False, itemsize=4, sequence=False)  # in fp32, as a JSON asks for it


@pytest.mark.parametrize(
    ("mesh", "stage"),
    [
        (runs(2, 2, 1, 8), 1), (runs(1, 2, 2, 4, zero="ddp"), 0), (runs(2, 1, 2, 4, zero="zero2"), 2),
        (runs(1, 4, 1, 4, 2, zero="ddp"), 0), (runs(1, 1, 2, 2, cp=2), 1), (runs(2, 1, 1, 4, cp=2), 1),
        (runs(1, 1, 4, 2, zero="ddp"), 0), (runs(2, 2, 2, 4), 1), (runs(3, 1, 1, 6, zero="zero3"), 3),
        (runs(1, 2, 2, 4, 2, zero="ddp", recompute=True), 0), (runs(1, 4, 1, 6, zero="ddp", recompute=True), 0),
    ],
    ids=lambda value: f"dp{value.dp}-pp{value.pp}-cp{value.cp}-tp{value.tp}" if isinstance(value, Mesh) else "",
)  # fmt: skip
def test_every_byte_on_every_axis_and_in_every_class_is_counted(mesh: Mesh, stage: int) -> None:
    shape = of_gpt(COUNTED)
    for sent, kept, layout, place in run(counted, mesh, stage, ranks=mesh.gpus):
        expected = traffic(shape, mesh, place, layout.padding)
        if mesh.recompute and place == 0:  # an interval of one layer: the pipeline runs its embeddings twice too
            expected["tensor"] += mesh.micro_batches * tensor_parallel_sent(COUNTED, mesh.micro, mesh.tp, 4) // 4
        assert sent.pop("control") < 1000
        assert sent == expected
        planned = formulas.Layout(parameters_of(shape, mesh, place), layout.padding, layout.buckets)
        wanted = formulas.memory_bytes(mesh.zero, mesh.dp * mesh.cp, 4, planned)
        alive = min(mesh.pp - place, mesh.micro_batches)
        wanted["activations"] = activations(shape, mesh, alive, head=place == mesh.pp - 1)
        assert {name: kept.get(name, 0) for name in wanted} == wanted


def under_sequence_parallelism(mesh: Mesh) -> int:
    """What autograd keeps of the whole model, its tokens divided between the cut matrices."""
    model = GPT(COUNTED)
    parallelize(model, gpt_plan(COUNTED.heads, COUNTED.vocab), Group.world(), sequence=mesh.sequence)
    ids = torch.zeros(mesh.micro, COUNTED.context, dtype=torch.int64)
    with kept_for_backward(model.parameters) as kept:
        model(ids, ids).backward()
    return kept.peak


@pytest.mark.parametrize("sequence", [True, False])
@pytest.mark.parametrize("ranks", [2, 4])
def test_activations_under_sequence_parallelism_are_counted(ranks: int, sequence: bool) -> None:
    mesh = Mesh(1, 1, ranks, 2, 2, "ddp", recompute=False, itemsize=4, sequence=sequence)
    expected = activations(of_gpt(COUNTED), mesh, 1, head=True)
    assert run(under_sequence_parallelism, mesh, ranks=ranks) == [expected] * ranks


def test_recomputing_sends_forwards_all_reduces_again() -> None:
    config = GPTConfig(vocab=512, context=64, width=128, layers=4, heads=8)
    mesh = Mesh(2, 4, 4, 8, 1, "zero1", recompute=False)
    sent = traffic(of_gpt(config), mesh, 1)["tensor"]  # a stage of blocks alone
    assert sent == tensor_parallel_sent(config, 1, 4) * (4 // 4) * (8 // 2)
    assert traffic(of_gpt(config), replace(mesh, recompute=True), 1)["tensor"] == sent * 5 // 4


def test_a_head_of_keys_that_several_ranks_have_is_whole_on_each() -> None:
    few = replace(of_gpt(GPTConfig(heads=8, width=512)), kv_heads=2)
    as_many = replace(few, kv_heads=8)
    assert few.block(8) == as_many.block(8)
    for mesh in (Mesh(1, 1, 8, 8), Mesh(1, 1, 8, 8, cp=2, recompute=False)):
        assert judge(few, mesh, Machine()).bytes == judge(as_many, mesh, Machine()).bytes
        assert traffic(few, mesh, 0) == traffic(as_many, mesh, 0)
    with pytest.raises(ValueError, match="3 heads of keys and values over 4 tensor ranks: neither divides"):
        judge(replace(few, heads=12, width=768, kv_heads=3), Mesh(1, 1, 4, 8), Machine())


PUBLIC: dict[str, dict[str, Any]] = {
    "gpt2": {"model_type": "gpt2", "n_layer": 3, "n_embd": 48, "n_head": 4, "vocab_size": 101, "n_positions": 32},
    "llama": {
        "model_type": "llama", "num_hidden_layers": 3, "hidden_size": 48, "num_attention_heads": 4, "vocab_size": 101,
        "num_key_value_heads": 2, "intermediate_size": 80, "max_position_embeddings": 32,
    },
}  # fmt: skip
PUBLIC["mistral"] = PUBLIC["llama"] | {"model_type": "mistral"}
PUBLIC["qwen2"] = PUBLIC["llama"] | {"model_type": "qwen2", "tie_word_embeddings": True}
PUBLIC["biased"] = PUBLIC["llama"] | {"attention_bias": True, "mlp_bias": True, "head_dim": 8}
for like in ("phi3", "gemma", "gemma2", "granite", "qwen3", "starcoder2", "gpt_neox", "phi"):
    more = {"pad_token_id": 0} | ({"head_dim": 8} if like in ("gemma", "gemma2", "qwen3") else {})
    PUBLIC[like] = PUBLIC["llama"] | {"model_type": like} | more
PUBLIC["gpt_neox"].pop("num_key_value_heads")
PUBLIC["gptj"] = PUBLIC["gpt2"] | {"model_type": "gptj", "rotary_dim": 4}
PUBLIC["gpt_bigcode"] = PUBLIC["gpt2"] | {"model_type": "gpt_bigcode"}
PUBLIC["opt"] = PUBLIC["llama"] | {"model_type": "opt", "ffn_dim": 80, "word_embed_proj_dim": 48}
PUBLIC["bloom"] = {"model_type": "bloom", "hidden_size": 48, "n_layer": 3, "n_head": 4, "vocab_size": 101}
FALCON = PUBLIC["llama"] | {"model_type": "falcon"}
PUBLIC["falcon"] = FALCON | {"alibi": False}
PUBLIC["falcon groups"] = FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2}
PUBLIC["falcon biased"] = FALCON | {"multi_query": False, "parallel_attn": False, "bias": True}


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers (the hf extra)")
@pytest.mark.parametrize("family", PUBLIC)
def test_a_public_configurations_parameters_are_transformers(family: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = PUBLIC[family]
    config = AutoConfig.for_model(**settings)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    expected = sum(p.numel() for p in model.parameters())
    assert of_config(config.to_dict()).parameters == of_config(settings).parameters == expected
    assert {settings["model_type"] for settings in PUBLIC.values()} == set(FAMILIES)


def test_known_models_by_their_published_shapes() -> None:
    llama_2_70b = {
        "model_type": "llama", "num_hidden_layers": 80, "hidden_size": 8192, "num_attention_heads": 64,
        "num_key_value_heads": 8, "intermediate_size": 28672, "vocab_size": 32000, "max_position_embeddings": 4096,
    }  # fmt: skip
    assert of_config(llama_2_70b).parameters == 68_976_648_192  # what its weights are
    assert of_config({**PUBLIC["gpt2"], "n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50257,
                      "n_positions": 1024}).parameters == 124_439_808  # fmt: skip


def test_layers_that_the_stages_do_not_divide() -> None:
    """126 layers of Llama 3 405B on 2^n GPUs: 16 stages, the first 14 of 8 layers, for which all wait."""
    shape, mesh = replace(of_gpt(GPTConfig(layers=126)), tied=False), Mesh(2, 16, 1, 32)
    each = [layers_of(shape, mesh, stage) for stage in range(16)]
    assert each == [8] * 14 + [7] * 2
    assert sum(parameters_of(shape, mesh, stage) for stage in range(16)) == shape.parameters
    even = judge(replace(shape, layers=128), mesh, Machine())
    found = judge(shape, mesh, Machine())
    assert found.seconds["compute"] == pytest.approx(even.seconds["compute"], rel=0.02)  # but for the head's part
    assert found.bytes == even.bytes, "the first stage is the fullest"
    assert found.mfu < even.mfu
    assert any(v.mesh.pp == 16 for v in search(replace(shape, layers=126), 64, 64, Machine()).fit)


def test_what_is_not_known_is_named() -> None:
    with pytest.raises(ValueError, match="'mixtral' has num_local_experts 8: mixtures of experts are not laid out"):
        of_config(PUBLIC["llama"] | {"model_type": "mixtral", "num_local_experts": 8})
    with pytest.raises(ValueError, match="model_type 'mamba': known here are gpt2, llama"):
        of_config({"model_type": "mamba"})
    with pytest.raises(ValueError, match="a gpt2 configuration without 'n_embd'"):
        of_config({"model_type": "gpt2"})
    shape = of_gpt(GPTConfig(layers=6, heads=4))
    for mesh, says in (
        (Mesh(1, 7, 1, 8), "6 layers over 7 pipeline stages: each needs one"),
        (Mesh(1, 1, 8, 8), "4 heads over tensor ranks: does not divide by 8"),
        (Mesh(3, 1, 1, 8), "8 sequences over ranks and micro-batches: does not divide by 3"),
        (Mesh(2, 2, 1, 8, zero="zero3"), "zero3 with 2 pipeline stages"),
    ):
        with pytest.raises(ValueError, match=says):
            judge(shape, mesh, Machine())


@pytest.mark.parametrize("billions", [0.1, 1, 7, 13, 70, 175, 530, 1000])
def test_a_size_becomes_a_shape_of_about_that_size(billions: float) -> None:
    assert of_size(billions * 1e9).parameters == pytest.approx(billions * 1e9, rel=0.12)


def test_the_search_finds_megatrons_way_for_a_trillion() -> None:
    shape = Shape(128, 25600, 160, 51_200, 2048, hidden=4 * 25600, kv_heads=160)
    found = search(shape, 3072, 3072, Machine())
    best = found.fit[0].mesh
    assert best.tp == 8, "a node wide"
    assert best.pp > 1
    assert [v.step for v in found.fit] == sorted(v.step for v in found.fit)
    assert all(v.total > 0.9 * 80e9 for v in found.over)
    assert {v.mesh.cp for v in (*found.fit, *found.over)} == {1}, "nobody shares sequences of 2,048 tokens"


def test_long_sequences_are_shared() -> None:
    """A rank's part of the activations of 1 million tokens is what decides."""
    found = search(of_size(7e9, context=2**20), 64, 4, Machine())
    assert found.fit
    assert all(v.mesh.cp > 1 for v in found.fit)


SHARDED = """
import json, torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from refimpl.model.gpt import GPT, GPTConfig
dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=1024)
with torch.device("meta"):
    model = GPT(GPTConfig(vocab=1024, context=1024, width=1024, layers=2, heads=8))
mesh = init_device_mesh("cpu", (1024,))
for block in model.blocks:
    fully_shard(block, mesh=mesh)
fully_shard(model, mesh=mesh)
print(json.dumps(sum(p.to_local().numel() * p.element_size() for p in model.parameters())))
"""


def test_bytes_of_fsdp2_at_1024_ranks() -> None:
    """Every first dimension divides by 1,024, so FSDP2 pads nothing."""
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SHARDED], capture_output=True, text=True, env=os.environ
    )
    assert run.returncode == 0, run.stderr
    shape = of_gpt(GPTConfig(vocab=1024, context=1024, width=1024, layers=2, heads=8))
    ours = judge(shape, Mesh(1024, 1, 1, 1024, zero="zero3", itemsize=4), Machine()).bytes["parameters"]
    assert ours == json.loads(run.stdout)
