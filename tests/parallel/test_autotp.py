"""Models cut by `autotp` against themselves unsplit: outputs, gradients, state dicts, traffic; and what is not cut."""

import copy
import importlib.util
from collections.abc import Callable

import autotp_models as models
import pytest
import torch
from autotp_same import kinds, made, same_numbers
from torch import Tensor, nn
from worlds import run

from refimpl.comm.collectives import sent_in_all_reduce
from refimpl.comm.group import Group
from refimpl.model.gpt import GPT, GPTConfig
from refimpl.parallel.auto.partition import partition_plan
from refimpl.parallel.auto.regions import pattern
from refimpl.parallel.auto.report import Report
from refimpl.parallel.auto.trace import tensors
from refimpl.parallel.autotp import autotp
from refimpl.parallel.swap import whole_state_dict
from refimpl.parallel.tensor import ColumnParallelLinear, cuts

hf = pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers (the hf extra)")


def compare(names: list[str], then: Callable[..., None] | None = None) -> dict[str, Report]:
    """Cuts each model, and compares it with the whole; returns what its layers became."""
    group, found = Group.world(), {}
    for name in names:
        model, example = made(name)
        states = group.all_gather_object(torch.random.get_rng_state())
        found[name] = autotp(model, group, example)
        assert torch.equal(states[0], torch.random.get_rng_state())  # of rank 0 nothing is drawn; the others follow it
        same_numbers(model, made(name, rank=0)[0], example, group)
        if then is not None:
            then(model, example, found[name], group)
    return found


ATTENTION = {"q_proj": "columns", "k_proj": "columns", "v_proj": "columns", "o_proj": "rows"}
MLP = {"gate_proj": "columns", "up_proj": "columns", "down_proj": "rows"}
LLAMA = {"model.embed_tokens": "vocabulary", "lm_head": "columns"}
LLAMA |= {f"model.layers.*.self_attn.{name}": kind for name, kind in ATTENTION.items()}
LLAMA |= {f"model.layers.*.mlp.{name}": kind for name, kind in MLP.items()}
GPT2 = {"transformer.wte": "vocabulary", "transformer.wpe": "whole", "lm_head": "columns"}
GPT2 |= {f"transformer.h.*.{name}": "columns" for name in ("attn.c_attn", "mlp.c_fc")}
GPT2 |= {f"transformer.h.*.{name}.c_proj": "rows" for name in ("attn", "mlp")}
BERT = {f"bert.embeddings.{name}_embeddings": "whole" for name in ("position", "token_type")}
BERT |= {"bert.embeddings.word_embeddings": "vocabulary", "cls.predictions.decoder": "columns"}
BERT |= {"cls.predictions.transform.dense": "whole"}
BERT |= {f"bert.encoder.layer.*.attention.self.{name}": "columns" for name in ("query", "key", "value")}
BERT |= {f"bert.encoder.layer.*.{name}.dense": "rows" for name in ("attention.output", "output")}
BERT |= {"bert.encoder.layer.*.intermediate.dense": "columns"}


@hf
@pytest.mark.parametrize("ranks", [2, 4])
def test_transformers_families_compute_what_they_compute_whole(ranks: int) -> None:
    """At 4 ranks what 2 ranks do not show: one head a rank, and fewer heads of keys than ranks."""
    names = models.FAMILIES if ranks == 2 else ["llama_grouped", "gpt2", "bert", "t5"]
    results = run(compare, names, ranks=ranks, timeout=300)
    assert all(reports == results[0] for reports in results)
    found = {name: kinds(report) for name, report in results[0].items()}
    for name in {"llama", "llama_grouped", "llama_biased", "mistral", "qwen2", "qwen3"} & set(names):
        assert found[name] == LLAMA
        if ranks == 4 and name == "llama_grouped":
            assert results[0][name].details["model.layers.0.self_attn.k_proj"] == "2 units, each on 2 ranks"
    assert found["gpt2"] == GPT2
    assert found["bert"] == BERT
    for name in {"t5", "t5_gated", "neox"} & set(names):
        assert "whole" not in found[name].values()


