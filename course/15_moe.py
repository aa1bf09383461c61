# %% [markdown]
# # 15 · Mixture of experts: parameters without FLOPs
#
# ZeRO, tensor parallelism and pipelines divide a model's work. This chapter leaves most of it out: of many MLPs a token
# passes through one or two. You count what that buys, build the gate that chooses, send tokens to ranks that have their
# experts, watch routing collapse on real text and cure it, and find out whose gradients must be averaged with whose.
# You need chapters 01 and 04.

# %% [markdown]
# ## 1. The pain: every parameter works for every token
#
# In a dense model parameters and work are the same thing: a matrix of $M h$ weights costs $2 M h$ operations for each
# token. A model that should know eight times as much computes eight times as much. Counted, on a small GPT whose MLPs
# are made eight times as wide, and beside it the same GPT with eight MLPs, of which each token takes one:

# %%
# %load_ext refimpl.notebook

# %%
import copy

import pandas as pd
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from refimpl.model.gates import Routing
from refimpl.model.gpt import GPT, Linear, GPTConfig
from refimpl.model.moe import layers, mixtures

torch.set_num_threads(1)
config = GPTConfig(vocab=256, context=64, width=64, layers=2, heads=2)
tokens = torch.randint(256, (4, 64), generator=torch.Generator().manual_seed(0))


def widened(model, times):
    for block in model.blocks:
        hidden = 4 * config.width * times
        block.mlp.up, block.mlp.down = (
            Linear(config.width, hidden),
            Linear(hidden, config.width),
        )
    return model


def counted(model):
    """Parameters, and operations for a token in forward."""
    with torch.no_grad(), FlopCounterMode(display=False) as flops:
        model(tokens)
    parameters = sum(p.numel() for p in model.parameters())
    return [f"{parameters:,}", f"{flops.get_total_flops() // tokens.numel():,}"]


models = {
    "dense": GPT(config),
    "MLPs 8 times as wide": widened(GPT(config), 8),
    "8 experts, top-1": mixtures(GPT(config), 8, Routing(k=1)),
    "8 experts, top-2": mixtures(GPT(config), 8, Routing(k=2)),
}
pd.DataFrame.from_dict(
    {name: counted(model) for name, model in models.items()},
    orient="index",
    columns=["parameters", "FLOPs a token"],
)

# %% [markdown]
# The third row has the parameters of the second, a few of gates and biases more, and the work of the first, but for the
# gates' (for $E$ experts and tokens of width $M$, $2 M E$ operations a layer and token). How far this goes, by formula
# beside what the papers say, in billions ([mixture.py](../refimpl/plan/mixture.py)); "active" are the parameters that one
# token meets:

# %% tags=["hide-input"]
from refimpl.notebook import predict

predict(
    "Mixtral 8x7B: 32 layers, each with 8 experts of 3 matrices 4096 x 14336, top-2; 1.6 billion parameters are beside "
    "the experts. How many billions does it have?",
    46.7,
    unit="billion",
    why="32 x 8 x 3 x 4096 x 14336 = 45.1 billion, and 1.6. Not 8 x 7 = 56: attention is there once.",
)

# %%
from refimpl.plan.mixture import GSHARD, PUBLISHED, gshard

rows = {}
for name, (model, whole, active) in PUBLISHED.items():
    rows[name] = [
        model.experts,
        model.k,
        f"{model.total / 1e9:,.1f}",
        f"{whole:,}",
        f"{model.active / 1e9:.1f}",
        active or "-",
    ]
for (experts, blocks), whole in GSHARD.items():
    model = gshard(experts, blocks)
    total, active = f"{model.total / 1e9:,.1f}", f"{model.active / 1e9:.1f}"
    rows[f"GShard {experts}E, {blocks}L"] = [experts, 2, total, whole, active, "-"]
columns = ["experts", "k", "total", "published", "active", "published "]
pd.DataFrame.from_dict(rows, orient="index", columns=columns)

# %% [markdown]
# (GShard's figures are rounded. DeepSeek-V3's 37 leave out the embedding, which is a look-up: 0.9.) **What one pays**:
# memory for all parameters, wherever a token may go; and the way there and back.

# %% [markdown]
# ## 2. The idea: a gate, experts, a weighted sum
#
# $$y = \sum_{e \,\in\, \text{top-}k(p)} g_e(x)\, \mathrm{MLP}_e(x), \qquad p = \mathrm{softmax}(W x),\quad W\;[E, M].$$
#
# ```mermaid
# flowchart LR
#   x["tokens"] --> gate{{"gate"}}
#   gate -- "0.7" --> e0["expert 0"]
#   gate --> e1["expert 1"]
#   gate -- "0.3" --> e2["expert 2"]
#   e0 --> s(("+")) --> y["tokens"]
#   e2 --> s
# ```
#
# The gate is one matrix $W$, and $p$ a probability for each of $E$ experts. The weight $g_e$ of a chosen expert is its
# $p_e$; for $k > 1$ most divide the $k$ weights by their sum. The choice itself has no gradient. What the gate learns, it
# learns through $g_e$: an expert whose answer lowers the loss is given more weight, and so is chosen more often.

