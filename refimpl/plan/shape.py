"""A transformer's shape, and how many parameters its parts have: of a GPT; of a public configuration: `public.py`.

a block   attention: queries and output w x H d, keys and values w x K d   MLP: 2 matrices w x h, 3 if it is gated
          two norms: w, and w more with a bias                             biases where the family has them
around    embedding V w, learned positions C w, a last norm, and a head V w unless it shares the embedding
latent    queries w x q and q x H d, keys and values w x (c + r) and c x H (d - r + v), output H v x w, a norm of each
mixture   in the place of an MLP: a gate w x E, E experts, and perhaps an MLP that every token passes

Latent attention: DeepSeek-V2, arXiv:2405.04434, section 2.1; it is not cut over tensor ranks, nor is attention with a
norm over all heads or a parameter for each. Experts are whole on each of these ranks too
(`refimpl/parallel/expert/dispatch.py`).
"""

from dataclasses import dataclass

from refimpl.model.gpt import GPTConfig


@dataclass(frozen=True)
class Latent:
    """Attention through narrow projections. `queries`: q, 0 if those of queries are full; `keys`: c of the legend."""

    queries: int
    keys: int
    rotated: int  # r: of a head's d, one for all heads
    value: int  # v: of a head

    @property
    def kept(self) -> int:
        """Elements a token for backward: inputs of the norms and of the matrices behind them."""
        return 2 * (self.queries + self.keys) + self.rotated


@dataclass(frozen=True)
class Experts:
    """Mixtures, whose experts have the MLP's kind of matrices. `shared`: features of the MLP beside them, 0 for none.

    `beside`, `biases`: parameters besides, of a mixture and of one expert. `dense`: the layers that have an MLP.
    """

    count: int
    k: int  # experts that a token passes
    hidden: int  # of an expert
    shared: int = 0
    beside: int = 0
    biases: int = 0
    dense: frozenset[int] = frozenset()


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
    latent: Latent | None = None
    experts: Experts | None = None
    joined: bool = False  # a norm over all heads, or a parameter of each, keeps attention in one piece

    @property
    def whole(self) -> bool:
        """Whether attention is not cut over tensor ranks."""
        return self.joined or self.latent is not None

    @property
    def queries(self) -> int:
        """Features of all heads."""
        return self.heads * self.head or self.width

    @property
    def answers(self) -> int:
        """Features of what attention gives: of the values of all heads."""
        return self.heads * self.latent.value if self.latent else self.queries

    @property
    def attention_matrix(self) -> int:
        """Elements of queries, keys, values and output."""
        split, whole = self.attention_parts()
        return split + whole

    @property
    def mlp_matrix(self) -> int:
        return self.matrices * self.width * self.hidden

    @property
    def expert(self) -> int:
        """Parameters of one expert, 0 without mixtures."""
        return self.matrices * self.width * self.experts.hidden + self.experts.biases if self.experts else 0

    def keys(self, tp: int = 1) -> int:
        """Features of keys on a rank: of its heads, or of one that it shares with others where there are fewer."""
        return max(1, self.kv_heads // tp) * self.queries // self.heads

    def values(self, tp: int = 1) -> int:
        """The same of values."""
        return self.answers if self.latent else self.keys(tp)

    def attention_parts(self, tp: int = 1) -> tuple[int, int]:
        """Elements of attention's matrices: (cut over all `tp` ranks, on each of them)."""
        w = self.width
        if self.latent is None:
            return 2 * w * self.queries, 2 * self.keys(tp) * w
        q, c, r = self.latent.queries, self.latent.keys, self.latent.rotated
        heads = (q or w) * self.queries + c * (self.queries - self.heads * r + self.answers) + self.answers * w
        return 0, heads + w * (q + c + r)

    def attention(self, tp: int = 1) -> int:
        """Parameters of a block beside its MLP on a rank: norms and the biases of sums are whole."""
        split, whole = self.attention_parts(tp)
        whole += self.each + 2 * self.width
        if self.latent is not None:
            whole += self.latent.queries + self.latent.keys
        if self.biases != "none":
            split += self.queries
            whole += 2 * self.keys(tp)
        return split // tp + whole + (3 * self.width if self.biases == "all" else 0)  # the norms', the output's

    def mlp(self, tp: int = 1) -> int:
        """Parameters of an MLP on a rank."""
        biased = self.biases == "all"
        return (self.mlp_matrix + biased * (self.matrices - 1) * self.hidden) // tp + biased * self.width

    def mixture(self, tp: int = 1) -> int:
        """Parameters of a mixture on a rank, but for its experts."""
        assert self.experts is not None
        shared = self.matrices * self.width * self.experts.shared
        return self.width * self.experts.count + self.experts.beside + shared // tp

    def mixtures(self, first: int = 0, last: int | None = None) -> int:
        """Of the layers `first` to `last`, how many have experts."""
        layers = range(self.layers)[first:last]
        return 0 if self.experts is None else len(layers) - sum(layer in layers for layer in self.experts.dense)

    def block(self, tp: int = 1) -> int:
        """Parameters of one block with an MLP on a rank, its matrices split over `tp`."""
        return self.attention(tp) + self.mlp(tp)

    def blocks(self, first: int, last: int, tp: int = 1) -> int:
        """Parameters of the layers `first` to `last` on a rank, but for experts."""
        mixtures = self.mixtures(first, last)
        mixed = mixtures * (self.mixture(tp) - self.mlp(tp)) if mixtures else 0
        return (last - first) * self.block(tp) + mixed

    @property
    def embedding(self) -> int:
        return self.vocab * self.width

    @property
    def learned_positions(self) -> int:
        return self.positions * self.context * self.width

    @property
    def last_norm(self) -> int:
        """And what else is around the blocks."""
        return self.rest + self.width * (2 if self.biases == "all" else 1)

    @property
    def parameters(self) -> int:
        around = self.embedding * (1 if self.tied else 2) + self.learned_positions + self.last_norm
        experts = self.mixtures() * self.experts.count * self.expert if self.experts else 0
        return around + self.blocks(0, self.layers) + experts

    @property
    def active(self) -> int:
        """Parameters that one token meets."""
        idle = self.experts.count - self.experts.k if self.experts else 0
        return self.parameters - self.mixtures() * idle * self.expert

    def flops(self, sequences: int, recompute: bool = False) -> int:
        """Floating-point operations of a step over `sequences`: forward once, backward twice; `recompute`: once more.

        Scores of masked pairs are counted, as published figures do. See `refimpl.plan.transformer`.
        """
        attention = 2 * self.attention_matrix + 2 * (self.queries + self.answers) * self.context
        a_token = self.layers * attention + (self.layers - self.mixtures()) * 2 * self.mlp_matrix
        if (e := self.experts) is not None:
            met = self.width * (e.count + self.matrices * (e.shared + e.k * e.hidden))  # a gate, shared, k experts
            a_token += self.mixtures() * 2 * met
        return sequences * self.context * ((4 if recompute else 3) * a_token + 3 * 2 * self.embedding)


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