def sums_travel(model: nn.Module, example: dict[str, Tensor], report: Report, group: Group) -> None:
    """A copied head's gradients between those who have it, the norm's between all."""
    outs = tensors(model(**example))
    group.ledger.reset()
    torch.autograd.backward([y.square().sum() for y in outs])
    sums = [(p, split.copies) for p, (split, _, _) in cuts(model).items() if split.copies > 1]
    assert len(sums) == 3 * 3, "the keys' weight and bias, the values' weight, in three blocks"
    sums += [(model.get_parameter(n), group.size) for n in report.cut.summed]
    sent = [sent_in_all_reduce(p.numel(), group.rank % size, size) * p.element_size() for p, size in sums]
    assert group.ledger.sent_bytes("tag")["tensor, whole parameters"] == sum(sent)


def test_fewer_heads_of_keys_than_ranks_are_on_several() -> None:
    heads = {"one_key": 1, "shared_keys": 2}
    reports, *others = run(compare, list(heads), sums_travel, ranks=4)
    assert all(reports == other for other in others)
    for name, units in heads.items():
        details, kind = reports[name].details, kinds(reports[name])
        assert details["stack.0.a.keys"] == details["stack.2.a.values"] == f"{units} units, each on {4 // units} ranks"
        assert {layer for layer, what in kind.items() if what == "whole"} == {"place"}


def with_a_mask(tokens: bool) -> set[str]:
    """Cut by an example without a mask, and compared with one. -> which numbers became a rank's part."""
    torch.manual_seed(0)
    model, whole = models.Masked(tokens), models.Masked(tokens)
    whole.load_state_dict(model.state_dict())
    ids = models.tokens()["ids"]
    report = autotp(model, Group.world(), {"input_ids": ids})
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    masks = [{"attention_mask": mask}] if tokens else []
    for more in [{}, *masks]:
        model.zero_grad()
        whole.zero_grad()
        same_numbers(model, whole, {"input_ids": ids, **more}, Group.world())
    return {attribute for _, attribute in report.cut.sizes}


def test_a_model_that_takes_a_mask_is_rehearsed_with_one() -> None:
    """An example without one does not show by what number keys are repeated with it; a mask of another kind is none."""
    assert run(with_a_mask, True) == [{"each"}] * 2
    assert run(with_a_mask, False) == [set()] * 2


def test_heads_of_keys_that_the_ranks_do_not_divide_are_whole_with_the_numbers() -> None:
    def check() -> str:
        model, example = made("shared_keys")
        return autotp(model, Group.world(), example).details["stack.0.a.keys"]

    says = "2 units cannot be dealt to 3 ranks, each of which needs one, nor 8 heads of queries in equal parts: use 2"
    assert run(check, ranks=3)[0] == f"{says} ranks"


@hf
def test_transformers_models_with_few_heads_of_keys() -> None:
    reports = run(compare, ["llama_one_key", "qwen3_few_keys"], ranks=4, timeout=300)[0]
    for report in reports.values():
        assert kinds(report) == LLAMA


@hf
def test_transformers_models_with_queries_and_few_keys_in_one_matrix() -> None:
    reports = run(compare, models.FUSED, ranks=4, timeout=300)[0]
    for name, report in reports.items():
        whole = {layer for layer, kind in kinds(report).items() if kind == "whole"}
        assert whole == ({"transformer.wpe"} if name == "bigcode" else set()), name


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_queries_and_few_keys_in_one_matrix(ranks: int) -> None:
    """2 heads of keys for 2 ranks are dealt out, for 4 copied, for 3 refused; one is on all."""
    names = ["joined", "joined_one", "slopes"]
    reports, *others = run(compare, names, ranks=ranks)
    assert all(reports == other for other in others)
    details = [reports[name].details["stack.0.a.all"] for name in names[:2]]
    copied, heads = ", each on 2 ranks", "nor 8 heads of queries in equal parts: use 2 ranks"
    says = {
        2: "2 units in each of (24, 6, 6)",
        3: f"2 units cannot be dealt to 3 ranks, each of which needs one, {heads}",
        4: f"8 units in 24 + 2 units in 6{copied} + 2 units in 6{copied}",
    }
    assert details[0] == says[ranks]
    assert details[1] == f"7 units in 21 + 1 units in 6, each on {ranks} ranks"
    sizes = {attribute for _, attribute in reports["joined"].cut.sizes}
    assert sizes == (set() if ranks == 3 else {"config.many", "few"})
    assert {attribute for _, attribute in reports["slopes"].cut.sizes} == {"n", "far="}
    assert "whole" not in kinds(reports["slopes"]).values()