# %% tags=["hide-input"]
predict(
    "k = 1, and the weight is divided by the sum of the k weights. What does the gate learn from the loss?",
    "nothing",
    options=["nothing", "the same as without dividing", "twice as fast"],
    why="g / g = 1, whatever the gate says. For k = 1 the weight must stay the probability, as Switch has it.",
)

# %% [markdown]
# **Your turn.** A gate is 10 lines, and three mistakes are common: the one just asked, a softmax in bf16, and
# `torch.topk`, which among equal ones takes any, another on a GPU than on a CPU.


# %%
# %%task 15_moe top_k_gate
def top_k_gate(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k experts with the highest probabilities, and what their answers are multiplied with.

    logits [T, E], fp32 or bf16 -> (experts [T, k] int64, the best first; weights [T, k] fp32,
    with a gradient). The probabilities are a softmax over all E in fp32. For k > 1 a token's
    weights are divided by their sum, as in GShard and Mixtral. For k = 1 the weight is the
    probability itself, as in Switch: divided by itself it would be 1, and the gate would learn
    nothing. Of equal logits the expert with the lower number is taken (torch.topk takes any).
    Example: logits log([0.6, 0.1, 0.3]), k = 2 -> experts [0, 2], weights [2/3, 1/3]; k = 1 ->
    [0], [0.6].
    """
    raise NotImplementedError("top_k_gate")


# %% [markdown]
# **Gates that people use**, on the same logits of 64 tokens for 8 experts, of which two are popular. An expert's buffer
# has $C = \lceil 1.25\, k\, T / E \rceil$ places for $T$ tokens (a *capacity factor* of 1.25). A route, one token's way to
# one of its experts, that finds no place is **dropped**. A token without any goes on by the residual connection alone: the
# layer adds nothing to it.

# %%
from refimpl.model.gates import route

torch.manual_seed(1)
logits = torch.randn(64, 8) + torch.tensor([1.5, 1.0, 0, 0, 0, 0, 0, -1])
gates = {
    "top-1, Switch": Routing(k=1, capacity_factor=1.25),
    "top-2, GShard": Routing(k=2, capacity_factor=1.25, drop="choice"),
    "top-2, by probability": Routing(k=2, capacity_factor=1.25, drop="probs"),
    "top-4": Routing(k=4, capacity_factor=1.25, drop="probs"),
    "top-2, no drop": Routing(k=2),
    "expert choice": Routing(k=2, by="experts", capacity_factor=1.0),
}
rows = {}
for name, routing in gates.items():
    routes = route(logits, routing)
    kept, per_token = routes.kept.sum().item(), routes.kept.sum(1)
    asked = routes.counts.sum().item()
    per_token = f"{per_token.min()} to {per_token.max()}"
    rows[name] = [routes.counts.tolist(), routes.capacity, f"{1 - kept / asked:.0%}", per_token]
columns = ["routes asked of each expert", "C", "dropped", "a token's experts"]
pd.DataFrame.from_dict(rows, orient="index", columns=columns)

# %% [markdown]
# With **expert choice** the experts choose: loads are even by construction, a token gets any number of experts, or none.
# What a token gets then depends on the tokens after it, so it does not suit a model that generates. **Noise** in
# training, Gumbel's on the logits (`noise="RSample"`) or a factor of 0.99 to 1.01 on the inputs (`"Jitter"`), lets
# tokens try other experts. For the *second* expert GShard draws whether it is used at all, with probability $2 g_2$;
# DeepSpeed's top-2 draws which one it is.
#
# The order in which routes find places matters. GShard seats all first choices before any second one; DeepSpeed's
# `topkgating` keeps those with the highest probability; Switch keeps the first in the batch, so that the batch's last
# tokens lose; random token selection (RTS) draws. (`positions` in the exercises is GShard's.) Turn the knobs: what
# is dropped at the popular experts, and what is padding at the others.

# %% tags=["hide-input"]
from refimpl.notebook.widgets_moe import gate_knobs

gate_knobs()

# %% [markdown]
# ## 3. Build it
#
# **Dispatch by multiplication.** GShard's way: a matrix $[T, E, C]$ of zeros and ones picks the token for every slot, one
# with weights brings the answers back. On a TPU, which multiplies matrices and little else, that is elegant. Here experts
# give back what they get, so that all work is the moving:

# %% tags=["hide-input"]
predict(
    "T tokens of width M, E experts with C = T/E places. Operations of the two products with [T, E, C]?",
    "about 4 T^2 M",
    options=["about 4 T M", "about 4 T E M", "about 4 T^2 M", "none"],
    why="Each is 2 T (E C) M, and E C = T. It grows with the square of the tokens, as attention does.",
)

# %%
from refimpl.model.moe import mix, mix_dense

rows = {}
for T in (256, 1024):
    x, M = torch.randn(T, 64), 64
    routes = route(torch.randn(T, 8), Routing(k=1, capacity_factor=1.0))
    found = {}
    for way in (mix_dense, mix):
        with FlopCounterMode(display=False) as flops:
            found[way] = way(lambda rows, sizes: rows, x, routes)
        rows[f"{way.__name__}, T = {T:,}"] = [
            f"{flops.get_total_flops():,}",
            f"{4 * T * T * M:,}",
        ]
    print(f"T = {T:,}: equal", torch.allclose(found[mix], found[mix_dense], atol=1e-6))
pd.DataFrame.from_dict(rows, orient="index", columns=["FLOPs of moving", "4 T² M"])

# %% [markdown]
# **Dispatch by sorting.** Sort the routes by expert; an expert's rows then lie together, and it multiplies one block of as
# many rows as there are. Nothing is multiplied to move them, nothing is computed for an empty slot. `mix` does that
# (`permute` and `combine` in the exercises). MegaBlocks (Gale et al. 2022) is this idea with one kernel for all
# blocks, of unequal sizes: a block-sparse product in the paper, mostly a **grouped matmul** today.
#
# **Several ranks.** Rank $r$ has the experts $rE/N$ to $(r+1)E/N$, and its own tokens. Sorted by expert, rows are sorted
# by rank too, so one **all-to-all** takes each to its expert, a second one brings the answer back. Backward is two more.
# The parts are uneven, and a receiver must know how many rows come: first the counts go round.

# %% tags=["hide-input"]
predict(
    "4 ranks with 1000 tokens each, top-2, width 512, bf16; loads are even. Bytes that a rank sends for one layer, "
    "forward and backward?",
    4 * 1000 * 2 * 512 * 2 * 3 // 4,
    unit="bytes",
    why="4 all-to-alls of k T M elements of 2 bytes, of which 3/4 leave the rank: 6.1 MB. The number of experts is not in it.",
)

# %% [markdown]
# **Your turn.** The rows that are already at home stay; an expert may get nothing, a rank may have no tokens at all.


# %%
# %%task 15_moe dispatch
def dispatch(rows: Tensor, counts: Tensor, group: Group) -> tuple[Tensor, Tensor]:
    """Each row goes to the rank that has its expert, and nowhere else.

    rows [R, M] of any dtype, by expert, as `permute` laid them; counts [E] int64: how many are
    each expert's -> (arrived [R', M]: rank 0's rows for this rank's experts, in their order,
    then rank 1's, ...;
        sizes [N, E/N] int64: how many rank s sent to this rank's j-th expert).
    Two all-to-alls: E int64 numbers, then the rows in uneven parts. Backward sends each row's
    gradient back, by one all-to-all: it knows the numbers, and needs no rows to be kept. An
    expert may get nothing, a rank may have no tokens: it takes part all the same. rows and
    counts keep their values.
    """
    raise NotImplementedError("dispatch")


# %% [markdown]
# What arrives lies by (source, expert). A grouped matmul first brings each expert's blocks together, and so does refimpl
# in 16 bits. In fp32 it multiplies the blocks one by one: then results have the same bits wherever an expert lives.
#
# ## 4. Read it
#
# In refimpl a model is built for one rank, and made expert-parallel from outside: a mixture's `mix`, which permuted and
# combined, is replaced by one that has ranks in between. All of the way there and back:

# %%
from refimpl.notebook import show
from refimpl.parallel.expert import dispatch as expert_dispatch

show.source(expert_dispatch.Dispatch.through)

# %% [markdown]
# `to` is a table: how many rows each rank sends to each. `move` sends by it, and the answers go back by the same function
# with the table transposed (`turned`). The last lines are for tensor ranks, which cut each expert's matrices among them.
#
# Now on ranks. The **expert axis** of $ep$ ranks shares out the experts; the $N/ep$ ranks with the same place in their
# groups have the same ones. (DeepSpeed and Megatron-LM call the two groups *expert parallel* and *expert data parallel*.)
# The same GPT, the same tokens, at $ep$ = 1, 2 and 4:

# %%
# %%ranks 4
from refimpl.comm.axes import Axes
from refimpl.model.data import Batches, corpus
from refimpl.model.gates import Routing
from refimpl.model.gpt import GPT, GPTConfig
from refimpl.model.moe import layers, mixtures
from refimpl.parallel.expert.swap import expert_parallel
from refimpl.plan import expert as formula

config = GPTConfig(vocab=256, context=64, width=64, layers=2, heads=2)
batches = Batches(corpus(), context=64, size=2)
TOP2 = Routing(k=2)


def make(ep, routing=TOP2, **how):
    """The same model whatever ep is; this rank's experts alone."""
    torch.manual_seed(0)
    model = mixtures(GPT(config), 8, routing, balance=0.0)
    return expert_parallel(model, Axes.of_data(group).with_experts(ep), **how)


