"""Models that `autotp` has never seen: transformers' families with tiny random weights, and strangers' own."""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB = 29
COMMON = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
COMMON |= {"num_attention_heads": 4, "max_position_embeddings": 64}
EIGHT_HEADS = COMMON | {"num_attention_heads": 8}


def hf(name: str, **sizes: Any) -> nn.Module:
    """transformers' model of this name, with the configuration that belongs to it."""
    import transformers

    kind = getattr(transformers, name)
    model: nn.Module = kind(kind.config_class(**sizes))
    return model


llama = partial(hf, "LlamaForCausalLM", **COMMON)
llama_grouped = partial(llama, num_key_value_heads=2)
llama_biased = partial(llama, attention_bias=True, mlp_bias=True, tie_word_embeddings=True)
llama_one_key = partial(llama, num_key_value_heads=1, attention_bias=True)
mistral = partial(hf, "MistralForCausalLM", **COMMON, num_key_value_heads=4, head_dim=12, sliding_window=4)
qwen2 = partial(hf, "Qwen2ForCausalLM", **COMMON, num_key_value_heads=4, tie_word_embeddings=True)
# A norm over the features of each head: its weights are whole, their gradients parts.
qwen3 = partial(hf, "Qwen3ForCausalLM", **COMMON, num_key_value_heads=4, head_dim=8)
qwen3_few_keys = partial(hf, "Qwen3ForCausalLM", **EIGHT_HEADS, num_key_value_heads=2, head_dim=8)
gpt2 = partial(hf, "GPT2LMHeadModel", vocab_size=VOCAB, n_positions=64, n_embd=32, n_layer=2, n_head=4)
bert = partial(hf, "BertForMaskedLM", **COMMON)
T5 = {"vocab_size": VOCAB, "d_model": 32, "d_kv": 6, "d_ff": 48, "num_layers": 2, "num_heads": 4}
t5 = partial(hf, "T5ForConditionalGeneration", **T5, decoder_start_token_id=0)
t5_gated = partial(t5, feed_forward_proj="gated-gelu", tie_word_embeddings=False)
# q, k and v of a head side by side; attention and MLP added to the same input.
neox = partial(hf, "GPTNeoXForCausalLM", **COMMON)
# Puts the least number of the scores' dtype into an fp32 tensor, which fp64's does not fit.
XGLM = {"d_model": 32, "ffn_dim": 48, "num_layers": 2, "attention_heads": 4, "max_position_embeddings": 64}
xglm = partial(hf, "XGLMForCausalLM", vocab_size=VOCAB, dropout=0.0, attention_dropout=0.0, **XGLM)
FAMILIES = [
    "llama",
    "llama_grouped",
    "llama_biased",
    "mistral",
    "qwen2",
    "qwen3",
    "gpt2",
    "bert",
    "t5",
    "t5_gated",
    "neox",
    "xglm",
]

# One matrix for q, k and v, one for gate and up; the forward asks the configuration for the number of heads.
phi3 = partial(hf, "Phi3ForCausalLM", **EIGHT_HEADS, num_key_value_heads=2, pad_token_id=0)
FALCON = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 8}
falcon = partial(hf, "FalconForCausalLM", **FALCON, alibi=False)
# The heads of a group side by side: its queries, its key, its value.
falcon_groups = partial(falcon, new_decoder_architecture=True, num_kv_heads=4)
bigcode = partial(hf, "GPTBigCodeForCausalLM", vocab_size=VOCAB, n_positions=64, n_embd=32, n_layer=2, n_head=8)
bloom = partial(hf, "BloomForCausalLM", vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=8)
FUSED = ["phi3", "falcon", "falcon_groups", "bigcode", "bloom"]


def tokens() -> dict[str, Tensor]:
    return {"ids": torch.randint(VOCAB, (2, 6), generator=torch.Generator().manual_seed(9))}