STRANGERS = {  # which of its layers stay whole
    "stranger": {"place"},
    "beside": {"place"},
    "batched": {"place"},
    "normed": {"place", "stack.*.a.ask", "stack.*.a.tell", "stack.*.a.sum_up"},
    "alibi": {"place", "stack.*.a.ask", "stack.*.a.tell", "stack.*.a.sum_up"},
    "transposed": {"place", "stack.*.a.ask", "stack.*.a.tell", "stack.*.a.sum_up"},
    "leaky": {"place", "stack.*.a.ask", "stack.*.a.tell", "stack.*.a.sum_up"},
    "adapted": {"place", "stack.*.a.ask.down", "stack.*.a.sum_up.up"},
    "experts": {"place", "stack.*.a.gate"},
    "routed": {"place", "stack.*.a.gate"},
    "heard": {"ear.weight", "head"},
    "crossed": {"place", "stack.*.a.one", "stack.*.a.two"},
    "by_hand": {"words", "loose"},
    "torchs": {f"layers.*.{n}" for n in ("self_attn.in_proj_weight", "self_attn.out_proj", "linear1", "linear2")},
}


@pytest.mark.parametrize("ranks", [2, 3])
def test_models_by_strangers_compute_what_they_compute_whole(ranks: int) -> None:
    """At 3 ranks their 4 heads are dealt out unevenly."""
    names = list(STRANGERS) if ranks == 2 else ["stranger", "alibi", "adapted"]
    reports, *others = run(compare, names, ranks=ranks)
    assert all(reports == other for other in others)
    for name, whole in ((name, STRANGERS[name]) for name in names):
        assert {layer for layer, kind in kinds(reports[name]).items() if kind == "whole"} == whole, name
    if ranks == 2:
        says(reports)


def says(reports: dict[str, Report]) -> None:
    """What was done, and why not."""
    table = str(reports["stranger"])
    assert "stack.*.a.tell      3 x  columns     4 units in each of (24, 24)" in table
    assert "stack.*.a.total          divided" in table
    assert reports["stranger"].cut.sizes.keys() == {
        (f"stack.{block}.a", name) for block in range(3) for name in ("n", "total")
    }
    why = {name: report.details for name, report in reports.items()}
    assert why["stranger"]["place"] == "of a Stranger, which is no plain linear layer or embedding"
    assert why["alibi"]["stack.0.a.ask"] == "the gradient of stack.0.a.ask.weight is no part of the whole's (n divided)"
    assert why["leaky"]["stack.0.a.sum_up"].startswith("what feeds it feeds other layers too: ")
    assert "does not fall into equal runs of features" in why["transposed"]["stack.0.a.ask"]
    drops = "its dropout of [2, 6, 24], whole [2, 6, 24], stands between a column and a row layer: "
    assert why["crossed"]["stack.0.a.one"] == drops + "ranks would draw wrong numbers"
    assert why["by_hand"]["words"].startswith("the model's output is not the whole's: [[2, 6, 15]] for [[2, 6, 29]]")
    assert why["by_hand"]["loose"] == "the example does not call it"
    assert why["torchs"]["layers.0.self_attn.in_proj_weight"].startswith("of a MultiheadAttention")


