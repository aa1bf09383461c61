# %% [markdown]
# # 11 · Tensor parallelism: one layer on several ranks
#
# ZeRO keeps the weights in parts and brings them together wherever a layer computes. This chapter does the opposite:
# the weights stay where they are, every rank computes its part of each layer, and what travels are activations. You
# derive what must travel, build the two functions that send it, split a GPT from outside, and count what a rank keeps,
# sends and rounds. You need chapters 01 and 07.

# %% [markdown]
# ## 1. The pain: one layer, whole
#
# ZeRO-3 divides what rests. What *computes* is whole on every rank: a layer's weights are gathered before it runs, and in
# backward its gradients are whole as well. For one layer of a transformer of width $w$, with $12 w^2$ parameters in
# bf16, on 8 ranks:

# %%
# %load_ext refimpl.notebook

# %%
import pandas as pd

from refimpl.notebook.widgets_tensor import layer_parameters, sent_bytes
from refimpl.model.gpt import GPTConfig

# Widths of GPT-3 (arXiv:2005.14165, table 2.1, where 13B has 5140) and of Megatron-LM's largest model
# (arXiv:2104.04473, table 1).
WIDTHS = {"GPT-3 13B": 5120, "GPT-3 175B": 12288, "Megatron 1T": 25600}
N, TOKENS = 8, 2048
rows = {}
for name, width in WIDTHS.items():
    weights = 2 * layer_parameters(width, 1)
    config = GPTConfig(vocab=1, context=TOKENS, width=width, layers=1, heads=width // 128)
    rows[name] = [
        f"{weights / 1e9:.2f}",
        f"{2 * weights / 1e9:.2f}",
        f"{3 * weights * (N - 1) / N / 1e9:.2f}",
        f"{sent_bytes(config, 1, N) / 1e9:.2f}",
    ]
pd.DataFrame.from_dict(
    rows,
    orient="index",
    columns=["weights, GB", "and gradients", "ZeRO-3 sends", "this chapter sends"],
)

# %% [markdown]
# The third column is two gathers of the weights and a reduce-scatter of their gradients, for one micro-batch. The last
# one is what this chapter will send instead, for a sequence of 2048 tokens. It has no $w^2$ in it. (By then each of the 8
# ranks of ZeRO-3 has read a sequence, and a split layer one in all. So for the same batch the last column is 8 times as
# large, and still the smaller one.) Counted, on a small layer in fp32:

# %%
# %%ranks 4
from refimpl.measure.memory import MemoryMeter
from refimpl.model.gpt import Block, GPTConfig
from refimpl.zero.config import ZeroConfig
from refimpl.zero.zero3 import Zero3

layer = Block(GPTConfig(context=32, width=64, layers=2, heads=4))
parameters = sum(p.numel() for p in layer.parameters())
one_unit = ZeroConfig(param_persistence_threshold=0, leaf_modules=("Block",))
stage = Zero3(layer, torch.optim.AdamW(layer.parameters()), group, one_unit)
gathered = []
layer.mlp.register_forward_pre_hook(
    lambda *_: gathered.append(MemoryMeter(stage.tensors).now()["gathered"])
)
for _ in range(2):
    group.ledger.reset()
    stage.backward(stage.model(torch.randn(2, 32, 64)).square().mean())
sent = group.ledger.sent_bytes("tag")
print(f"{4 * parameters:,} bytes of weights; gathered while it computes: {gathered[-1]:,}")
print(f"sent: {sent['parameters']:,} for weights, {sent['gradients']:,} for gradients")

# %% [markdown]
# Two more things are not divided by ZeRO. The **work**: each rank computes whole layers for samples of its own, so a
# batch of 100 sequences keeps at most 100 ranks busy. And the **time of one sequence**: with 8 ranks a single forward is as
# slow as with one. Whoever answers a user token by token waits for every layer in turn, and only a split *within* the
# layer makes that shorter.

# %% tags=["hide-input"]
from refimpl.notebook import predict

predict(
    "ZeRO-3 sends 3 x 24 w^2 bytes for a layer, whatever the batch. Splitting the layer will send 16 w bytes for each "
    "token (both times (N - 1) / N). For w = 12288: from how many tokens in a micro-batch on does ZeRO-3 send less?",
    72 * 12288**2 / (16 * 12288),
    unit="tokens",
    why="72 w^2 = 16 w n gives n = 4.5 w. Large batches favour moving weights, small ones moving activations.",
)

# %% [markdown]
# ## 2. The idea: columns, then rows
#
# An MLP is $Z = \mathrm{GELU}(XA)\,B$. There are two ways to cut the first matrix. By **rows**, each rank has a part of
# every sum, and the parts must be added before GELU can be applied. By **columns**, each rank has some of the features,
# whole ones:
#
# $$X\,[A_1, A_2] = [XA_1,\; XA_2] \qquad\text{and then}\qquad
# [Y_1, Y_2]\begin{bmatrix}B_1\\ B_2\end{bmatrix} = Y_1B_1 + Y_2B_2 .$$
#
# What a column cut leaves behind, a row cut takes as it is. So the pair needs one sum, at its end.
#
# ```mermaid
# flowchart LR
#   X["X<br/>whole"] --> f((f))
#   f --> A1["Y1 = GELU(X A1)"] --> B1["Y1 B1"] --> g((g))
#   f --> A2["Y2 = GELU(X A2)"] --> B2["Y2 B2"] --> g
#   g --> Z["Z<br/>whole"]
# ```
#
# In one process, with the parts in a list:

# %%
import torch
import torch.nn.functional as F

torch.set_num_threads(1)
torch.manual_seed(0)
w, h, t = 64, 256, 4
X, A, B = torch.randn(8, w), torch.randn(w, h) / 8, torch.randn(h, w) / 16
Z = F.gelu(X @ A) @ B

Y = [F.gelu(X @ part) for part in A.chunk(t, dim=1)]
columns_then_rows = sum(y @ part for y, part in zip(Y, B.chunk(t, dim=0), strict=True))
parts = [x @ part for x, part in zip(X.chunk(t, dim=1), A.chunk(t, dim=0), strict=True)]
print("columns, then rows:         ", torch.allclose(columns_then_rows, Z, atol=1e-5))
print("rows, GELU of the sum:      ", torch.allclose(F.gelu(sum(parts)) @ B, Z, atol=1e-5))
print("rows, GELU before the sum:  ", torch.allclose(sum(map(F.gelu, parts)) @ B, Z, atol=1e-5))

# %% [markdown]
# **Backward** is the mirror image. $X$ went into all $N$ parts, so its gradient is a sum over them,
# $\mathrm{d}X = \sum_i \mathrm{d}U_i\, A_i^{\mathsf T}$ (with $U_i = XA_i$): one more all-reduce, at the other end. The
# gradient of $Z$ is whole on every rank, and $\mathrm{d}Y_i = \mathrm{d}Z\, B_i^{\mathsf T}$ needs nothing from anybody.
# The places have names since Megatron-LM (Shoeybi et al. 2019):
#
# | | forward | backward |
# |---|---|---|
# | **f**, where $X$ enters | nothing | all-reduce |
# | **g**, where $Z$ leaves | all-reduce | nothing |
#
# Attention has the same form. Its columns are **heads**: a head's queries, keys and values are on one rank, softmax needs
# nothing from other heads, and the output projection is cut by rows.

# %% tags=["hide-input"]
predict(
    "A layer is attention and an MLP. How many all-reduces is that, forward and backward together?",
    4,
    unit="all-reduces",
    why="One g and one f for attention, one g and one f for the MLP: two in forward, two in backward.",
)

# %% [markdown]
# ## 3. Build it
#
# The same on four real ranks, with g and without f. Every rank makes the same whole matrices and uses its part.

# %% tags=["hide-input"]
predict(
    "f is left out: X goes straight into each rank's part. Z comes out right. And the gradient of X on a rank?",
    "a part of a sum, another on each rank",
    options=[
        "right, as Z is",
        "a part of a sum, another on each rank",
        "4 times too large",
        "an error in backward",
    ],
    why="Each rank knows what it did with X itself. All layers below then train on partial gradients, silently.",
)

# %%
# %%ranks 4
import torch.nn.functional as F

torch.manual_seed(0)
w, h = 64, 256
X, A, B = torch.randn(8, w), torch.randn(w, h) / 8, torch.randn(h, w) / 16
slope = torch.randn(8, w)  # the gradient of Z, equal on all ranks
mine = slice(rank * h // 4, (rank + 1) * h // 4)

whole = X.clone().requires_grad_()
Z = F.gelu(whole @ A) @ B
Z.backward(slope)

x = X.clone().requires_grad_()
part = F.gelu(x @ A[:, mine]) @ B[mine]
total = part.detach().clone()
group.all_reduce(total)
part.backward(slope)
gradients = sum(group.all_gather_object(x.grad))
print("Z:", torch.allclose(total, Z, atol=1e-5))
print("gradient of X:", torch.allclose(x.grad, whole.grad, atol=1e-5))
print("the ranks' gradients, added:", torch.allclose(gradients, whole.grad, atol=1e-5))

# %% [markdown]
# So f is needed, and autograd does not know of it: a collective is not recorded. **Your turn.** (Its mirror image,
# `leave`, is the next exercise; `%hint 11_tensor_parallel enter` helps.)


# %%
# %%task 11_tensor_parallel enter
def enter(x: Tensor, group: Group) -> Tensor:
    """Where a whole tensor enters layers that are split over the ranks: x itself.

    Megatron-LM calls it f. x is equal on all ranks, of any shape and dtype, contiguous or not.
    In backward each rank has the gradient of what it alone computed from the result; what goes
    on is their sum, by one all-reduce. Forward sends nothing. The gradient that arrives may
    belong to somebody else too: it keeps its values. So do x and its other uses.
    """
    raise NotImplementedError("enter")


# %% [markdown]
# "Contiguous or not" has a reason: `all_reduce(grad.contiguous())` sums a copy, and the gradient goes on as it came.
#
# How do you know that a pair is right, without another implementation? By the definition of a transpose. Take the tensors
# of all ranks as one long vector. Then f copies a vector $N$ times, which is a linear map, and a gradient goes through its
# transpose. For any map and any $x$, $y$: $\langle f(x), y\rangle = \langle x, f^{\mathsf T}(y)\rangle$. In whole
# numbers, so that both sides are exact:

# %%
# %%ranks 4
from refimpl.parallel.conjugates import gather_sum, sum_scatter


def transposed(f, x):
    """Whether <f(x), y> = <x, f'(y)>, summed over the ranks."""
    x.requires_grad_()
    fx = f(x, group)
    y = torch.randint(-3, 4, fx.shape).float()
    (back,) = torch.autograd.grad(fx, x, y)
    sides = group.all_gather_object(((fx * y).sum().item(), (x * back).sum().item()))
    return sum(left for left, _ in sides) == sum(right for _, right in sides)


torch.manual_seed(rank)
print("all-gather and reduce-scatter:", transposed(gather_sum, torch.ones(2, 3, 5)))
print("reduce-scatter and all-gather:", transposed(sum_scatter, torch.ones(2, 12, 5)))

# %% [markdown]
# (For f and g themselves the x, or the y, is one vector that all ranks hold, so it counts once:
# [test_conjugates.py](../tests/parallel/test_conjugates.py) does that.)
#
# **Heads.** A fused layer computes queries, keys and values by one matrix: all heads of q, below them all of k, then v.

# %% tags=["hide-input"]
predict(
    "4 heads, fused as q, k, v. Four ranks each take a quarter of the matrix's rows, in order. What has rank 0?",
    "three heads of queries, and nothing else",
    options=[
        "head 0: its q, k and v",
        "three heads of queries, and nothing else",
        "all queries",
    ],
    why="12 runs of rows, 3 a rank. Shapes fit, nothing fails, and the model computes something else.",
)

# %%
from refimpl.parallel.split import Split

runs = [f"{what}{head}" for what in "qkv" for head in range(4)]
fused, heads = Split((12,), 12, 4), Split((4, 4, 4), 4, 4)  # one block; three blocks cut alike
frame = {
    f"rank {r}": [
        " ".join(run for span in how.spans(r) for run in runs[span]) for how in (fused, heads)
    ]
    for r in range(4)
}
pd.DataFrame.from_dict(frame, orient="index", columns=["cut as one", "each of q, k, v cut"])

# %% [markdown]
# `cut_qkv` in the exercises does this with fewer heads of keys than of queries (grouped-query attention, GQA). Now a
# whole GPT. refimpl swaps its layers from outside, by a plan of names; the model's own code knows nothing of it.

# %%
# %%ranks 4
from refimpl.model.data import Batches, corpus
from refimpl.model.gpt import GPT, GPTConfig
from refimpl.parallel.styles import Tokens, gpt_plan
from refimpl.parallel.swap import parallelize

config = GPTConfig(vocab=256, context=32, width=64, layers=2, heads=4)
batches = Batches(corpus(), context=32, size=2)


def make(dtype=torch.float32, plan=None, sequence=False):
    """A whole GPT, and the same one split."""
    torch.manual_seed(0)
    whole = GPT(config).to(dtype)
    torch.manual_seed(0)
    plan = plan or gpt_plan(config.heads, config.vocab)
    return whole, parallelize(GPT(config).to(dtype), plan, group, sequence=sequence)


whole, split = make()
tokens, targets = batches.batch(0, 0)  # the same on every rank
one, other = whole(tokens, targets), split(tokens, targets)
print(f"loss {one:.2f}, split {other:.2f}")
if rank == 0:
    for name, layer in {"whole": whole.blocks[0], "split": split.blocks[0]}.items():
        up, down = layer.mlp.up, layer.mlp.down
        print(f"{name}: up {tuple(up.weight.shape)}, down {tuple(down.weight.shape)},", end=" ")
        print(f"bias of down {tuple(down.bias.shape)}")

up = whole.blocks[0].mlp.up.weight.chunk(4)[rank]
print("drawn as the whole was:", torch.equal(split.blocks[0].mlp.up.weight, up))

# %% [markdown]
# The last line is about **initialisation**. One seed draws the whole matrix, and each rank keeps its part, so the model
# is the same at any number of ranks. The two shortcuts give something up. With one seed for all, each drawing its own
# part, all parts are equal, and $N$ ranks compute the same features $N$ times: that is a bug. With a seed a rank,
# Megatron-LM's default on GPUs, the model is sound, but another at every $N$.

# %% [markdown]
# ## 4. Read it
#
# In refimpl one class is all pairs. It is given the two directions, and its backward is itself with the two exchanged:

# %%
from refimpl.notebook import show
from refimpl.parallel import conjugates

show.source(conjugates.Conjugate)

# %% [markdown]
# torch has tensor parallelism of its own, **DTensor**: a tensor that knows how it lies on a mesh of ranks, as `Replicate`,
# `Shard(dim)` or `Partial` (a sum whose parts are still to be added). Nobody writes f and g there. A product of a replicated
# with a sharded tensor *is* partial, and going from partial to replicated is an all-reduce. Does it send the same? Its own
# counter, on the same MLP:

# %%
# %%ranks 4
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

torch.manual_seed(0)
mlp = nn.Sequential(nn.Linear(w, h), nn.GELU(), nn.Linear(h, w))
mesh = init_device_mesh("cpu", (4,))
parallelize_module(mlp, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
x = torch.randn(8, w, requires_grad=True)
with CommDebugMode() as forward:
    z = mlp(x)
with CommDebugMode() as backward:
    z.sum().backward()
print("forward:", forward.get_total_counts(), "| backward:", backward.get_total_counts())
print("the first weight:", mlp[0].weight.placements, tuple(mlp[0].weight.to_local().shape))

# %% [markdown]
# One and one. The three ways beside each other:
#
# | | refimpl | torch `parallelize_module` | Megatron-LM |
# |---|---|---|---|
# | how a model is split | layers swapped from outside, by a plan | parameters become DTensors, by a plan | built of split layers |
# | f and g | called by the layers | follow from placements | called by the layers |
# | fused q, k, v | blocks, each cut by itself | one run a rank: keep them apart | stored head group by head group, so that one run is right |
# | what does not divide | one unit more on the first ranks | shorter or empty shards on the last | refused; the vocabulary is padded |
# | the loss | three numbers a row | `loss_parallel()`, the same idea | three numbers a row |
# | sequence parallelism (section 5) keeps a column layer's input | whole | whole | $1/N$, gathered again in backward |
# | an all-reduce in backward | waited for | waited for; of sequence parallelism's halves `torch.compile` can send slices beside the product (async TP) | beside the weight's gradient |
# | dropout where split (section 6) | a second stream, `Draws` | one stream, each rank at its own offset | a second stream; the same in all replicas |
#
# The number of ranks that share a layer is the **TP size**: `--tensor-model-parallel-size` in Megatron-LM (with
# `--sequence-parallel`), `"tensor_parallel": {"autotp_size": N}` in DeepSpeed's JSON. (Megatron-LM:
# `megatron/core/tensor_parallel/layers.py`, `random.py`. torch: `torch/distributed/tensor/parallel/style.py`,
# `torch/distributed/tensor/_random.py`.)

# %% [markdown]
# ## 5. Measure it
#
# **Traffic.** One layer of the split GPT, forward and backward, by formula and as the ledger saw it:


# %%
# %%ranks 4
def one_layer(model, length):
    """Calls of the forward; calls and bytes of both, and of whole parameters' gradients."""
    x = torch.randn(2, length, config.width, requires_grad=True)
    group.ledger.reset()
    y = model.blocks[0](x)
    forward = group.ledger.calls()
    y.sum().backward()
    return forward, group.ledger.calls(), group.ledger.sent_bytes("tag")


forward, both, sent = one_layer(split, 32)
print("forward", forward, "| with backward", both)

# %%
from refimpl.plan.transformer import tensor_parallel_sent

config = GPTConfig(vocab=256, context=32, width=64, layers=2, heads=4)
show.compare(
    formula={"tensor": tensor_parallel_sent(config, batch=2, ranks=4, itemsize=4)},
    counted=ranks.pull("sent")[0],
)

# %% [markdown]
# For 64 tokens that is less than the 301,056 + 150,528 = 451,584 bytes that ZeRO-3 has sent for the same layer in
# section 1 (whose unit is padded a little). At $4.5\,w = 288$ tokens both would be about equal.
#
# **The vocabulary.** At the end of the model stands its largest tensor: logits, $n$ tokens by $V$ words. The head is a
# column layer, so a rank has $V/N$ of each row. `cross_entropy` wants whole rows. Does it?
#
# $$\text{loss} = \log \sum_v e^{z_v - m} + m - z_{\text{target}}, \qquad m = \max_v z_v$$

# %% tags=["hide-input"]
predict(
    "How many numbers must the ranks exchange for a row of the loss, forward and backward together?",
    3,
    unit="numbers",
    why="The maximum, the sum, and the target's logit. Backward: the probability minus one at the target, known locally.",
)

# %% [markdown]
# **Your turn**; it is asked in interviews, too.


# %%
# %%task 11_tensor_parallel vocab_cross_entropy
def vocab_cross_entropy(
    logits: Tensor,
    targets: Tensor,
    first: int,
    group: Group,
    ignore_index: int = -100,
) -> Tensor:
    """F.cross_entropy(whole logits, targets, ignore_index=ignore_index), of which each rank has
    some columns.

    logits [n, v]: the tokens first to first + v - 1 of V, fp32 or bf16; targets [n] int64,
    equal on all ranks -> an fp32 scalar, the mean over the rows that count, equal on all ranks;
    0 with zero gradients if none does.

        loss of a row = log(sum over v of exp(z_v - m)) + m - z_target

    where m is the row's maximum, so that exp is at most 1.

    Three numbers a row travel, fp32: the maximum, the sum, the target's logit (0 from the ranks
    that have not got it). Write a torch.autograd.Function: backward sends nothing, d loss of a
    row / d z_v = exp(z_v - m) / sum - [v is the target], in the logits' dtype. At most one
    tensor of n v fp32 numbers is kept for it, and not changed: with retain_graph it can be
    called again. Nothing is as large as n V, and logits and targets keep their values.
    """
    raise NotImplementedError("vocab_cross_entropy")


# %% [markdown]
# Counted on refimpl's, beside a loss that gathers its rows: bytes sent, and the largest tensor that was ever made.

# %%
# %%ranks 4
from torch.utils._python_dispatch import TorchDispatchMode

from refimpl.parallel.conjugates import gather
from refimpl.parallel.vocabulary import VocabParallelLoss


class Largest(TorchDispatchMode):
    """Bytes of the largest result of an operation."""

    nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.nbytes = max(self.nbytes, result.nbytes)
        return result


n, V = 512, 4096
torch.manual_seed(1)
logits, wanted = torch.randn(n, V), torch.randint(V, (n,))
mine = logits.chunk(4, dim=1)[rank].clone()
in_parts = VocabParallelLoss(V, group)
found = {}
for name, loss in {
    "rows gathered": lambda z: F.cross_entropy(gather(z, group), wanted),
    "in parts": lambda z: in_parts(z, wanted),
}.items():
    group.ledger.reset()
    with Largest() as largest:
        value = loss(mine.clone().requires_grad_())
        value.backward()
    found[name] = [sum(group.ledger.sent_bytes().values()), largest.nbytes]
    print(f"{name:14} loss {value:.4f}")

# %%
pd.DataFrame.from_dict(
    ranks.pull("found")[0], orient="index", columns=["bytes sent", "largest tensor, bytes"]
)

# %% [markdown]
# The embedding is the same table, cut by rows: a rank gives zeros for the words that it has not got, and g adds
# (`vocab_embedding` in the exercises). Embedding and head are cut alike, so a tied weight needs nothing more.
#
# **Activations.** Chapter 07 (`07_activations`) counted 16 tensors of $B\,T\,w$ that a layer keeps for backward. Split
# by 4, the 12 inside attention and MLP become 3. The other 4, inputs of norms and of column layers, are whole on every
# rank. **Sequence parallelism** (Korthikanti et al. 2022) goes on there: between g and the next f each rank works on
# $T/N$ of the *tokens*. An all-reduce is a reduce-scatter followed by an all-gather, so g becomes the first half, f the
# second, and norm, dropout and residual stand between the halves. (DeepSpeed-Ulysses is called sequence parallelism
# too. It is another thing, an axis of its own: chapter 13.)

# %% tags=["hide-input"]
predict(
    "4 ranks, sequence parallelism, f and g in halves. What happens to the bytes that a layer sends?",
    "the same bytes, in twice as many calls",
    options=[
        "half",
        "the same bytes, in twice as many calls",
        "half as many again",
        "twice as many",
    ],
    why="Each of the four all-reduces is replaced by the two halves that it consists of.",
)

# %%
# %%ranks 4
from torch.autograd.graph import saved_tensors_hooks


def kept(model, length):
    """Bytes that autograd keeps of one layer."""
    saved = []

    def keep(t):
        saved.append(t)
        return t

    block = model.blocks[0]
    with saved_tensors_hooks(keep, lambda t: t):
        block(torch.randn(2, length, config.width, requires_grad=True))
    weights = {p.untyped_storage().data_ptr() for p in block.parameters()}
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in saved}
    return sum(size for address, size in storages.items() if address not in weights)


_, tokenwise = make(sequence=True)
forward, both, sent = one_layer(tokenwise, 32 // 4)
counted = {"tensor": kept(split, 32), "sequence": kept(tokenwise, 32 // 4)}
print("forward", forward)
print("sent", sent)

# %%
from refimpl.notebook.widgets_tensor import WAYS, kept_bytes

counted, unit = ranks.pull("counted")[0], 2 * 32 * 64 * 4
rows = {}
for way in WAYS:
    formula = sum(kept_bytes(config, 2, ranks=4, way=way, itemsize=4).values())
    rows[way] = [formula, counted.get(way, "-"), f"{formula / unit:.1f}"]
pd.DataFrame.from_dict(
    rows, orient="index", columns=["formula", "counted", "in tensors of B T w"]
)

# %% [markdown]
# The bytes of the activations (`tensor`) are the same as before; `whole parameters` are the gradients of norms and of row
# biases, which now see a rank's tokens only: section 6. And the memory? $16/4 = 4$ was hoped for, and 5.5 is counted. A
# column layer needs *all tokens* of its input for the gradient of its weight, so autograd keeps what was gathered, two
# tensors a layer. The last line is the cure: keep the $1/N$, gather once more in backward, 1.25 times the bytes. Megatron-LM
# does so, beside the product for the input's gradient. refimpl does not; you do, in `gathered_linear`.
#
# **Bits.** ZeRO's strategies gave the weights of one process bit for bit. Does this?

# %% tags=["hide-input"]
predict(
    "fp32, no dropout, the same initial weights. Which part of a split layer rounds otherwise than the whole one?",
    "the row layer",
    options=["neither", "the column layer", "the row layer", "both"],
    why="A column layer computes fewer dot products, each whole. A row layer cuts every dot product in N, and adds the parts.",
)

# %%
# %%ranks 4
whole, split = make()
x = torch.randn(2, 32, 64, generator=torch.Generator().manual_seed(5))
with torch.no_grad():
    hidden = whole.blocks[0].mlp.up(x)
    part = split.blocks[0].mlp.up(x)
    print("column layer, same bits:", torch.equal(part, hidden.chunk(4, dim=-1)[rank]))
    down, bits = whole.blocks[0].mlp.down, torch.finfo(torch.float32).eps
    difference = (split.blocks[0].mlp.down(part) - down(hidden)).abs()
    bound = 2 * 256 * bits * F.linear(hidden.abs(), down.weight.abs(), down.bias.abs())
    print("row layer, same bits:", bool((difference == 0).all()), end=", ")
    print("within the bound:", bool((difference <= bound).all()))
    by_hand = sum(group.all_gather_object(F.linear(part, split.blocks[0].mlp.down.weight)))
    same = torch.equal(split.blocks[0].mlp.down(part), by_hand + down.bias)
    print("row layer, as one process that adds the parts in rank order:", same)
double, halves = make(torch.float64)
with torch.no_grad():
    a, b = double(tokens).chunk(4, dim=-1)[rank], halves(tokens)  # logits
print("in fp64 the logits agree to 12 digits:", bool((a - b).norm() < 1e-12 * a.norm()))

# %% [markdown]
# Two orders of a sum of $K$ products differ by at most $2 K \varepsilon \sum |x\,w|$ (Higham). That is a bound with a reason,
# which a tolerance is not. And in fp64 rounding is $2^{29}$ times smaller, while a wrong formula stays as wrong as it was:
# that is how to tell one from the other.
#
# **Time.** Every all-reduce here is in the critical path: the next layer needs its result. (In backward the weight's
# gradient can be computed meanwhile; in forward there is nothing else to do.) For one layer a rank computes
# $72\,w^2 n / N$ operations and sends $16\,w n (N-1)/N$ bytes, so

# %% tags=["hide-input"]
predict(
    "You double the micro-batch. What share of the time goes into the all-reduces, if a message's fixed price is small?",
    "the same",
    options=["half of it", "the same", "twice as much"],
    why="72 w^2 n / N operations and 16 w n (N - 1) / N bytes: n cancels. It is 4.5 w / (N - 1) operations a byte.",
)

# %% [markdown]
# $4.5\,w/(N-1)$ operations a byte, whatever the batch. Only a wider model or fewer ranks help. In the alpha-beta model of
# chapter 01 (`01_collectives`): ring all-reduces of a sequence of 4096 tokens, width 8192, bf16. Assumed, not measured
# here: an H100 at half of its 990 TFLOP/s, 450 GB/s in each direction by NVLink and 50 GB/s by a 400 Gbit/s network (the
# vendor's data sheets), a message's fixed price of 3 and 10 microseconds.

# %%
from refimpl.plan.time import Link, ring_all_reduce_seconds

width, n, speed = 8192, 4096, 990e12 / 2
LINKS = {"NVLink": Link(3e-6, 450e9), "network": Link(10e-6, 50e9)}
rows = {}
for t in (2, 4, 8, 16, 32):
    compute = 72 * width**2 * n / t / speed
    send = [4 * ring_all_reduce_seconds(2 * n * width, t, link) for link in LINKS.values()]
    shares = [f"{s / (compute + s):.0%}" for s in send]
    rows[t] = [f"{compute * 1e3:.1f}", *(f"{s * 1e3:.1f}" for s in send), *shares]
columns = [
    "compute, ms",
    *(f"{link}, ms" for link in LINKS),
    *(f"share, {link}" for link in LINKS),
]
pd.DataFrame.from_dict(rows, orient="index", columns=columns).rename_axis("ranks")

# %% [markdown]
# That is why tensor parallelism stays where NVLink is, which mostly means inside a node of 8. From there on the other
# axes take over: their traffic is rarer (a pipeline's), or can hide (ZeRO's gradients). Width helps twice, for a
# product of matrices that has become $1/N$ as wide also runs less efficiently, which this model does not know.
#
# Turn the knobs: what one layer weighs (state with AdamW and fp32 masters, 16 bytes a parameter) and sends.

# %% tags=["hide-input"]
from refimpl.notebook.widgets_tensor import layer_knobs

layer_knobs()

# %% [markdown]
# ## 6. Break it
#
# **The forgotten sum.** Under sequence parallelism a norm sees a rank's own tokens. Its weights are whole on every rank,
# its gradient is a part of a sum. In refimpl `Tokens()` in the plan adds the parts. Take those lines out of it:

# %% tags=["hide-input"]
predict(
    "Norms' gradients are not summed over the tensor ranks. 12 steps of AdamW. What do you see in the loss?",
    "it falls, almost as it should",
    options=["NaN", "it stays where it is", "it falls, almost as it should", "the ranks hang"],
    why="AdamW divides by the gradient's size, so a part of it still gives a plausible step. Only the copies drift apart.",
)

# %%
# %%ranks 4
plan = gpt_plan(config.heads, config.vocab)
broken = {name: style for name, style in plan.items() if not isinstance(style, Tokens)}


def trained(plan):
    """Losses of 12 steps; whether the ranks' copies of all whole weights are still equal."""
    _, model = make(plan=plan, sequence=True)
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(12):
        loss = model(*batches.batch(step, 0))
        loss.backward()
        adamw.step()
        adamw.zero_grad()
        losses.append(loss.item())
    norms = [p.detach() for name, p in model.named_parameters() if "ln" in name]
    copies = group.all_gather_object(norms)
    return losses, all(all(map(torch.equal, mine, copies[0])) for mine in copies)


for name, how in {"whole plan": plan, "without Tokens()": broken}.items():
    losses, equal = trained(how)
    print(
        f"{name:17} loss {losses[0]:.2f} ... {losses[-1]:.2f}, copies of norms equal: {equal}"
    )

# %% [markdown]
# No error; a loss that nobody would question. The next checkpoint stores rank 0's norms, and the model that is loaded
# from it is none that was trained. In GPT-NeoX the same sum was missing at a larger scale, and was blamed for a loss
# that "falls slower, and ends up flatlining" ([pull request 1257](https://github.com/EleutherAI/gpt-neox/pull/1257));
# with the sum the copies were equal, and the loss still lay flat
# ([1259](https://github.com/EleutherAI/gpt-neox/pull/1259)): something else was wrong too. Megatron-LM's users have
# asked why their norms' gradients differ between ranks
# ([issue 1446](https://github.com/NVIDIA/Megatron-LM/issues/1446)). The check that finds it compares, before the
# optimizer's step, the *gradients* of all replicated parameters across the tensor group: they must be equal to the bit.
#
# **The other dropout.** Outside the split layers all ranks hold the same tensor, and must drop the same elements, or their
# copies of it part. Inside each has other heads, and must not: with one seed all ranks drop the same places of their
# heads. So a rank has two streams of random numbers:

# %%
# %%ranks 4
from refimpl.parallel.draws import Draws

draws = Draws(seed=1, rank=rank)
torch.manual_seed(1)
before = torch.rand(4)
with draws.apart():
    inside = torch.rand(4)
after = torch.rand(4)
seen = group.all_gather_object([before, inside, after])
for name, drawn in zip(["before", "inside", "after"], zip(*seen, strict=True), strict=True):
    print(f"{name:7} different draws: {len({tuple(d.tolist()) for d in drawn})}")
torch.manual_seed(1)
print("as without a split layer:", torch.equal(torch.rand(8), torch.cat([before, after])))

# %% [markdown]
# And with replicas of the whole group, and sequence parallelism? **Your turn:**


# %%
# %%task 11_tensor_parallel dropout_seed
def dropout_seed(
    seed: int,
    place: str,
    data: int,
    tensor: int,
    tensor_ranks: int,
    sequence: bool,
) -> int:
    """The seed of the generator that dropout draws from at a place, on the rank (data, tensor)
    of a mesh.

    place "inside": between a column layer and its row layer, as on attention's scores. There
    each rank of a tensor group has other heads or features, and must drop by other numbers.
    place "outside": on the residual stream. There the ranks of a tensor group hold the same
    tensor and must drop the same elements; but with `sequence` (parallelism) each has other
    tokens. Ranks with another `data` see other samples: their numbers are others everywhere.

    tensor: 0 to tensor_ranks - 1; data: 0 and up. Two generators get one seed only if they must
    draw the same numbers, so for "outside" and "inside" of one rank it is never the same. At
    least `seed`, below 2**63, and the same each time.
    """
    raise NotImplementedError("dropout_seed")


# %% [markdown]
# ## 7. Prove it
#
# - **Exercises:** [exercises/11_tensor_parallel](../exercises/11_tensor_parallel/exercise.py):
#   `pytest exercises/11_tensor_parallel`
# - **Quiz:** `refimpl quiz --topic parallelism`, or `Quiz("parallelism")` of `refimpl.notebook` in a cell
# - **Tests behind this chapter:** [tests/parallel/test_tensor.py](../tests/parallel/test_tensor.py) (bits and bounds, odd
#   sizes, no row of logits), [tests/parallel/test_conjugates.py](../tests/parallel/test_conjugates.py) (transposes, bytes),
#   [tests/parallel/test_swap.py](../tests/parallel/test_swap.py) (a GPT against the unsplit one, four all-reduces or eight
#   halves, torch's DTensor), [tests/notebook/test_widgets_tensor.py](../tests/notebook/test_widgets_tensor.py) (what a
#   layer keeps).
# - **Code:** [split.py](../refimpl/parallel/split.py), [conjugates.py](../refimpl/parallel/conjugates.py),
#   [tensor.py](../refimpl/parallel/tensor.py), [vocabulary.py](../refimpl/parallel/vocabulary.py),
#   [draws.py](../refimpl/parallel/draws.py), [swap.py](../refimpl/parallel/swap.py).
# - **DeepSpeed:**
#   [deepspeed/module_inject/layers.py](https://github.com/deepspeedai/DeepSpeed/blob/master/deepspeed/module_inject/layers.py).
# - **Papers:** Shoeybi et al. 2019, [arXiv:1909.08053](https://arxiv.org/abs/1909.08053), section 3 (columns and rows, f
#   and g, the vocabulary). Korthikanti et al. 2022, [arXiv:2205.05198](https://arxiv.org/abs/2205.05198), section 4.2.2
#   (sequence parallelism). Narayanan et al. 2021, [arXiv:2104.04473](https://arxiv.org/abs/2104.04473) (why inside a
#   node). Higham 2002, Accuracy and Stability of Numerical Algorithms, section 3.1 (rounding).
