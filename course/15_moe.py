# %% [markdown]
# # 15 · Mixture of experts: parameters without FLOPs
#
# ZeRO, tensor parallelism and pipelines divide a model's work. This chapter leaves most of it out: of many MLPs a token
# passes through one or two. You count what that buys, build the gate that chooses, send tokens to ranks that have their
# experts, watch routing collapse on real text and cure it, and find out whose gradients must be averaged with whose.

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
        block.mlp.up, block.mlp.down = Linear(config.width, hidden), Linear(hidden, config.width)
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
# The third row has the parameters of the second and, but for a gate of $2 M E$ operations, the work of the first. How far
# this goes, by formula beside what the papers say, in billions ([mixture.py](../refimpl/plan/mixture.py)):

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
    rows[f"GShard, {blocks} layers"] = [experts, 2, total, whole, active, "-"]
columns = ["experts", "k", "total", "published", "active", "published "]
pd.DataFrame.from_dict(rows, orient="index", columns=columns)

# %% [markdown]
# (GShard's figures are rounded; the table keeps the last of each depth. DeepSeek-V3's 37 leave out the embedding, which is
# a look-up: 0.9.) **What one pays**: memory for all parameters, wherever a token may go; and the way there and back.

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
# The choice itself has no gradient. What the gate learns, it learns through $g_e$: an expert whose answer lowers the loss
# is given more weight, and so is chosen more often. For $k > 1$ most divide the $k$ weights by their sum.

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

    logits [T, E], fp32 or bf16 -> (experts [T, k] int64, the best first; weights [T, k] fp32, with a gradient).
    The probabilities are a softmax over all E in fp32. For k > 1 a token's weights are divided by their sum, as in
    GShard and Mixtral. For k = 1 the weight is the probability itself, as in Switch: divided by itself it would be 1,
    and the gate would learn nothing. Of equal logits the expert with the lower number is taken (torch.topk takes any).
    Example: logits log([0.6, 0.1, 0.3]), k = 2 -> experts [0, 2], weights [2/3, 1/3]; k = 1 -> [0], [0.6].
    """
    raise NotImplementedError("top_k_gate")


# %% [markdown]
# **Gates that people use**, on the same logits of 64 tokens for 8 experts, of which two are popular. An expert's buffer
# has $C = \lceil 1.25\, k\, T / E \rceil$ places (a *capacity factor* of 1.25); who finds none is **dropped**, and goes on
# by the residual connection alone.

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
# tokens try other experts. GShard and DeepSpeed's top-2 draw the *second* expert.
#
# The order in which routes find places matters. GShard seats all first choices before any second one; DeepSpeed's
# `topkgating` keeps those with the highest probability; Switch keeps the first in the batch, so that the end of a
# sequence loses; random token selection draws. (`positions` in the exercises is GShard's.)

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
        rows[f"{way.__name__}, T = {T:,}"] = [flops.get_total_flops(), f"{4 * T * T * M:,}"]
    print(f"T = {T:,}: equal", torch.allclose(found[mix], found[mix_dense], atol=1e-6))
pd.DataFrame.from_dict(rows, orient="index", columns=["FLOPs of moving", "4 T² M"])

# %% [markdown]
# **Dispatch by sorting.** Sort the routes by expert; an expert's rows then lie together, and it multiplies one block of as
# many rows as there are. Nothing is multiplied to move them, nothing is computed for an empty slot. `mix` does that
# (`permute` and `combine` in the exercises). MegaBlocks (Gale et al. 2022) is this idea with one kernel for all
# blocks, of unequal sizes: a **grouped matmul**.
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

    rows [R, M] of any dtype, by expert, as `permute` laid them; counts [E] int64: how many are each expert's
    -> (arrived [R', M]: rank 0's rows for this rank's experts, in their order, then rank 1's, ...;
        sizes [N, E/N] int64: how many rank s sent to this rank's j-th expert).
    Two all-to-alls: E int64 numbers, then the rows in uneven parts. Backward sends each row's gradient back, by one
    all-to-all: it knows the numbers. An expert may get nothing, a rank may have no tokens: it takes part all the same.
    """
    raise NotImplementedError("dispatch")


# %% [markdown]
# What arrives lies by (source, expert). refimpl multiplies these blocks one by one; a grouped matmul would first bring
# each expert's blocks together.