def by_formula(model, ep):
    """Bytes that this rank sends for all layers, by tag."""
    sent = {"tokens": 0, "tokens per expert": 0}
    for layer in layers(model):
        every = group.all_gather_object(layer.routes.rows.sizes)
        loads = every[rank - rank % ep : rank - rank % ep + ep]
        for tag, n in formula.sent(loads, rank % ep, config.width, 4).items():
            sent[tag] += n
    return sent


found, outputs = {}, {}
for ep in (1, 2, 4):
    model = make(ep)
    group.ledger.reset()
    loss = model(*batches.batch(0, rank))
    loss.backward()
    sent = group.ledger.sent_bytes("tag")
    counted = {tag: sent.get(tag, 0) for tag in ("tokens", "tokens per expert")}
    outputs[ep] = [loss.detach(), *(layer.gate.weight.grad for layer in layers(model))]
    same = all(map(torch.equal, outputs[ep], outputs[1]))
    experts = sum(p.numel() for layer in layers(model) for p in layer.experts.parameters())
    found[f"ep = {ep}"] = [experts, *counted.values(), counted == by_formula(model, ep), same]

# %%
columns = [
    "expert parameters",
    "bytes of tokens",
    "of counts",
    "as by formula",
    "bits of ep = 1",
]
pd.DataFrame.from_dict(ranks.pull("found")[0], orient="index", columns=columns)