def own(dropout: float) -> list[Tensor]:
    """This project's GPT, and a model with dropout in training: all ranks must agree on what is whole."""
    group, config = Group.world(), GPTConfig(vocab=37, context=12, width=40, layers=2, heads=5)
    torch.manual_seed(0)
    model = GPT(config)
    whole = copy.deepcopy(model)
    example = torch.arange(24).view(2, 12)
    report = autotp(model, group, example)
    assert [name for name, kind in report.kinds.items() if kind == "whole"] == ["wpe"]
    same_numbers(model, whole, {"tokens": example}, group)
    model.zero_grad()
    gathered = whole_state_dict(model)
    assert all(torch.equal(x, gathered[name]) for name, x in whole.state_dict().items())
    group.ledger.reset()
    model(example, example).backward()
    layer = 4 * config.layers  # and one sum of the embedding, one of the head's input; the logits are gathered
    assert group.ledger.calls() == {"all_reduce": layer + 2, "all_gather": 1}
    torch.manual_seed(5 + group.rank)
    noisy = models.Stranger(lambda: models.Look(24, 4, dropout), dropout)
    autotp(noisy, group, models.tokens())
    said = noisy(**models.tokens())["said"][0]
    said.square().sum().backward()
    return [said.detach(), torch.rand(2), *(p.grad for p in noisy.parameters() if p not in cuts(noisy))]


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_gpt_and_a_model_with_dropout_in_training(ranks: int) -> None:
    first, *others = run(own, 0.3, ranks=ranks)
    assert len(first) > 10
    assert all(map(torch.equal, first, others[0]))
    assert not torch.equal(first[0], run(own, 0.0, ranks=ranks)[0][0])


def by_config() -> None:
    """DeepSpeed's partition_config: patterns are the user's, units and numbers are found, a wrong plan is an error."""
    group = Group.world()
    column, row = {"partition_type": "column"}, {"partition_type": "row"}
    specs = [
        {"patterns": [r".*\.2\.a\."], "partition_type": "skip"},
        {"patterns": [r".*\.2\.a\.ask"], **row},  # an earlier one has it
        {"patterns": [r"stack\.\d\.a\.ask\.weight$"], **column},
        {"patterns": [r".*\.tell\.weight$"], **column, "shape": [2, -1]},
        {"patterns": [r".*\.sum_up\.weight$", r".*two"], **row},
        {"patterns": [r".*one"], **column, "model_types": ["other"]},
        {"patterns": [r".*one\.weight"], **column},
        {"patterns": ["speak"], **column, "gather_output": True},
    ]
    model, example = made("stranger")
    plan = partition_plan(model, {"layer_specs": specs, "use_default_specs": False})
    assert set(plan) == {f"stack.{i}.{n}" for i in range(2) for n in ("a.ask", "a.tell", "a.sum_up")} | {
        *(f"stack.{i}.b.{n}" for i in range(3) for n in ("one", "two")), "speak",
    }  # fmt: skip
    report = autotp(model, group, example, plan=plan)
    assert {report.kinds[f"stack.2.a.{name}"] for name in ("ask", "tell", "sum_up")} == {"whole"}
    assert report.kinds["sight"] == "vocabulary"  # tied to the head
    assert ("stack.1.a", "n") in report.cut.sizes
    same_numbers(model, made("stranger", rank=0)[0], example, group)
    model, _ = made("stranger")
    for wrong, says in (
        ([*specs[:4]], "plan: stack.0.a.ask, stack.0.a.tell cannot be cut so: its forward does not fit a part, "),
        ([specs[4] | column], "plan: .*sum_up.* cannot be cut so"),
        (
            [{"patterns": [r".*\.q_proj"], **column}],
            "no layer matches layer_specs.0. .*q_proj.*layers are sight, ",
        ),
        (
            [{"patterns": ["a"], "partition_kind": "row"}],
            "partition_kind is no key of it; its keys are .*_type",
        ),
        ([{"patterns": ["a"], "partition_type": "both"}], "partition_type is 'both': it must be column, row or skip"),
        ([{"patterns": ["a"], **row, "shape": [2, -1]}], "only a column's outputs have blocks"),
        ([{"patterns": ["a"], **column, "shape": [2, [1, 1]]}], r"shape \[2, \[1, 1\]\]: it must be \[3, -1\], three"),
        ([{"patterns": ["a"], **column, "shape": [[8, 0], -1]}], r"it must be \[3, -1\], three equal blocks, or"),
        ([{"patterns": "speak"}], r"layer_specs\[0\]: patterns is 'speak': it must be a list"),
        ([{"patterns": ["*one"]}], r"layer_specs\[0\] .*'\*one' is no regular expression: nothing to repeat"),
        ([{"patterns": ["stack"], "model_types": "llama"}], "model_types is 'llama': it must be a list"),
        (["stack"], r"layer_specs\[0\] is 'stack': it must be an object"),
    ):
        with pytest.raises(ValueError, match=says):
            autotp(model, group, example, plan=partition_plan(model, {"layer_specs": wrong}))
    with pytest.raises(ValueError, match=r"strict_mode, and no layer_specs match stack.0.b.one.weight"):
        partition_plan(model, {"layer_specs": specs[:5], "strict_mode": True})
    assert all(type(module) is not ColumnParallelLinear for module in model.modules())


