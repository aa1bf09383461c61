"""A small GPT: predict the next byte of a text from the bytes before it.

Pre-LN blocks, learned positions, causal attention, a GELU MLP four times as wide, and a head that is tied to the token
embedding, unless `tied` is False. With width w and L layers it has V w + C w + L (12 w^2 + 13 w) + 2 w parameters, and
when w is a multiple of 64 so is every tensor's number of elements (fused Adam then gives the same bits however the
tensors are cut).

Each submodule draws its own initial weights in its own constructor, so a context such as `zero.Init` can take them
away the moment they exist. Radford et al. 2019 (GPT-2), section 2.3.

    B   sequences in a batch
    T   tokens in a sequence, at most `context`
    C   width
    V   vocab
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

INIT_STD = 0.02


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a GPT. Defaults: 3.2 million parameters over bytes."""

    vocab: int = 256
    context: int = 128
    width: int = 256
    layers: int = 4
    heads: int = 4
    tied: bool = True  # the head and the token embedding are one parameter

    def __post_init__(self) -> None:
        for name in ("vocab", "context", "width", "layers", "heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: it must be at least 1")
        if self.width % self.heads:
            raise ValueError(f"width {self.width} does not divide into {self.heads} heads")

    @property
    def hidden_size(self) -> int:
        """The width, under the name that DeepSpeed's "auto" values look for."""
        return self.width

    @property
    def parameters(self) -> int:
        """Number of parameters of GPT(self); a tied head counts once."""
        w, tables = self.width, self.vocab * (1 if self.tied else 2) + self.context
        return tables * w + self.layers * (12 * w * w + 13 * w) + 2 * w


@cache
def native_low_precision(device: torch.device, dtype: torch.dtype = torch.bfloat16) -> bool:
    """Whether `device` has fast matrix kernels for `dtype` (torch.bfloat16 or torch.float16).

    On a CPU the question is whether oneDNN has one: yes for bf16 from AVX-512 (or Arm's bf16) on, for fp16 only with
    AVX512-FP16 or AMX-FP16. Without one torch falls back to a loop that is 20 to 80 times slower than fp32.
    """
    if device.type == "cuda":
        return dtype == torch.float16 or torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type != "cpu":
        return True
    if dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


class Linear(nn.Linear):
    """y = x W^T + b with normal initial weights; bf16 and fp16 stay usable where the CPU has no kernels for them."""

    def __init__(self, inputs: int, outputs: int, bias: bool = True, std: float = INIT_STD) -> None:
        self.std = std
        super().__init__(inputs, outputs, bias)  # calls reset_parameters

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., inputs] -> [..., outputs], in x's dtype."""
        return self.multiply(x, self.weight, self.bias)

    @staticmethod
    def multiply(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x [..., inputs], weight [outputs, inputs], bias [outputs] -> [..., outputs]."""
        if weight.dtype.itemsize >= 4 or native_low_precision(x.device, weight.dtype):
            return F.linear(x, weight, bias)
        # The weights are stored and sent in 16 bits; only the product is made in fp32, as native kernels accumulate.
        return F.linear(x.float(), weight.float(), None if bias is None else bias.float()).to(x.dtype)


class Embedding(nn.Embedding):
    """nn.Embedding with GPT-2's initial weights."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=INIT_STD)


class LayerNorm(nn.LayerNorm):
    """nn.LayerNorm; on a GPU by a kernel of ours, which is imported there alone, as triton is."""

    def forward(self, x: Tensor) -> Tensor:
        """x [..., C] -> [..., C], in x's dtype."""
        if not x.is_cuda:
            return super().forward(x)
        from refimpl.kernels.layer_norm import layer_norm

        return layer_norm(x, self.weight, self.bias, self.eps)


class Attention(nn.Module):
    """Causal self-attention: a token sees itself and what came before."""

    def __init__(self, config: GPTConfig, residual_std: float) -> None:
        super().__init__()
        self.head_width = config.width // config.heads
        self.qkv = Linear(config.width, 3 * config.width)
        self.out = Linear(config.width, config.width, std=residual_std)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, T, C] -> [B, T, C]."""
        qkv = self.qkv(x).unflatten(-1, (3, -1, self.head_width))  # [B, T, 3, heads, d]
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # 3 x [B, heads, T, d]
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # [B, heads, T, d]
        mixed: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return mixed


class AttentionBy(nn.Module):
    """`Attention` with the same two layers, and `attend(q, k, v)` between: [B, heads, T, d] each -> the same."""

    def __init__(self, plain: Attention, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.head_width, self.qkv, self.out, self.attend = plain.head_width, plain.qkv, plain.out, attend

    def forward(self, x: Tensor) -> Tensor:
        """x [B, T, C] -> [B, T, C]."""
        q, k, v = self.qkv(x).unflatten(-1, (3, -1, self.head_width)).permute(2, 0, 3, 1, 4)  # 3 x [B, heads, T, d]
        mixed: Tensor = self.out(self.attend(q, k, v).transpose(1, 2).flatten(2))
        return mixed


class MLP(nn.Module):
    """Two linear layers around a GELU, four times as wide in between."""

    def __init__(self, config: GPTConfig, residual_std: float) -> None:
        super().__init__()
        self.up = Linear(config.width, 4 * config.width)
        self.down = Linear(4 * config.width, config.width, std=residual_std)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, T, C] -> [B, T, C]."""
        y: Tensor = self.down(F.gelu(self.up(x), approximate="tanh"))
        return y


class Block(nn.Module):
    """One transformer layer: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        # 2L residual branches add up; this keeps the sum's variance that of one.
        residual_std = INIT_STD / math.sqrt(2 * config.layers)
        self.ln1 = LayerNorm(config.width)
        self.attention = Attention(config, residual_std)
        self.ln2 = LayerNorm(config.width)
        self.mlp = MLP(config, residual_std)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, T, C] -> [B, T, C]."""
        x = x + self.attention(self.ln1(x))
        x = x + self.mlp(self.ln2(x))
        return x


class Loss(nn.Module):
    """Mean cross entropy in nats; on a GPU by a kernel of ours, which makes the gradient too."""

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """logits [B, T, V], targets [B, T] int64 -> an fp32 scalar."""
        if logits.is_cuda:
            from refimpl.kernels.cross_entropy import cross_entropy

            return cross_entropy(logits, targets)
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


class GPT(nn.Module):
    """Token and position embeddings, `layers` blocks, a final norm, and a head."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.wte = Embedding(config.vocab, config.width)
        self.wpe = Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.ln = LayerNorm(config.width)
        self.head = Linear(config.width, config.vocab, bias=False)
        if config.tied:
            self.head.weight = self.wte.weight
        self.loss: nn.Module = Loss()

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """tokens [B, T] int64 -> logits [B, T, V], in the weights' dtype.

        With targets [B, T] int64: the mean cross entropy in nats instead, an fp32 scalar.
        """
        length, context = tokens.shape[1], self.config.context
        if length > context:
            raise ValueError(f"a sequence of {length} tokens is longer than the model's context of {context}")
        x: Tensor = self.wte(tokens) + self.wpe(torch.arange(length, device=tokens.device))  # [B, T, C]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.ln(x))  # [B, T, V]
        if targets is None:
            return logits
        loss: Tensor = self.loss(logits, targets)
        return loss