# %% [markdown]
# The formula knows each rank's loads: $k\,T M$ elements, less what stays at home, four times a layer. The last column
# compares loss and gates' gradients to the bit. That is not a matter of course: a row of a matrix product may round otherwise when
# other rows stand beside it, so refimpl multiplies each source's rows by themselves.
#
# **On two ranks**, and with loads as uneven as they can be. `Routes.given` takes the choice instead of a gate. `Dispatch`
# takes the ranks that share the experts, the way that rows travel, and the tensor ranks (here this rank alone). The experts
# just double their rows:

# %%
# %%ranks 4
from refimpl.model.routes import Routes
from refimpl.parallel.expert.dispatch import Dispatch
from refimpl.parallel.expert.exchange import Flat
from refimpl.comm.group import Group

pair = Axes.of_data(group).with_experts(2).expert
alone = Group(None, group.ledger)
T, M, E = 6, 8, 4
cases = {
    "even": torch.arange(T) % E,
    "all to expert 0": torch.zeros(T, dtype=torch.int64),
    "expert 3 gets nothing": torch.arange(T) % 3,
    "rank 1 is empty": torch.arange(T if pair.rank == 0 else 0) % E,
}
rows = {}
for name, chosen in cases.items():
    routes = Routes.given(chosen[:, None], torch.ones(len(chosen), 1), E)
    x = torch.randn(len(chosen), M, requires_grad=True)
    seen = []
    group.ledger.reset()
    y = Dispatch(pair, Flat(pair), alone)(
        lambda rows, sizes: seen.append(sizes) or rows * 2, x, routes
    )
    y.sum().backward()
    back = torch.equal(y, 2 * x) and bool((x.grad == 2).all())
    rows[name] = [str(seen[0]), group.ledger.sent_bytes("tag").get("tokens", 0), back]

# %%
columns = ["rows by (source, expert)", "bytes sent", "all are back"]
tables = [
    pd.DataFrame.from_dict(r, orient="index", columns=columns) for r in ranks.pull("rows")
]
pd.concat(tables[:2], keys=["rank 0", "rank 1"])

# %% [markdown]
# **What others do.** The words that an interviewer will use, and where the designs part:
#
# | | gate | tokens travel by | what does not fit | balance | beside the experts |
# |---|---|---|---|---|---|
# | GShard 2020 | top-2, the second one at times | einsum, all-to-all of $[E, C, M]$ | dropped, $C = 2T/E$ | loss on first choices | - |
# | Switch 2021 | top-1 | the same | dropped, factor 1 to 2 | loss, 0.01 | - |
# | DeepSpeed `MoE` | top-1, top-2, top-k; `RSample`, `Jitter`, RTS | a gather (an einsum until 0.19.3), all-to-all of $[E, C, M]$ | dropped, or $C$ = the fullest of all ranks | `l_aux`, the caller adds it | PR-MoE's residual MLP |
# | MegaBlocks, Megatron-Core | top-k | sort, uneven all-to-all, grouped matmul (or DeepEP's kernels) | nothing ("dropless") unless asked | loss by sequence, batch or *global* batch; bias | shared experts |
# | Mixtral 2023 | top-2 of 8, softmax over the two | sort, or a loop over experts (HF) | nothing | loss, 0.001 in HF's default | - |
# | DeepSeek-V3 2024 | 8 of 256, sigmoid; at most 4 of 8 groups | own kernels, fp8 there, bf16 back | nothing | bias of 0.001 a step, a tiny sequence loss | 1 shared expert |
# | expert choice 2022 | experts choose | by index | by construction | none needed | - |
#
# (DeepSpeed's AutoEP, for models of transformers, sends tokens as the fourth row does.) "Beside the experts" is an MLP
# that every token passes: DeepSeek's shared expert, or the residual MLP of DeepSpeed's PR-MoE. DeepSeek's groups limit
# *traffic*: experts of a group live on a node, so a token's 8 rows cross the network to at most 4 nodes and are copied
# there by NVLink.
#
# ## 5. Routing collapses
#
# Nothing said so far keeps the gate from sending everything to one expert. And training pushes it there: who is chosen is
# trained, who is trained gets better, who is better is chosen.

