"""A transformer's shape, and how many parameters its parts have: of a GPT; of a public configuration: `public.py`.

a block   attention: queries and output w x H d, keys and values w x K d   MLP: 2 matrices w x h, 3 if it is gated
          two norms: w, and w more with a bias                             biases where the family has them
around    embedding V w, learned positions C w, a last norm, and a head V w unless it shares the embedding
latent    queries w x q and q x H d, keys and values w x (c + r) and c x H (d - r + v), output H v x w, a norm of each
mixture   in the place of an MLP: a gate w x E, E experts, and perhaps an MLP that every token passes

tp: the fullest of so many tensor ranks, the first. Groups of heads, rows of the vocabulary and features of the MLP that
do not divide are dealt out unevenly (`refimpl/parallel/split.py`); what cannot be dealt out is whole on each rank, as
are experts (`refimpl/parallel/expert/dispatch.py`). Latent attention: DeepSeek-V2, arXiv:2405.04434, section 2.1.
"""

from dataclasses import dataclass

from refimpl.model.gpt import GPTConfig


def most(units: int, ranks: int) -> int:
    """Of so many units, those of the fullest rank."""
    return -(-units // ranks)


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
    scaled: bool = False  # an embedding that multiplies what it looks up is whole on each tensor rank, as is its head

    def whole(self, tp: int) -> str:
        """Why attention is whole on each of so many tensor ranks; empty where it is cut. As `autotp` finds it."""
        h, k = self.heads, self.kv_heads
        if tp > 1 and self.latent is not None:
            return "it is latent"
        if tp > 1 and self.joined:
            return "it has a norm over all heads, or a parameter for each"
        if k < tp and (h < tp or tp % k or (k > 1 and h % tp)):
            return f"{h} heads over {k} of keys and values cannot be dealt out"
        return ""

    def heads_of(self, tp: int = 1) -> tuple[int, int]:
        """(heads, those of keys and values) of a rank: whole groups, or one of keys that it shares with others."""
        ranks = 1 if self.whole(tp) else tp
        if self.kv_heads < ranks:
            return most(self.heads, ranks), 1
        groups = most(self.kv_heads, ranks)
        return groups * (self.heads // self.kv_heads), groups

    @property
    def head_width(self) -> int:
        return self.head or self.width // self.heads

    def queries(self, tp: int = 1) -> int:
        """Features of all heads of a rank."""
        return self.heads_of(tp)[0] * self.head_width

    def answers(self, tp: int = 1) -> int:
        """Features of what attention gives: of the values of all these heads."""
        return self.heads * self.latent.value if self.latent else self.queries(tp)

    def attention_matrix(self, tp: int = 1) -> int:
        """Elements of queries, keys, values and output."""
        w = self.width
        if self.latent is None:
            return 2 * w * (self.queries(tp) + self.keys(tp))
        q, c, r = self.latent.queries, self.latent.keys, self.latent.rotated
        heads = (q or w) * self.queries() + c * (self.queries() - self.heads * r + self.answers()) + self.answers() * w
        return heads + w * (q + c + r)

    def mlp_matrix(self, tp: int = 1) -> int:
        return self.matrices * self.width * most(self.hidden, tp)

    @property
    def expert(self) -> int:
        """Parameters of one expert, 0 without mixtures."""
        return self.matrices * self.width * self.experts.hidden + self.experts.biases if self.experts else 0

    def keys(self, tp: int = 1) -> int:
        """Features of keys of a rank."""
        return self.heads_of(tp)[1] * self.head_width

    def values(self, tp: int = 1) -> int:
        """The same of values."""
        return self.answers() if self.latent else self.keys(tp)

    def attention(self, tp: int = 1) -> int:
        """Parameters of a block beside its MLP on a rank: norms and the biases of sums are whole."""
        found = self.attention_matrix(tp) + self.each + 2 * self.width
        if self.latent is not None:
            found += self.latent.queries + self.latent.keys
        if self.biases != "none":
            found += self.queries(tp) + 2 * self.keys(tp)
        return found + (3 * self.width if self.biases == "all" else 0)  # the norms', the output's

    def mlp(self, tp: int = 1) -> int:
        """Parameters of an MLP on a rank."""
        biases = (self.matrices - 1) * most(self.hidden, tp) + self.width
        return self.mlp_matrix(tp) + (biases if self.biases == "all" else 0)

    def mixture(self, tp: int = 1) -> int:
        """Parameters of a mixture on a rank, but for its experts."""
        assert self.experts is not None
        shared = self.matrices * self.width * most(self.experts.shared, tp)
        return self.width * self.experts.count + self.experts.beside + shared

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

    def words(self, tp: int = 1) -> int:
        """Rows of the vocabulary."""
        return self.vocab if self.scaled else most(self.vocab, tp)

    def embedding(self, tp: int = 1) -> int:
        return self.words(tp) * self.width

    @property
    def learned_positions(self) -> int:
        return self.positions * self.context * self.width

    @property
    def last_norm(self) -> int:
        """And what else is around the blocks."""
        return self.rest + self.width * (2 if self.biases == "all" else 1)

    @property
    def parameters(self) -> int:
        around = self.embedding() * (1 if self.tied else 2) + self.learned_positions + self.last_norm
        experts = self.mixtures() * self.experts.count * self.expert if self.experts else 0
        return around + self.blocks(0, self.layers) + experts

    @property
    def active(self) -> int:
        """Parameters that one token meets."""
        idle = self.experts.count - self.experts.k if self.experts else 0
        return self.parameters - self.mixtures() * idle * self.expert

    def flops(self, sequences: int, recompute: bool = False, tp: int = 1, mixed: int = 1) -> int:
        """Floating-point operations of a step over `sequences`: forward once, backward twice; `recompute`: once more.

        Scores of masked pairs are counted, as published figures do. See `refimpl.plan.transformer`. tp: as if each of
        so many tensor ranks had as much to do as the fullest, for which all wait. mixed: how many of them compute the
        experts of a token.
        """
        attention = 2 * self.attention_matrix(tp) + 2 * (self.queries(tp) + self.answers(tp)) * self.context
        a_token = tp * (self.layers * attention + (self.layers - self.mixtures()) * 2 * self.mlp_matrix(tp))
        if (e := self.experts) is not None:
            met = self.width * (mixed * (e.count + self.matrices * e.k * e.hidden) + self.matrices * e.shared)
            a_token += self.mixtures() * 2 * met
        return sequences * self.context * ((4 if recompute else 3) * a_token + 3 * 2 * tp * self.embedding(tp))


def of_gpt(config: GPTConfig) -> Shape:
    """The shape of `refimpl.model.gpt`'s GPT."""
    c = config
    return Shape(c.layers, c.width, c.heads, c.vocab, c.context, hidden=4 * c.width, kv_heads=c.heads, tied=c.tied)


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
