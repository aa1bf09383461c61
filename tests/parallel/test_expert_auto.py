"""Models that know nothing of ranks made expert-parallel by one call, against themselves whole; and what is refused."""

import copy
import importlib.util
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from worlds import run

from refimpl.comm.axes import Axes
from refimpl.comm.group import Group
from refimpl.model.gates import Routing
from refimpl.model.gpt import GPT, GPTConfig
from refimpl.model.moe import mixtures
from refimpl.parallel.expert.auto import autoep, expert_portions
from refimpl.parallel.expert.trying import Elsewhere

BOUND = 64 * torch.finfo(torch.float32).eps  # k additions in another order, and products with other rows beside them
hf = pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers (the hf extra)")
WIDTH, INNER = 6, 10


class Stacked(nn.Module):
    """As transformers 5 has them, with biases and tensors whose first dimension is not the experts' alone."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.num_experts = count
        self.up = nn.Parameter(torch.randn(count * INNER, WIDTH))
        self.down = nn.Parameter(torch.randn(count, INNER, WIDTH))
        self.bias = nn.Parameter(torch.randn(count, WIDTH))

    def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(hidden)
        for e in range(self.num_experts):
            token, place = (chosen == e).nonzero(as_tuple=True)
            if len(token):
                up = self.up.view(self.num_experts, INNER, WIDTH)[e]
                rows = F.silu(hidden[token] @ up.T) @ self.down[e] + self.bias[e]
                out.index_add_(0, token, rows * weights[token, place, None])
        return out


class Listed(nn.ModuleDict):
    """One module an expert, by name."""

    def __init__(self, count: int) -> None:
        super().__init__({f"expert_{i}": nn.Linear(WIDTH, WIDTH) for i in range(count)})
        self.num_experts = count

    def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(hidden)
        for e in chosen.unique().tolist():
            token, place = (chosen == e).nonzero(as_tuple=True)
            out = out.index_add(0, token, self[f"expert_{e}"](hidden[token]) * weights[token, place, None])
        return out


class Squared(Stacked):
    """Weights that do not weight the answers."""

    def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        return super().forward(hidden, chosen, weights.square())


class Together(Stacked):
    """Every expert knows of the others."""

    def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        return super().forward(hidden, chosen, weights) + self.bias.mean(0) * weights.sum(1, keepdim=True)


class Masked(Stacked):
    def forward(self, rows: Tensor, mask: Tensor, weights: Tensor, more: Tensor) -> Tensor:  # type: ignore[override]
        return rows


class Normed(Stacked):
    """A norm that all experts share, as Muse Spark's."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.norm = nn.LayerNorm(WIDTH)