class Look(nn.Module):
    """Attention by hand: numbers of its own, names that say nothing, one matrix for keys and values."""

    def __init__(self, wide: int, n: int, drop: float = 0.0) -> None:
        super().__init__()
        self.n, self.each, self.total, self.drop = n, wide // n, wide, drop
        self.ask, self.tell, self.sum_up = nn.Linear(wide, wide), nn.Linear(wide, 2 * wide), nn.Linear(wide, wide)

    def forward(self, x: Tensor) -> Tensor:
        b, t = x.shape[:2]
        q = self.ask(x).view(b, t, self.n, self.each).permute(0, 2, 1, 3)
        k, v = (y.view(b, t, self.n, self.each).permute(0, 2, 1, 3) for y in self.tell(x).split(self.total, 2))
        scores = (q @ k.mT / self.each**0.5).softmax(-1)
        mixed = F.dropout(scores, self.drop, self.training) @ v
        return self.sum_up(mixed.permute(0, 2, 1, 3).reshape(b, t, self.total))


class Batched(Look):
    """What it says passes a BatchNorm: each run in training changes what the next evaluation gives."""

    def __init__(self) -> None:
        super().__init__(24, 4)
        self.norm = nn.BatchNorm1d(24)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(super().forward(x).mT).mT


class Share(nn.Module):
    """Grouped queries by hand: `few` heads of keys for `many` of queries, and a norm over a head of keys."""

    def __init__(self, wide: int, many: int, few: int) -> None:
        super().__init__()
        self.many, self.few, self.each = many, few, many // few
        self.size = wide // many
        self.ask, self.sum_up = nn.Linear(wide, wide), nn.Linear(wide, wide)
        self.keys, self.values = nn.Linear(wide, few * self.size), nn.Linear(wide, few * self.size, bias=False)
        self.even = nn.LayerNorm(self.size)

    def forward(self, x: Tensor) -> Tensor:
        b, t = x.shape[:2]
        q = self.ask(x).view(b, t, self.many, self.size).transpose(1, 2)
        k = self.even(self.keys(x).view(b, t, self.few, self.size)).transpose(1, 2)
        v = self.values(x).view(b, t, self.few, self.size).transpose(1, 2)
        k, v = (y.repeat_interleave(self.each, 1) for y in (k, v))
        mixed = (q @ k.mT / self.size**0.5).softmax(-1) @ v
        return self.sum_up(mixed.transpose(1, 2).reshape(b, t, -1))


class Repeat(Share):
    """As transformers' attention: heads of keys are repeated by a number of its own with a mask, and not without."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        b, t = x.shape[:2]
        q = self.ask(x).view(b, t, -1, self.size).transpose(1, 2)
        k, v = (layer(x).view(b, t, -1, self.size).transpose(1, 2) for layer in (self.keys, self.values))
        if mask is not None:
            k, v = (y.repeat_interleave(self.each, 1) for y in (k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=mask is None)
        return self.sum_up(mixed.transpose(1, 2).reshape(b, t, -1))


class Joined(nn.Module):
    """Heads of queries and fewer of keys and values in one matrix, one after the other, as ChatGLM and Phi-3 have them;
    numbers in a configuration that all layers share."""

    def __init__(self, config: SimpleNamespace) -> None:
        super().__init__()
        self.config, self.few, size = config, config.few, config.size
        self.all, self.sum_up = nn.Linear(24, (config.many + 2 * config.few) * size), nn.Linear(config.many * size, 24)

    def forward(self, x: Tensor) -> Tensor:
        many, size = self.config.many, self.config.size
        heads = self.all(x).split([many * size, self.few * size, self.few * size], -1)
        q, k, v = (y.unflatten(-1, (-1, size)).transpose(1, 2) for y in heads)
        k, v = (y.repeat_interleave(many // self.few, 1) for y in (k, v))
        return self.sum_up(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Think(nn.Module):
    """Squeezed after, not before: x + norm(...); dropout between its matrices."""

    def __init__(self, wide: int, drop: float = 0.0) -> None:
        super().__init__()
        self.one, self.two, self.lost = nn.Linear(wide, 40), nn.Linear(40, wide, bias=False), nn.Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        y = self.two(self.lost(F.relu(self.one(x)).square()))
        y += 1  # in place
        return y


class Stranger(nn.Module):
    """A transformer in which nothing is called as elsewhere; two of its four blocks are the same object."""

    def __init__(self, look: Callable[[], nn.Module] = lambda: Look(24, 4), drop: float = 0.0) -> None:
        super().__init__()
        self.sight, self.place = nn.Embedding(VOCAB, 24), nn.Parameter(torch.randn(16, 24))
        blocks = [nn.ModuleDict({"a": look(), "b": Think(24, drop), "n": nn.LayerNorm(24)}) for _ in range(3)]
        self.stack = nn.ModuleList([*blocks, blocks[0]])
        self.speak = nn.Linear(24, VOCAB)
        self.speak.weight = self.sight.weight

    def forward(self, ids: Tensor) -> dict[str, Any]:
        x = self.sight(ids) * 24**0.5 + self.place[: ids.shape[1]]
        for block in self.stack:
            x = x + block["a"](block["n"](x))
            x = block["n"](x + block["b"](x))
        return {"said": [self.speak(x)], "length": ids.shape[1]}


class Masked(Stranger):
    """Takes a mask [B, T] of tokens; or, if not `tokens`, one that is already attention's, [B, 1, T, T]."""

    def __init__(self, tokens: bool) -> None:
        super().__init__(lambda: Repeat(24, 8, 1))
        self.tokens = tokens

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> dict[str, Any]:
        x = self.sight(input_ids) + self.place[: input_ids.shape[1]]
        if attention_mask is not None and self.tokens:
            attention_mask = attention_mask[:, None, None].bool()
        for block in self.stack:
            x = x + block["a"](block["n"](x), attention_mask)
            x = block["n"](x + block["b"](x))
        return {"said": [self.speak(x)]}


