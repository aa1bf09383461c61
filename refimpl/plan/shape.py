"""A transformer's shape, and how many parameters its parts have: of a GPT; of a public configuration: `public.py`.

a block   attention: queries and output w x H d, keys and values w x K d   MLP: 2 matrices w x h, 3 if it is gated
          two norms: w, and w more with a bias                             biases where the family has them
around    embedding V w, learned positions C w, a last norm, and a head V w unless it shares the embedding
"""

from dataclasses import dataclass

from refimpl.model.gpt import GPTConfig


@dataclass(frozen=True)
class Shape:
    """`matrices`: of the MLP, 3 if gated. `biases`: "all" (GPT-2), "qkv" (Qwen2), or "none" (Llama).

    `head`: features of a head, 0 for width / heads. `each`, `rest`: parameters that a family has besides, in a block
    and around the blocks: other norms and biases, on every tensor rank.
    """

    layers: int
    width: int
    heads: int
    vocab: int
    context: int
    hidden: int  # of the MLP
    kv_heads: int
    matrices: int = 2
    biases: str = "all"
    positions: bool = True  # learned
    tied: bool = True
    head: int = 0
    each: int = 0
    rest: int = 0

    @property
    def queries(self) -> int:
        """Features of all heads."""
        return self.heads * self.head or self.width

    @property
    def attention_matrix(self) -> int:
        """Elements of queries, keys, values and output."""
        return 2 * self.width * (self.queries + self.keys())

    @property
    def mlp_matrix(self) -> int:
        return self.matrices * self.width * self.hidden

    def keys(self, tp: int = 1) -> int:
        """Features of keys on a rank: of its heads, or of one that it shares with others where there are fewer."""
        return max(1, self.kv_heads // tp) * self.queries // self.heads

    def block(self, tp: int = 1) -> int:
        """Parameters of one block on a rank, its matrices split over `tp`; norms and the biases of sums are whole."""
        w = self.width
        split = 2 * w * self.queries + self.mlp_matrix
        whole = self.each + 2 * w + 2 * self.keys(tp) * (w if self.biases == "none" else w + 1)
        if self.biases != "none":
            split += self.queries
        if self.biases == "all":
            split += (self.matrices - 1) * self.hidden
            whole += 4 * w  # the norms', the output's, the MLP's
        return split // tp + whole

    @property
    def embedding(self) -> int:
        return self.vocab * self.width

    @property
    def last_norm(self) -> int:
        """And what else is around the blocks."""
        return self.rest + self.width * (2 if self.biases == "all" else 1)

    @property
    def parameters(self) -> int:
        around = self.embedding * (1 if self.tied else 2) + self.positions * self.context * self.width + self.last_norm
        return around + self.layers * self.block()

    def flops(self, sequences: int, recompute: bool = False) -> int:
        """Floating-point operations of a step over `sequences`: forward once, backward twice; `recompute`: once more.

        Scores of masked pairs are counted, as published figures do. See `refimpl.plan.transformer`.
        """
        a_token = 2 * (self.attention_matrix + self.mlp_matrix) + 4 * self.queries * self.context
        blocks = (4 if recompute else 3) * self.layers * a_token
        return sequences * self.context * (blocks + 3 * 2 * self.embedding)


def of_gpt(config: GPTConfig) -> Shape:
    """The shape of `refimpl.model.gpt`'s GPT."""
    c = config
    return Shape(c.layers, c.width, c.heads, c.vocab, c.context, hidden=4 * c.width, kv_heads=c.heads)


def of_size(parameters: float, vocab: int = 51_200, context: int = 2048) -> Shape:
    """A GPT of about so many parameters, heads of 128, width / layers between GPT-3's small (64) and Megatron's 1T."""
    large = parameters >= 5e9
    step, ratio, divisor = (
        (1024, 160, 16 if parameters >= 1e11 else 8) if large else (128, 80, 2)
    )  # of layers: that pipelines divide them
    width = min(range(step, 65_536, step), key=lambda w: abs(12 * w**3 / ratio + vocab * w - parameters))
    layers = (parameters - vocab * width) / (12 * width**2)
    layers = max(1, round(layers / divisor)) * divisor
    return Shape(layers, width, width // 128, vocab, context, hidden=4 * width, kv_heads=width // 128)