class Net(nn.Module):
    """A router that sends nothing to the last expert, and a shared MLP, whose name has experts in it."""

    def __init__(self, kind: type[nn.Module], count: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.router = nn.Linear(WIDTH, count)
        self.experts = kind(count)
        self.shared_experts = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("offset", torch.randn(WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = (self.first(x) + self.offset).view(-1, WIDTH)
        logits = self.router(x)
        weights, chosen = logits[:, :-1].softmax(1).topk(2, 1)
        return self.shared_experts(x) + self.experts(x, chosen, weights=weights), logits


def made(kind: type[nn.Module], seed: int) -> Net:
    torch.manual_seed(seed)
    return Net(kind)


def dealt_out(kind: type[nn.Module], ep: int) -> tuple[list[str], dict[str, tuple[int, int, int, int]]]:
    """Every rank begins with other weights and takes rank 0's; then outputs and all gradients are the whole model's."""
    world = Group.world()
    axes = Axes.of_data(world).with_experts(ep)
    model, whole = made(kind, world.rank), made(kind, 0)
    before = torch.random.get_rng_state()
    assert autoep(model, axes) is model
    assert torch.equal(torch.random.get_rng_state(), before)
    assert isinstance(model.experts, kind)
    assert all(p.untyped_storage().nbytes() == p.nbytes for p in model.experts.parameters())  # no view of the others'
    for other in (copy.deepcopy(model), model):
        torch.manual_seed(7 + world.rank)
        x = torch.randn(2 + 3 * world.rank, WIDTH, requires_grad=True)
        output, logits = other(x)
        expected, theirs = whole(x)
        assert torch.equal(logits, theirs)
        assert (output - expected).norm() <= BOUND * expected.norm()
        (mine,) = torch.autograd.grad(output.square().sum(), x, retain_graph=True)
        (wanted,) = torch.autograd.grad(expected.square().sum(), x, retain_graph=True)
        assert (mine - wanted).norm() <= BOUND * wanted.norm()
    output.square().sum().backward()
    expected.square().sum().backward()
    portions = expert_portions(other)
    wholes = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in whole.named_parameters()}
    for name, grad in wholes.items():
        if name.startswith("experts."):  # the sum over the tokens of the ranks that share the experts
            axes.expert.all_reduce(grad)
    for name, p in other.named_parameters():
        full = wholes[name]
        assert p.grad is not None
        if name.startswith("experts."):
            assert (p.allreduce, p.group_name) == (False, f"ep_size_{ep}")
            if p in portions:
                _, first, count, total = portions[p]
                assert total == len(full)
                full = full[first : first + count]
        assert (p.grad - full).norm() <= BOUND * full.norm() + 1e-12, name
    return list(other.state_dict()), {name: portions[p] for name, p in other.named_parameters() if p in portions}


@pytest.mark.parametrize(("ep", "ranks"), [(2, 2), (2, 4), (4, 4)])
def test_stacked(ep: int, ranks: int) -> None:
    for rank, (_, portions) in enumerate(run(dealt_out, Stacked, ep, ranks=ranks)):
        each = 4 // ep
        first = rank % ep * each
        assert portions["experts.down"] == (0, first, each, 4)
        assert portions["experts.up"] == (0, first * INNER, each * INNER, 4 * INNER)


def test_listed() -> None:
    names = [names for names, portions in run(dealt_out, Listed, 2, ranks=2) if not portions]
    assert next(name for name in names[1] if "experts.e" in name) == "experts.expert_2.weight"
    assert len(names[0]) == len(names[1]) == 11


def test_alone() -> None:
    model, whole = made(Listed, 0), made(Listed, 0)
    x = torch.randn(5, WIDTH)
    autoep(model, Axes.of_data(Group(None)))
    torch.testing.assert_close(model(x), whole(x))
    assert not any(isinstance(module, Elsewhere) for module in model.modules())


def test_our_own() -> None:
    torch.manual_seed(0)
    model = mixtures(GPT(GPTConfig(vocab=11, context=8, width=8, layers=1, heads=2)), 4, Routing(k=2))
    whole, tokens = copy.deepcopy(model), torch.randint(11, (2, 8))
    assert torch.equal(autoep(model, Axes.of_data(Group(None)))(tokens), whole(tokens))


def test_refused() -> None:
    """By the module's name, and before anything is changed."""
    axes = Axes.of_data(Group(None))
    for kind, why in [
        (Squared, "does not answer with the weighted sum"), (Together, "does not answer|otherwise without"),
        (Normed, r"norm.weight \(6,\) is not one part for each of 4 experts: such experts cannot be dealt out"),
        (Masked, r"its forward takes \(rows, mask, weights, more\), and not tokens"),
    ]:  # fmt: skip
        model = nn.ModuleDict({"deep": made(kind, 0)})
        if kind is Together:
            continue  # with all experts on one rank there is nothing to see; below
        with pytest.raises(ValueError, match=rf"deep\.experts \({kind.__name__}\): .*{why}"):
            autoep(model, axes)
        assert type(model["deep"].experts) is kind
    with pytest.raises(ValueError, match="Linear has no mixture of experts"):
        autoep(nn.Linear(2, 2), axes)


def refused_on_ranks() -> list[str]:
    found = []
    for model in (made(Together, 0), Net(Stacked, 3)):
        with pytest.raises(ValueError, match="experts") as error:
            autoep(model, Axes.of_data(Group.world()).with_experts(2))
        found.append(str(error.value))
    return found


def test_refused_on_ranks() -> None:
    for together, three in run(refused_on_ranks, ranks=2):
        assert "experts (Together): its experts answer otherwise without those of other ranks" in together
        assert "3 experts cannot be dealt out to 2 ranks equally" in three


def tiny(kind: str) -> Any:
    """One of transformers' models, small, with mixtures in all layers."""
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    sizes: dict[str, Any] = {
        "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64, "num_experts_per_tok": 2,
        "max_position_embeddings": 64, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4,
        "shared_expert_intermediate_size": 24, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
        "kv_channels": 8, "d_model": 32, "d_ff": 48, "d_kv": 8, "num_heads": 4, "num_layers": 2,
        "num_decoder_layers": 2, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1, "ffn_hidden_size": 48,
        "decoder_start_token_id": 0,
    }  # fmt: skip
    if kind == "deepseek_v3":
        sizes |= {"n_group": 2, "topk_group": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8}
        sizes |= {"qk_nope_head_dim": 8, "v_head_dim": 8, "first_k_dense_replace": 0, "num_key_value_heads": 4}
    config = CONFIG_MAPPING[kind]()
    known = config.to_dict()
    always = ("num_experts_per_tok", "decoder_start_token_id")
    sizes = {name: value for name, value in sizes.items() if name in known or name in always}
    layers = {"layer_types": known["layer_types"][:2]} if known.get("layer_types") else {}
    torch.manual_seed(0)
    made = AutoModelForSeq2SeqLM if kind == "switch_transformers" else AutoModelForCausalLM
    return made.from_config(type(config)(**sizes, **layers)).eval()


def like_whole(kinds: list[str]) -> None:
    """Logits, the load-balance loss, gradients of embeddings, and text, of each model on 2 ranks."""
    world = Group.world()
    for kind in kinds:
        model, whole = tiny(kind), tiny(kind)
        autoep(model, Axes.of_data(world).with_experts(2))
        torch.manual_seed(world.rank)
        tokens = torch.randint(3, 64, (2, 6 + world.rank))
        options = {"output_router_logits": True} if hasattr(model.config, "output_router_logits") else {}
        mine, expected = (m(input_ids=tokens, labels=tokens, **options) for m in (model, whole))
        assert (mine.logits - expected.logits).norm() <= BOUND * expected.logits.norm(), kind
        if options:
            torch.testing.assert_close(mine.aux_loss, expected.aux_loss)
        mine.loss.backward()
        expected.loss.backward()
        torch.testing.assert_close(*(m.get_input_embeddings().weight.grad for m in (model, whole)))
        texts = [m.generate(tokens[:, :5], max_new_tokens=4, do_sample=False) for m in (model, whole)]
        assert torch.equal(*texts), kind


@hf
def test_transformers() -> None:
    """Mixtures of tokens, of sorted rows (JetMoe), in slots (Llama 4), and a list (Switch)."""
    kinds = ["mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v3", "olmoe", "gpt_oss", "granitemoe", "granitemoeshared"]
    run(like_whole, [*kinds, "jetmoe", "llama4_text", "switch_transformers"], ranks=2)


@hf
def test_transformers_refused() -> None:
    """Its experts cannot be asked for one expert's answer, as they squeeze a single route away."""
    said = r"LongcatFlashExperts\): no rows .* with one route each, .* \(ValueError: not enough values to unpack"
    with pytest.raises(ValueError, match=said):
        autoep(tiny("longcat_flash"), Axes.of_data(Group(None)))
