"""DeepSpeed's UlyssesSPAttentionHF: a transformers model over parts of sequences, against the whole in one process."""

import importlib.util
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from worlds import run

import refimpl.deepspeed as deepspeed
from refimpl import launch
from refimpl.comm.group import Group
from refimpl.deepspeed.runtime.sequence_parallel import parallel_state_sp
from refimpl.deepspeed.runtime.sequence_parallel.ulysses_sp import (
    UlyssesSPAttentionHF,
    UlyssesSPDataLoaderAdapter,
    attend,
)
from refimpl.parallel.context.loss import token_mean

pytestmark = pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers (hf)")
VOCAB, TOKENS, STEPS = 31, 12, 2


def llama(**more: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 6}
    config = LlamaConfig(vocab_size=VOCAB, num_key_value_heads=2, initializer_range=0.3, **sizes, **more)
    config._attn_implementation = "sdpa"
    return LlamaForCausalLM(config)


def text(feed: int) -> dict[str, Tensor]:
    """One sequence, most of whose first tokens do not count."""
    ids = torch.randint(VOCAB, (1, TOKENS), generator=torch.Generator().manual_seed(feed))
    labels = ids.clone()
    labels[:, : 5 + feed] = -100
    return {"input_ids": ids, "labels": labels, "position_ids": torch.arange(TOKENS)[None]}


def trained(sp: int, stage: int) -> tuple[list[float], list[float]]:
    """Losses and norms of `STEPS` steps of AdamW; with sp the batches come through the adapter."""
    model, rank = llama(), dist.get_rank()
    settings = {"micro_batch_size": 1, "seq_length_is_variable": True}
    mpu = UlyssesSPAttentionHF.register_with_transformers(model, "sdpa", sp, **settings)  # type: ignore[arg-type]
    assert (mpu is None) == (sp == 1)
    config = {
        "train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0.5, "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "eps": 1e-3}},
    }  # fmt: skip
    engine, *_ = deepspeed.initialize(model=model, config=config, mpu=mpu)
    batches: Any = [text(feed) for feed in range(STEPS)]
    if mpu is not None:
        mine = [text(feed) for feed in range(rank, STEPS, sp)]
        group = parallel_state_sp.get_sequence_parallel_group()
        batches = UlyssesSPDataLoaderAdapter(mine, rank, group, sp, "cpu")
        assert len(batches) == STEPS
    losses, norms = [], []
    for batch in batches:
        labels = batch.pop("shift_labels", None)
        labels = F.pad(batch["labels"][:, 1:], (0, 1), value=-100) if labels is None else labels
        batch.pop("labels", None)
        logits = engine(**batch, use_cache=False).logits.flatten(0, 1)
        loss = token_mean(
            F.cross_entropy(logits, labels.flatten(), reduction="sum"), (labels != -100).sum(), engine.group
        )
        engine.backward(loss)
        engine.step()
        group = Group.world()
        losses.append(sum(group.all_gather_object(loss.item())) / group.size)
        norms.append(engine.get_global_grad_norm() or 0.0)
    return losses, norms


def plain() -> Tensor:
    """What a model says in a job of its own."""
    logits: Tensor = llama()(**text(0)).logits
    return logits.detach()


@pytest.mark.parametrize(("ranks", "stage"), [(2, 1), (2, 3)])
def test_a_model_over_parts_of_its_sequences_trains_as_the_whole(ranks: int, stage: int) -> None:
    ((losses, norms),) = run(trained, 1, 0, ranks=1)
    for found, found_norms in run(trained, ranks, stage, ranks=ranks):
        assert found == pytest.approx(losses, rel=1e-4)
        assert found_norms == pytest.approx(norms, rel=1e-4)
    assert all(torch.equal(logits, plain()) for logits in run(plain, ranks=ranks)), "the next job's own attention"


def outputs(ranks: int) -> tuple[Tensor, Tensor]:
    """Of 3 ranks, which 2 heads of keys and 6 of queries are dealt out to; in evaluation each alone, if asked."""
    model, batch = llama().eval(), text(0)
    whole = model(batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits
    settings = {"micro_batch_size": 1, "disable_in_eval": True}
    UlyssesSPAttentionHF.register_with_transformers(model, "sdpa", ranks, **settings)  # type: ignore[arg-type]
    alone = model(batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits
    assert torch.equal(whole, alone)
    mine = {key: x.chunk(ranks, 1)[dist.get_rank()] for key, x in batch.items()}
    found = model.train()(mine["input_ids"], position_ids=mine["position_ids"], use_cache=False).logits
    assert model.model.layers[0].self_attn.num_key_value_groups == 3, "as it was"
    return found.detach(), whole.chunk(ranks, 1)[dist.get_rank()].detach()


def test_any_number_of_heads_and_evaluation_alone() -> None:
    for found, whole in run(outputs, 3, ranks=3):
        torch.testing.assert_close(found, whole, rtol=1e-4, atol=1e-5)


def by_a_kernel_of_the_hub(name: str) -> None:
    """The loader that would download it is one that registers sdpa by its name."""
    from transformers import modeling_flash_attention_utils as flash
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as attentions

    model = llama()
    model.config._attn_implementation = name
    with pytest.MonkeyPatch.context() as patch:
        load = lambda kernel: attentions.register(kernel, attentions["sdpa"])  # noqa: E731
        patch.setattr(flash, "lazy_import_flash_attention", load)
        UlyssesSPAttentionHF.register_with_transformers(model, name, 2, 1)
    assert attentions[name].func is attend


def test_a_kernel_of_the_hub_is_loaded_first() -> None:
    run(by_a_kernel_of_the_hub, "kernels-community/flash-attn2", ranks=2)


def refused(what: str) -> None:
    model, kind = llama(), "sdpa"
    if what == "another":
        kind = "flash_attention_2"
    elif what == "eager":
        model.config._attn_implementation = kind = "eager"
    elif what == "size":
        UlyssesSPAttentionHF.register_with_transformers(model, kind, 4, 1)
    UlyssesSPAttentionHF.register_with_transformers(model, kind, 2, 1)
    mine = {"input_ids": torch.zeros(1, 6, dtype=torch.int64), "use_cache": False}
    if what == "packed":
        model(**mine, position_ids=torch.tensor([[0, 1, 2, 0, 1, 2]]))
    batch = text(0)
    batch.pop("position_ids")
    next(iter(UlyssesSPDataLoaderAdapter([batch], 0, None, 2, "cpu")))


@pytest.mark.parametrize(
    ("what", "says"),
    [
        (
            "another",
            "core_attn_implementation='flash_attention_2' does not match model config attn_implementation='sdpa'",
        ),
        ("eager", "eager needs a mask of all tokens: use sdpa"),
        ("size", "sequence_parallel_size 4: it must be 2 or more, and divide 2 ranks"),
        ("packed", "position_ids begin anew, as of packed or left-padded sequences, which sdpa knows by a mask alone"),
        ("no positions", "a batch without position_ids"),
    ],
)
def test_what_is_refused(what: str, says: str) -> None:
    with pytest.raises(launch.RankError, match=says):
        run(refused, what)