# %% tags=["hide-input"]
predict(
    "8 experts, top-1, no balancing, 100 steps on English text. What share of the tokens has the fullest expert?",
    "most of them",
    options=["an eighth", "about a quarter", "most of them"],
    why="A lead of a few per cent at the start is enough: better trained, it is chosen more. Some experts die at once.",
)

# %% [markdown]
# Three runs of the same tiny GPT on the Python reference, from the same weights:
#
# - **no balance**;
# - a **loss**, $E \sum_e f_e P_e$, times 0.1 (Switch takes 0.01, for far longer runs): $f_e$ is expert $e$'s share of
#   the routes, $P_e$ its mean probability. It is 1 where all is even and $E$ at a collapse; its gradient goes through $P$
#   and lowers the probability of those that have much;
# - a **bias**, a number for each expert, which is added to the scores that choose, and not to the weights: up by 0.01 a step
#   for experts that had less than the mean, down for the others. No gradient of another aim mixes with that of the loss
#   (Wang et al. 2024; DeepSeek-V3 takes 0.001).

# %%
from refimpl.model.data import Batches, corpus

E, STEPS = 8, 100
text = Batches(corpus(), context=64, size=8)


def trained(routing, balance=0.0, rate=0.0):
    """Share of the tokens for each expert of the first layer [steps, E], and the losses of the text."""
    torch.manual_seed(0)
    small = GPTConfig(vocab=256, context=64, width=32, layers=2, heads=2)
    model = mixtures(GPT(small), E, routing, balance=balance)
    gates = [layer.gate.weight for layer in layers(model)]
    others = [p for p in model.parameters() if all(p is not gate for gate in gates)]
    groups = [{"params": others, "lr": 3e-3}, {"params": gates, "lr": 1e-3}]
    adamw = torch.optim.AdamW(groups, fused=True)
    shares, losses = [], []
    for step in range(STEPS):
        loss = model(*text.batch(step, 0))
        loss.backward()
        adamw.step()
        adamw.zero_grad()
        balances = sum(layer.routes.balance.detach() for layer in layers(model))
        losses.append(loss.item() - balance * float(balances))
        counts = layers(model)[0].routes.counts
        shares.append(counts / counts.sum())
        for layer in layers(model) if rate else ():
            layer.gate.rebalance(rate)
    return torch.stack(shares), losses


runs = {
    "no balance": trained(Routing(k=1)),
    "loss": trained(Routing(k=1), balance=0.1),
    "bias": trained(Routing(k=1, bias=True), rate=0.01),
}
for name, (shares, _) in runs.items():
    late = shares[-20:]  # of each step by itself: a mean over steps hides a lead that jumps
    most, least = late.amax(1).mean(), late.mean(0).min()
    half = "more" if most > 0.5 else "less"
    print(f"{name:10} the fullest has {half} than half of the tokens,", end=" ")
    print(f"the emptiest {'less' if least < 0.02 else 'more'} than 2%")

# %% tags=["nbval-ignore-output", "hide-input"]
import matplotlib.pyplot as plt

figure, axes = show.figure(4.6, rows=3, sharex=True)
for axis, (name, (shares, losses)) in zip(axes, runs.items(), strict=True):
    axis.stackplot(range(STEPS), shares.t().numpy(), colors=plt.cm.tab10.colors)
    end = sum(losses[-20:]) / 20
    axis.set(title=f"{name}: loss of the text {end:.2f}", ylim=(0, 1), xlim=(0, STEPS - 1))
axes[-1].set_xlabel("step")
axes[1].set_ylabel("share of the tokens, by expert")
plt.show()

# %% [markdown]
# Each colour is one expert. Without balance one or two take nearly everything, and the others get no token, so their
# weights get no gradient, and next to nothing asks for them again: they do not come back. The model has paid for eight
# experts, and uses two.
#
# A balance is not free either: too strong, it routes for evenness and not for the text. That is the case for the bias. It is
# also the case for counting $f$ over *all* ranks: a rank's few tokens, perhaps all of one document, are never even, and a
# loss that wants them even forbids experts to specialise. `balance_loss` and `rebalance` in the exercises both all-reduce
# $E$ counts.
#
# The **z-loss** (ST-MoE), the mean of $\log^2 \sum_e \exp(\mathrm{logit}_e)$, keeps logits small: a softmax depends on
# differences alone, so without it nothing keeps them from growing until bf16 rounds them away.
#
# ## 6. Measure it: whose gradients are averaged with whose
#
# Four ranks, $ep = 2$. Dense parameters, gates among them, are on all four. An expert is on two.

# %% tags=["hide-input"]
predict(
    "N = 4, ep = 2. Each rank's loss is the mean over its own tokens. An expert's gradients, on the 2 ranks that have it, "
    "are summed. By what must the sum be divided, so that the step is that of one process with all tokens?",
    4,
    why="The loss of all is the mean of 4 ranks' losses. The expert has met the tokens of all 4, on 2 ranks.",
)