class Beside(Stranger):
    """Attention and MLP of the same input, added one after the other."""

    def forward(self, ids: Tensor) -> dict[str, Any]:
        x = self.sight(ids) * 24**0.5 + self.place[: ids.shape[1]]
        for block in self.stack:
            y = block["n"](x)
            x = x + block["a"](y) + block["b"](y)
        return {"said": [self.speak(x)], "length": ids.shape[1]}


class Normed(Look):
    """Norms over all heads' features at once, as OLMo 2 has them: no two heads are independent."""

    def __init__(self) -> None:
        super().__init__(24, 4)
        self.norm = nn.LayerNorm(24)

    def forward(self, x: Tensor) -> Tensor:
        b, t = x.shape[:2]
        q = self.norm(self.ask(x)).view(b, t, self.n, self.each).transpose(1, 2)
        k, v = (y.view(b, t, self.n, self.each).transpose(1, 2) for y in self.tell(x).split(self.total, 2))
        return self.sum_up(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Alibi(Look):
    """A slope a head, a buffer that no attribute can divide; and a temperature a head, a parameter."""

    def __init__(self) -> None:
        super().__init__(24, 4)
        self.register_buffer("slope", 2.0 ** -torch.arange(4.0))
        self.heat = nn.Parameter(torch.rand(1) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        t = x.shape[1]
        q = self.ask(x).unflatten(-1, (-1, self.each)).transpose(1, 2)
        k, v = (y.unflatten(-1, (-1, self.each)).transpose(1, 2) for y in self.tell(x).chunk(2, -1))
        far = torch.arange(t).view(1, 1, 1, t) * self.slope.view(1, -1, 1, 1)[:, : q.shape[1]]
        return self.sum_up(((q @ k.mT * self.heat + far).softmax(-1) @ v).transpose(1, 2).flatten(2))


class Sloped(Look):
    """A slope a head that the model around hands to each layer by keyword, as BLOOM and MPT do."""

    def forward(self, x: Tensor, far: Tensor) -> Tensor:
        b, t = x.shape[:2]
        q = self.ask(x).view(b, t, self.n, self.each).transpose(1, 2).flatten(0, 1)
        k, v = (y.reshape(b, t, self.n, self.each).transpose(1, 2).flatten(0, 1) for y in self.tell(x).chunk(2, -1))
        y = torch.baddbmm(far, q, k.mT).softmax(-1) @ v
        return self.sum_up(y.view(b, self.n, t, self.each).transpose(1, 2).flatten(2))


class Slopes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.say = nn.Embedding(VOCAB, 24), nn.Linear(24, VOCAB)
        self.looks = nn.ModuleList(Sloped(24, 4) for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        slopes = 2.0 ** -torch.arange(4.0, device=x.device, dtype=x.dtype)
        far = torch.arange(ids.shape[1], dtype=x.dtype) * slopes.repeat(len(ids)).view(-1, 1, 1)  # [B n, 1, T]
        for look in self.looks:
            x = x + look(x, far=far)
        return self.say(x)


class Transposed(Look):
    """Features of all heads side by side: a head's are every fourth."""

    def forward(self, x: Tensor) -> Tensor:
        q = self.ask(x).unflatten(-1, (self.each, -1)).permute(0, 3, 1, 2)
        k, v = (y.unflatten(-1, (self.each, -1)).permute(0, 3, 1, 2) for y in self.tell(x).chunk(2, -1))
        return self.sum_up(F.scaled_dot_product_attention(q, k, v).permute(0, 2, 3, 1).flatten(2))


class Lora(nn.Module):
    """A matrix with another of low rank beside it, as an adapter has it."""

    def __init__(self, ins: int, outs: int) -> None:
        super().__init__()
        self.base, self.down, self.up = (
            nn.Linear(ins, outs),
            nn.Linear(ins, 2, bias=False),
            nn.Linear(2, outs, bias=False),
        )
        self.base.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class Adapted(Look):
    def __init__(self) -> None:
        super().__init__(24, 4)
        self.ask, self.sum_up = Lora(24, 24), Lora(24, 24)


class Experts(nn.Module):
    """Each token goes through one of three MLPs."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(24, 3), nn.ModuleList(Think(24) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        weight, chosen = self.gate(x).softmax(-1).max(-1)
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            y[chosen == number] = expert(x[chosen == number]) * weight[chosen == number, None]
        return y


class Router(nn.Linear):
    """A linear layer by its class, which gives two tensors: Llama 4's."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        logits = super().forward(x)
        return logits.sigmoid(), logits


class Routed(Experts):
    def __init__(self) -> None:
        super().__init__()
        self.gate = Router(24, 3)

    def forward(self, x: Tensor) -> Tensor:
        weights, logits = self.gate(x)
        return sum(weights[..., i, None] * expert(x) for i, expert in enumerate(self.experts)) + 0 * logits.sum()


class Heard(nn.Module):
    """In training it wants a gradient of what it makes of its input: wav2vec 2.0."""

    def __init__(self) -> None:
        super().__init__()
        self.ear, self.block, self.head = nn.Conv1d(1, 24, 3), Think(24), nn.Linear(24, 5)
        self.dummy_inputs = {"waves": torch.linspace(-1, 1, 18).view(2, 9)}

    def forward(self, waves: Tensor) -> Tensor:
        x = waves[:, None]
        if self.training:
            x.requires_grad = True
        x = self.ear(x).transpose(1, 2)
        said: Tensor = self.head(x + self.block(x))
        return said


class Leaky(Look):
    """Hands on what lies between its layers: the size of its queries."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.ask(x).square().mean((-1), keepdim=True).sqrt()


class Crossed(Think):
    """Drops out of a whole tensor between its matrices: the ranks would drop different elements of it."""

    def forward(self, x: Tensor) -> Tensor:
        hidden, x = self.one(x), F.dropout(x, 0.3, self.training)
        return x + self.two(hidden.tanh())


class ByHand(nn.Module):
    """Uses its table as a matrix, and a layer's weights without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.block, self.loose = nn.Embedding(VOCAB, 24), Think(24), nn.Linear(24, 24)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        x = x + F.linear(x.tanh(), self.loose.weight)
        return (x + self.block(x)) @ self.words.weight.T


class Torchs(nn.Module):
    """torch's own encoder layer, which in evaluation takes its weights to a kernel of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCAB, 24)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(24, 4, 40, batch_first=True) for _ in range(2))
        self.head = nn.Linear(24, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


stranger, slopes, beside, heard, by_hand, torchs = Stranger, Slopes, Beside, Heard, ByHand, Torchs
shared_keys = partial(Stranger, lambda: Share(24, 8, 2))
one_key = partial(Stranger, lambda: Share(24, 4, 1))
normed, batched, alibi, adapted, experts, routed = (
    partial(Stranger, kind) for kind in (Normed, Batched, Alibi, Adapted, Experts, Routed)
)
transposed, leaky = (partial(Stranger, lambda kind=kind: kind(24, 4)) for kind in (Transposed, Leaky))
crossed = partial(Stranger, lambda: Crossed(24))


def joined(many: int = 8, few: int = 2) -> nn.Module:
    config = SimpleNamespace(many=many, few=few, size=3, eps=1e-5)
    return Stranger(lambda: Joined(config))


joined_one = partial(joined, 7, 1)  # ranks have unequal numbers of heads of queries


def stack() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 8), nn.GELU(), nn.Linear(8, 5))