def test_deepspeeds_partition_config() -> None:
    run(by_config, ranks=2)


class Byte(nn.Linear):
    """A layer whose weight is quantised."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width, bias=False)
        self.register_buffer("scale", torch.full((width, 1), 0.02))
        self.weight = nn.Parameter(torch.randint(-127, 128, (width, width), dtype=torch.int8), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight.to(x.dtype) * self.scale)


def quantised() -> None:
    """Its layers stay whole, and the others are cut around them."""
    group, (model, example) = Group.world(), made("stranger", rank=0)
    for module in model.modules():
        for name, child in module.named_children():
            if name == "sum_up":
                setattr(module, name, Byte(child.in_features))
    whole = copy.deepcopy(model)
    report = autotp(model, group, example)
    said = {pattern(name): words for name, words in report.details.items()}
    assert said["stack.*.a.sum_up.weight"] == "of torch.int8: what is quantised is not cut"
    assert kinds(report)["stack.*.b.two"] == "rows"
    same_numbers(model, whole, example, group)
    specs = [{"patterns": [".*sum_up.*"], "partition_type": "row"}]
    with pytest.raises(ValueError, match=r"sum_up.*; stack.0.a.sum_up.weight is of torch.int8: what is quantised"):
        partition_plan(whole, {"layer_specs": specs})


@pytest.mark.parametrize("ranks", [2, 3])
def test_what_is_quantised_stays_whole_and_is_named(ranks: int) -> None:
    run(quantised, ranks=ranks)


class Unmaskable(nn.Module):
    """What ProphetNet says where a token is masked: no numbers. Without a mask it is a model like others."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.up, self.down = nn.Embedding(16, 8), nn.Linear(8, 12), nn.Linear(12, 8)
        self.dummy_inputs = {"input_ids": torch.arange(10).view(2, 5)}

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        out: Tensor = self.down(self.up(self.embed(input_ids)).tanh())
        return out if attention_mask is None else out / attention_mask[..., None]


def unmaskable() -> None:
    group, model, whole = Group.world(), Unmaskable(), Unmaskable()
    assert kinds(autotp(model, group)) == {"embed": "columns", "up": "rows", "down": "whole"}
    same_numbers(model, whole, whole.dummy_inputs, group)


def test_a_model_that_gives_no_numbers_with_a_mask_is_rehearsed_without() -> None:
    run(unmaskable, ranks=2)


def refused() -> None:
    group = Group.world()
    model, example = made("stranger", rank=0)
    with pytest.raises(ValueError, match="Sequential has no dummy_inputs, and no guess at its arguments works: give"):
        autotp(nn.Sequential(nn.Conv1d(6, 4, 1), nn.Linear(5, 3)), group)
    images = nn.Sequential(nn.Conv1d(6, 4, 1), nn.Linear(5, 3))
    images.dummy_inputs = {"input_ids": torch.zeros(2, 3, dtype=torch.int64)}  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"Sequential cannot be called with its dummy_inputs \(TypeError: .*input_ids"):
        autotp(images, group)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    plain = nn.Sequential(nn.Linear(6, 4), nn.LayerNorm(4), nn.Linear(4, 3))
    with pytest.raises(ValueError, match=r"Sequential cannot be cut for 2 ranks: .*0: what 0 give 2 does not"):
        autotp(plain, group, torch.randn(3, 6))
    report = autotp(model, group, {"ids": example["ids"][:, :1]})  # one token: a softmax over one score has no slope
    assert report.kinds["stack.0.a.ask"] == "whole"
    assert report.kinds["stack.0.b.two"] == "rows"
    assert {name for name, p in model.named_parameters() if p.shape == before[name].shape} >= {"stack.0.a.ask.weight"}
    wide = models.Stranger(lambda: models.Look(24, 1))
    assert "does not fall into" in autotp(wide, group, example).details["stack.0.a.ask"]  # a single head


def test_what_autotp_cannot_do_is_refused_or_left_whole() -> None:
    run(refused, ranks=2)