# %%
# %%ranks 4
import copy

from torch import nn

axes = Axes.of_data(group).with_experts(2)
E, T, M = 4, 8, 16
torch.manual_seed(0)
whole = nn.ModuleList(nn.Linear(M, M) for _ in range(E))  # all experts, in one process
every = torch.randn(group.size, T, M)
chosen = torch.randint(E, (group.size, T))

for tokens, choice in zip(every, chosen, strict=True):
    outputs = torch.stack([whole[e](t) for t, e in zip(tokens, choice.tolist(), strict=True)])
    (outputs.square().mean() / group.size).backward()

mine = slice(axes.expert.rank * E // 2, (axes.expert.rank + 1) * E // 2)
own = copy.deepcopy(whole[mine])
own.zero_grad()


def experts(rows, sizes):
    blocks = rows.split([n for row in sizes for n in row])
    return torch.cat([own[i % len(own)](block) for i, block in enumerate(blocks)])


routes = Routes.given(chosen[rank][:, None], torch.ones(T, 1), E)
y = Dispatch(axes.expert, Flat(axes.expert), alone)(experts, every[rank], routes)
y.square().mean().backward()
for name, over, divisor in (
    ("over those that have it, by N", axes.expert_data, group.size),
    ("over those that have it, by their number", axes.expert_data, axes.expert_data.size),
    ("over all ranks, by N", group, group.size),
):
    right = True
    for expert, truth in zip(own, whole[mine], strict=True):
        grad = expert.weight.grad.clone()
        over.all_reduce(grad)
        right = right and torch.allclose(grad / divisor, truth.weight.grad, atol=1e-6)
    print(f"{name:42} as one process: {right}")

# %% [markdown]
# **Your turn.** Dense ones over all, experts over those that have the same, and nobody may be missing in a collective: an
# expert that no token came to has no gradient, and takes part with zeros.


# %%
# %%task 15_moe average_gradients
def average_gradients(
    dense: Sequence[nn.Parameter], experts: Sequence[nn.Parameter], world: Group, same: Group
) -> None:
    """After backward: every gradient becomes the mean over the world's ranks of what their
    tokens gave it.

    dense: parameters that all ranks have. experts: those of this rank's experts, which the
    ranks of `same` have too, and no others. Each rank's loss is the mean over its own tokens.
    An expert's gradient already holds what the tokens of other ranks gave it: they came here. A
    parameter that requires a gradient and has None (no token came) counts as zeros, and has a
    gradient afterwards. Frozen ones are left out. A gradient need not be contiguous. Gradients
    are sent in their own dtype, those of experts over `same` alone.
    """
    raise NotImplementedError("average_gradients")


# %% [markdown]
# **ZeRO with experts.** A stage shards a parameter over the ranks that have it: dense ones $N$ ways, experts $N/ep$ ways.
# A rank has $1/ep$ of the experts, each divided by $N/ep$: the state it keeps of all experts is $1/N$, as of dense ones,
# whatever $ep$ is. What changes is traffic ([experts.py](../refimpl/zero/experts.py)). Counted, for ZeRO-1 in fp32 with
# AdamW (each parameter padded a little):

# %%
# %%ranks 4
from refimpl.zero.zero1 import Zero1

found = {}
for ep in (1, 2, 4):
    axes = Axes.of_data(group).with_experts(ep)
    torch.manual_seed(0)
    model = expert_parallel(mixtures(GPT(config), 8, TOP2, balance=0.0), axes)
    own = [p for layer in layers(model) for p in layer.experts.parameters()]
    adamw = torch.optim.AdamW(model.parameters())
    stage = Zero1(model, adamw, group, experts=dict.fromkeys(own, axes.expert_data))
    group.ledger.reset()
    stage.backward(stage.model(*batches.batch(0, rank)))
    stage.step()
    sent = group.ledger.sent_bytes("tag")
    state = sum(t.numel() for t in stage.tensors()["optimizer"] if t.dim())
    weights = sum(p.numel() for p in model.parameters())
    found[f"ep = {ep}"] = [
        weights,
        state,
        sent["gradients"],
        sent["parameters"],
        sent.get("tokens", 0),
    ]

# %%
columns = ["weights here", "optimizer", "gradients sent", "parameters sent", "tokens sent"]
pd.DataFrame.from_dict(ranks.pull("found")[0], orient="index", columns=columns)

# %% [markdown]
# (Elements kept by rank 0, then bytes that it sends in a step.) At $ep = N$ no gradient of an expert is sent at all:
# its tokens have done the travelling. That is why a mixture is made expert-parallel although ZeRO could shard it. In
# bf16 a layer of Mixtral has 2.8 GB of experts, so 5.6 GB of gradients and weights would travel a step, and every rank
# would hold them all (or gather them, by ZeRO-3); 8,192 tokens there and back, forward and backward, are 0.5 GB. But
# tokens travel for each micro-batch.
#
# **Two levels.** An all-to-all over 64 GPUs is 63 messages a rank, 56 of them over the network, each an eighth as large
# as if it went to a whole node of 8. So rows for one node are put together inside the node first. Messages over the
# network and bytes, 2 nodes of 2 ranks:

# %%
# %%ranks 4
from refimpl.parallel.expert.exchange import Hierarchical

table = [[1 + (s + d) % 3 for d in range(4)] for s in range(4)]  # rows of rank s for rank d
x = torch.arange(sum(table[rank])).float()[:, None].repeat(1, 4) + 100 * rank
flat, two = Flat(group), Hierarchical(group, 2)
came = flat(x, table)
print("the same rows:", torch.equal(came, two(x, table)))
node, place = divmod(rank, 2)
over = [table[rank][d] for d in range(4) if d // 2 != node]
group.ledger.reset()
two(x, table)
inside, across = (e.sent_bytes for e in group.ledger.events if e.phase == "start")
said = f"flat: {len(over)} messages, {16 * sum(over)} bytes to the other node;"
print(f"{said} in two levels: 1 message, {across} bytes, and {inside} inside")

# %% [markdown]
# The node's ranks together send as much across as before. Each carries what all ranks of its node have for one rank of the
# other node, the one with its own place. (`two_level_all_to_all` in the exercises has equal parts.) Fewer, larger messages pay when a message's
# fixed price matters: few tokens a rank, hundreds of ranks. Otherwise the copies inside the node cost more than they save,
# and Tutel has both ways. DeepEP goes over two levels for another reason, with *large* batches: a token that several GPUs
# of a node want then crosses the network once. For decoding, where each hop is latency, rows go straight (by kernels of
# their own in its first version; the second has both ways in one).
#
# **What hides them?** Nothing that comes next: experts wait for the tokens, and the next layer waits for the answers.
# Something else must compute meanwhile. The shared expert needs no route (Megatron-Core, `--moe-shared-expert-overlap`). Or
# the buffer is cut, and one part travels while the experts have another (Tutel, `a2a_ffn_overlap_degree`); each product
# is smaller then. Or it is another micro-batch: the pairs of chapter 12. None of it is free, since kernels that send take
# multiprocessors from those that multiply: 20 of an H800's 132 in DeepSeek-V3 (section 3.2 of its report; the second
# DeepEP says that it needs 4 to 6). refimpl waits.
#
# ## 7. Break it
#
# **Experts averaged with strangers.** The famous bug: data-parallel code that was there before all-reduces *all* gradients
# over *all* ranks. Names and shapes fit, for expert 0 of rank 0 and expert 0 of rank 1 are both the first in their lists.

# %% tags=["hide-input"]
predict(
    "4 ranks, one expert each, all gradients averaged over all ranks. What do you see in 12 steps of AdamW?",
    "the loss falls, and all experts move alike",
    options=[
        "an error: the shapes do not fit",
        "the loss does not fall",
        "the loss falls, and all experts move alike",
        "NaN",
    ],
    why="A mean over strangers is still a descent direction for what experts have in common. They stop being different.",
)


# %%
# %%ranks 4
def trained(strangers):
    """First and last loss; whether all ranks' experts have the same momentum after 12 steps."""
    torch.manual_seed(0)
    model = mixtures(GPT(config), 4, Routing(k=1), balance=0.1)
    axes = Axes.of_data(group).with_experts(4)
    expert_parallel(model, axes)
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-3)
    experts = [p for layer in layers(model) for p in layer.experts.parameters()]
    known = set(experts)
    losses = []
    for step in range(12):
        loss = model(*batches.batch(step, rank))
        loss.backward()
        for p in model.parameters():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            over = axes.expert_data if p in known and not strangers else group
            over.all_reduce(p.grad)
            p.grad /= group.size
        adamw.step()
        adamw.zero_grad()
        losses.append(sum(group.all_gather_object(loss.item())) / 4)
    momenta = group.all_gather_object([adamw.state[p]["exp_avg"] for p in experts])
    alike = all(all(map(torch.equal, momenta[0], other)) for other in momenta)
    return losses[0], losses[-1], alike


for name, strangers in {"right": False, "over all ranks": True}.items():
    first, last, alike = trained(strangers)
    print(f"{name:15} loss falls: {last < first}, all experts move alike: {alike}")

# %% [markdown]
# No message, and a loss that looks like training: four experts become one expert plus four initial values. The check
# that finds it: after the averaging, an expert's gradients must be *equal* on the ranks that have it and *different* on
# the others. DeepSpeed knows experts by a mark, `param.allreduce = False`, which a wrapped, copied or re-made parameter
# loses. fairseq has the question from the other side: experts skipped by the all-reduce altogether
# ([issue 4220](https://github.com/facebookresearch/fairseq/issues/4220)).
#
# **A capacity of one's own.** Fixed buffers $[E, C, M]$ need the same $C$ everywhere. Computed from a rank's own tokens, it
# differs as soon as one rank's last batch is shorter:

# %% tags=["raises-exception", "nbval-ignore-output"]
# %%ranks 4
import math

T = 40 if rank == 3 else 64
C = math.ceil(1.25 * T / 8)
slots = torch.zeros(8 * C, 16)
out = torch.empty_like(slots)
group.all_to_all(out, slots)

# %% [markdown]
# Here the ranks compare what they are about to do. NCCL does not, it waits; torch does under
# `TORCH_DISTRIBUTED_DEBUG=DETAIL`. DeepSpeed's
# [issue 6809](https://github.com/deepspeedai/DeepSpeed/issues/6809) is this, found after capacities of 3 and 4 were
# printed; Tutel's [issue 173](https://github.com/microsoft/Tutel/issues/173) too. The cure is one number, the largest of
# all ranks (`agreed_capacity`), or uneven parts. The same hang has a third form: a rank without tokens that leaves early,
# or an expert without tokens, whose hooks ZeRO-3 never sees
# ([issue 4808](https://github.com/deepspeedai/DeepSpeed/issues/4808)).
#
# **A gate in bf16.** `model.bfloat16()` makes the gate bf16 too. Of 4096 tokens, each to 6 of 64
# experts, how many go elsewhere?

# %%
from torch.nn import functional as F

torch.manual_seed(0)
x, weight = torch.randn(4096, 256), torch.randn(64, 256) / 16
right = F.linear(x, weight).softmax(1).topk(6)[1].sort(1)[0]
low = F.linear(x.bfloat16(), weight.bfloat16()).softmax(1).topk(6)[1].sort(1)[0]
differ = (low != right).any(1).float().mean().item()
print(f"more than one token in a hundred: {differ > 0.01}")

# %% [markdown]
# A gate in bf16 sees ties that are none, and whoever computes the layer again (activation checkpoints, the trainer beside
# the inference engine in reinforcement learning) may break them otherwise: then forward and backward used different
# experts. Gates are fp32: Switch's "selective precision" (section 2.4), `router_dtype` of its model in transformers,
# `.float()` in DeepSpeed's `TopKGate`. So is section 5's bias: in bf16 one that has reached 0.5 no longer feels a step of
# 0.001. (DeepSpeed since 0.19.8 keeps in fp32 the buffers that a model of transformers names for it.)
#
# ## 8. Prove it
#
# - **Exercises:** [exercises/15_moe](../exercises/15_moe/exercise.py): `pytest exercises/15_moe`
# - **Quiz:** `refimpl quiz --topic parallelism`, `refimpl quiz --topic advanced`, or `Quiz("parallelism")` of
#   `refimpl.notebook` in a cell
# - **Tests behind this chapter:** [test_gates.py](../tests/model/test_gates.py) and
#   [test_moe.py](../tests/model/test_moe.py) (loops, GShard's dense form, transformers' blocks),
#   [test_expert.py](../tests/parallel/test_expert.py) (bits at every ep, bytes),
#   [test_experts.py](../tests/zero/test_experts.py) (every ZeRO stage), [test_mixture.py](../tests/plan/test_mixture.py)
#   (published sizes).
# - **Code:** [gates.py](../refimpl/model/gates.py), [routes.py](../refimpl/model/routes.py),
#   [moe.py](../refimpl/model/moe.py), [experts.py](../refimpl/model/experts.py),
#   [dispatch.py](../refimpl/parallel/expert/dispatch.py), [exchange.py](../refimpl/parallel/expert/exchange.py),
#   [swap.py](../refimpl/parallel/expert/swap.py), [zero/experts.py](../refimpl/zero/experts.py).
# - **DeepSpeed:**
#   [deepspeed/moe/sharded_moe.py](https://github.com/deepspeedai/DeepSpeed/blob/master/deepspeed/moe/sharded_moe.py).
# - **Papers:** Shazeer et al. 2017, [arXiv:1701.06538](https://arxiv.org/abs/1701.06538). Lepikhin et al. 2020,
#   [arXiv:2006.16668](https://arxiv.org/abs/2006.16668) (GShard). Fedus et al. 2021,
#   [arXiv:2101.03961](https://arxiv.org/abs/2101.03961) (Switch). Rajbhandari et al. 2022,
#   [arXiv:2201.05596](https://arxiv.org/abs/2201.05596) (DeepSpeed-MoE). Zoph et al. 2022,
#   [arXiv:2202.08906](https://arxiv.org/abs/2202.08906) (ST-MoE). Zhou et al. 2022,
#   [arXiv:2202.09368](https://arxiv.org/abs/2202.09368) (expert choice). Hwang et al. 2022,
#   [arXiv:2206.03382](https://arxiv.org/abs/2206.03382) (Tutel). Gale et al. 2022,
#   [arXiv:2211.15841](https://arxiv.org/abs/2211.15841) (MegaBlocks). Jiang et al. 2024,
#   [arXiv:2401.04088](https://arxiv.org/abs/2401.04088) (Mixtral). Wang et al. 2024,
#   [arXiv:2408.15664](https://arxiv.org/abs/2408.15664) (the bias). DeepSeek-AI 2024,
#   [arXiv:2412.19437](https://arxiv.org/abs/2412.19437) (DeepSeek-V3).
